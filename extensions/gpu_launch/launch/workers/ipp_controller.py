"""The ipyparallel controller of a worker pool or an executor; it and its processes end when the kernel that started it
is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from gpu_launch.worker import processes

#: Starts it, as ipyparallel's `controller_cmd`.
COMMAND = (sys.executable, "-m", "gpu_launch.launch.workers.ipp_controller")
_POLL_S = 0.5  # seconds between checks of the parent


def main() -> None:
    """Run ipcontroller, and watch its parent."""
    parent = os.getppid()
    # It ends its schedulers, which are forks of it, on SIGTERM, but not if SIGTERM comes before its handler is set.
    forking: list[int] = []
    os.register_at_fork(
        before=lambda: forking.append(os.getpid()),
        after_in_parent=forking.clear,
        after_in_child=lambda: processes.die_with_parent(signal.SIGKILL, forking[-1]),
    )
    threading.Thread(target=_watch, args=(parent,), name="kernel watch", daemon=True).start()
    from ipyparallel.controller.app import main as run_controller

    run_controller()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
