"""A real slurmctld puts an idle node to sleep and wakes it for a job, with the programs that `gpuhub slurm init` writes.

Everything between Slurm and the switch is real: the programs as the user `slurm`, sudo with its rule, `gpuhub slurm power`
and cluster.toml. The switch, a command of cluster.toml, stops and starts the node's slurmd in place of its machine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.backends.slurm.node_power import find_power
from gpuhub.cli.slurm import build_power_command
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.nodes.power_status import PowerState
from gpuhub.ops.slurm.config_lines import format_lines, format_settings
from gpuhub.ops.slurm.files import SLURM_CONF, ClusterSecrets, InstalledCluster, list_files
from gpuhub.ops.slurm.power import PROGRAMS, build_power_settings, find_slurm_power
from gpuhub.slurm_client.cli import SlurmCliClient
from tests.support.broker.in_process import until
from tests.support.product import wait_for
from tests.support.slurm.site import SlurmSite, slurm_site

pytestmark = [pytest.mark.slurm, pytest.mark.root]

CLUSTER = """
engine = "slurm"
[slurm]
runtime = "plain"
command = "/opt/gpuhub/bin/jupyterhub-singleuser"
[[nodes]]
name = "rig1"
slurm = "sx1"
address = "127.0.0.11"
[[nodes]]
name = "rig2"
slurm = "sx2"
address = "127.0.0.12"
power = {{ on = ["{switch}", "on"], off = ["{switch}", "off"], idle = "1m" }}
[users]
login = "password"
allowed = ["ada"]
[storage]
home = "/home/{{username}}"
[[profiles]]
name = "gpu"
title = "RTX 5090"
gpu_model = "RTX 5090"
"""
#: With `-b` slurmd reports that its machine has just booted.
SWITCH = """#!/bin/sh
export SLURM_CONF={conf}
echo "$1 $GPUHUB_NODE $GPUHUB_NODE_ADDRESS" >>{folder}/switch.log
case $1 in
off) kill "$(cat {folder}/sx2.pid)" ;;
on) exec setsid slurmd -b -N sx2 </dev/null >>{folder}/sx2.out 2>&1 ;;
esac
"""
OFF, ON = "off rig2 127.0.0.12", "on rig2 127.0.0.12"
#: slurmctld runs as root here, and on a site as this user.
AS_SLURM = '#!/bin/sh\nexec setpriv --reuid=slurm --regid=slurm --clear-groups {program} "$@"\n'
#: In place of minutes, seconds; gpuhub's program takes some of them. And how often slurmctld looks for idle nodes.
SHORT: dict[str, object] = {
    "SuspendTime": 3,
    "SuspendTimeout": 15,
    "ResumeTimeout": 60,
    "SlurmctldParameters": "power_save_interval=1,power_save_min_interval=0",
}


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    with slurm_site(port=27900, nodes=(("rtx5090",), ("rtx5070",))) as site:
        save_power(site)
        yield site


def save_power(site: SlurmSite) -> None:
    """Write the power saving of the site as `gpuhub slurm init` does, and let slurmctld read it."""
    cluster_file, switch = site.folder / "cluster.toml", site.folder / "switch"
    cluster_file.write_text(CLUSTER.format(switch=switch))
    write_program(switch, SWITCH.format(conf=site.files.conf, folder=site.folder))
    cluster = settings.load(cluster_file)
    power = find_slurm_power(cluster, ["rig1", "rig2"], build_power_command(Paths("ghpower"), cluster_file))
    assert power is not None
    installed = InstalledCluster(
        name="lab", head_name="localhost", head_address="127.0.0.1", nodes=(), partition="all", power=power
    )
    for file in list_files(installed, ClusterSecrets(munge_key=b""), is_head=True, computes=False):
        if file.mode in {0o755, 0o440}:
            path = site.folder / file.path.relative_to("/")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(file.content)
            path.chmod(file.mode)
    # The site's /etc, where scontrol looks for it.
    (site.folder / SLURM_CONF.relative_to("/")).symlink_to(site.files.conf)
    lines = build_power_settings(power, SLURM_CONF.parent) | SHORT
    assert lines["SuspendExcNodes"] == "sx1"
    for name in PROGRAMS:
        write_program(site.folder / name, AS_SLURM.format(program=lines[name]))
        lines[name] = site.folder / name
    with site.files.conf.open("a") as conf:
        conf.write(format_lines(format_settings(lines)))
    site.ask("scontrol", "reconfigure")


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def switched(site: SlurmSite) -> list[str]:
    """Return the calls of the switch."""
    log = site.folder / "switch.log"
    return log.read_text().splitlines() if log.exists() else []


async def read_power(site: SlurmSite) -> dict[str, PowerState]:
    """Return the nodes' power as gpuhub reads it from Slurm."""
    api = SlurmCliClient(conf=site.files.conf)
    snapshot = await api.read_snapshot()
    await api.close()
    return find_power(snapshot, {"sx1": "rig1", "sx2": "rig2"})


def state(site: SlurmSite) -> str:
    """Return the state of the node that may sleep."""
    return site.ask("sinfo", "-h", "-N", "-n", "sx2", "-o", "%T").strip()


def wait_asleep(site: SlurmSite) -> None:
    wait_for(lambda: state(site) == "idle~" and switched(site)[-1:] == [OFF], lambda: f"sx2 sleeps: {state(site)}", 90)


async def test_idle_node_sleeps_and_wakes_for_a_job(site: SlurmSite) -> None:
    """The node that has to stay on does; the job runs on the woken one, which goes to sleep again afterwards."""
    wait_asleep(site)
    assert await read_power(site) == {"rig1": PowerState.ON, "rig2": PowerState.ASLEEP}
    assert switched(site) == [OFF]
    job = site.submit("ada", "--gres=gpu:rtx5070:1", script="exec sleep 3")
    wait_for(lambda: len(switched(site)) == 2, "sx2 is woken", 60)
    site.wait_for_state(job, "COMPLETED", deadline_s=90)
    assert "NodeList=sx2" in site.ask("scontrol", "show", "job", str(job)).split()
    assert await read_power(site) == {"rig1": PowerState.ON, "rig2": PowerState.ON}
    wait_asleep(site)
    assert switched(site) == [OFF, ON, OFF]


async def test_administrator_wakes_a_node(site: SlurmSite) -> None:
    """As `gpuhub node power` tells them; meanwhile it is shown as waking."""
    wait_asleep(site)
    site.ask("scontrol", "update", "NodeName=sx2", "State=POWER_UP")
    states = set()

    async def is_on() -> bool:
        states.add(power := (await read_power(site))["rig2"])
        return power is PowerState.ON

    await until(is_on, "sx2 is on", 60)
    assert PowerState.WAKING in states
    assert switched(site)[-1] == ON


def test_node_without_power_is_not_switched(site: SlurmSite) -> None:
    """What slurmctld's user may run names the node, and leaves the switch alone."""
    before = switched(site)
    enter = site.daemons.build_enter_command(site.folder)
    done = subprocess.run([*enter, site.folder / "SuspendProgram", "sx1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "node sx1: cluster.toml has no power for it: run `gpuhub slurm init` again after changes there" in done.stderr
    )
    assert switched(site) == before
