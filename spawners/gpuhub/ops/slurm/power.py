"""Slurm's power saving: slurmctld decides when nodes sleep and wake, and gpuhub switches them.

slurmctld runs as the user `slurm`, which may start one program as root, `gpuhub-power.sh`, by sudo.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import DockerClients
from gpuhub.nodes.power_switch import switch_off, switch_on

#: Slurm's names of the programs, with what they do.
PROGRAMS = {"SuspendProgram": "suspend", "ResumeProgram": "resume"}
#: Time that a node has to stop, seconds; Slurm does not resume it before.
_SUSPEND_TIMEOUT_S = 180
_EXPAND_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPower:
    """Slurm's power saving."""

    #: Time without jobs after which nodes sleep, and in which they must come up, seconds.
    suspend_s: int
    resume_timeout_s: int
    #: Slurm's names of the nodes that stay on.
    excluded: tuple[str, ...]
    #: gpuhub's program on the head node with its options, to which `suspend` or `resume`, and node names, are added.
    command: tuple[str, ...]


def find_slurm_power(
    cluster: ClusterSettings, computing: Collection[str], command: tuple[str, ...]
) -> SlurmPower | None:
    """Return the power saving for the nodes that compute; None where none of them sleeps.

    Slurm has one time for all nodes: the longest is taken.

    Args:
        computing: Names of the nodes on which slurmd runs.
    """
    powers = {
        node.name: power
        for node in cluster.power_nodes
        if node.name in computing and (power := cluster.find_power(node.name)) is not None and power.idle
    }
    if not powers:
        return None
    return SlurmPower(
        suspend_s=max(power.idle for power in powers.values()),
        resume_timeout_s=max(power.wake_timeout for power in powers.values()),
        excluded=tuple(node.slurm_name for node in cluster.nodes if node.name in computing and node.name not in powers),
        command=command,
    )


def build_power_settings(power: SlurmPower, folder: Path) -> dict[str, object]:
    """Return slurm.conf's settings; the programs are in the folder."""
    excluded = {"SuspendExcNodes": ",".join(power.excluded)} if power.excluded else {}
    return {
        **{key: folder / f"gpuhub-{action}.sh" for key, action in PROGRAMS.items()},
        "SuspendTime": power.suspend_s,
        "SuspendTimeout": _SUSPEND_TIMEOUT_S,
        "ResumeTimeout": power.resume_timeout_s,
        **excluded,
    }


def format_switch_script(power: SlurmPower) -> str:
    """Return the lines of the program that root runs; it takes no options from its caller."""
    return f'exec {shlex.join(power.command)} -- "$1" "$2"\n'


def format_program(action: str, folder: Path) -> str:
    """Return the lines of a program that slurmctld calls with a list of nodes."""
    return f'exec sudo -n {folder}/gpuhub-power.sh {action} "$1"\n'


def format_sudo_rule(folder: Path) -> str:
    """Return the rule that lets slurmctld start the one program."""
    return f"slurm ALL=(root) NOPASSWD: {folder}/gpuhub-power.sh\n"


def switch_nodes(cluster: ClusterSettings, paths: Paths, action: str, hosts: str) -> None:
    """Switch the nodes of a list of Slurm's, such as `rig[2-3]`; all are tried.

    Raises:
        SetupError: Slurm does not know such a list, or some nodes could not be switched.
    """
    names = expand_hosts(hosts)
    errors = asyncio.run(_switch_all(cluster, paths, action, names))
    if errors:
        raise SetupError("\n".join(errors))


def expand_hosts(hosts: str) -> list[str]:
    """Return the names in one of Slurm's lists.

    Raises:
        SetupError: It is not valid.
    """
    done = subprocess.run(
        ["scontrol", "show", "hostnames", "--", hosts],
        check=False,
        capture_output=True,
        text=True,
        timeout=_EXPAND_TIMEOUT_S,
    )
    if done.returncode or not done.stdout.strip():
        raise SetupError(f"{hosts!r} is not a list of nodes: {done.stderr.strip()[:200] or 'it is empty'}")
    return done.stdout.split()


async def _switch_all(cluster: ClusterSettings, paths: Paths, action: str, names: Collection[str]) -> list[str]:
    by_name = {node.slurm_name: node for node in cluster.power_nodes}
    daemons = DockerClients(
        [node for node in by_name.values() if node.docker], instance=paths.instance, run_dir=paths.run
    )
    try:
        outcomes = await asyncio.gather(*(_switch(cluster, daemons, action, name, by_name) for name in names))
    finally:
        daemons.close()
    return [outcome for outcome in outcomes if outcome is not None]


async def _switch(
    cluster: ClusterSettings, daemons: DockerClients, action: str, name: str, nodes: Mapping[str, NodeSettings]
) -> str | None:
    """Return why a node could not be switched; None if it was."""
    node = nodes.get(name)
    power = None if node is None else cluster.find_power(node.name)
    if node is None or power is None:
        return f"node {name}: cluster.toml has no power for it: run `gpuhub slurm init` again after changes there"
    try:
        await (switch_on(node, power) if action == "resume" else switch_off(daemons, node, power))
    except GpuhubError as error:
        return str(error)
    return None
