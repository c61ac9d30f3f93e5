"""ipyparallel's controller in a notebook: reachable by the user's own containers alone. Goes to /etc/ipython/."""

from gpu_launch import environment
from gpu_launch.common import network

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by traitlets

_own = network.find_own_interface(environment.read().subnet, wait_s=5.0)

# Engines come over the user's private network; clients are in this container.
c.IPController.engine_ip = _own.address
c.IPController.location = _own.address
c.IPController.enable_curve = True
# An engine is known after its first heartbeat: 3 s by default. Gone after 15 s of silence.
c.HeartMonitor.period = 500
c.HeartMonitor.max_heartmonitor_misses = 30
