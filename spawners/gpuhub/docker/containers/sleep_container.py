"""Tells a machine to suspend or to power off, from a short-lived container that runs the machine's own systemctl.

Access to the Docker daemon is all that gpuhub has on a node (decision 0025), over SSH as well as over TLS, and it
suffices: the container enters the machine's mounts. systemd refuses while a user is logged in there, or while a
program asks for no sleep.
"""

from __future__ import annotations

from typing import Literal

from gpuhub.common.errors import GpuhubError, NodeUnreachable
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.probe_container import run_probe

_ACCEPTED = "gpuhub: accepted"
#: Characters of a refusal that are shown.
_MAX_SHOWN = 300
#: Root ignores others' logins and inhibitor locks unless it asks for the check.
_SCRIPT = f'systemctl "$1" --check-inhibitors=yes && echo "{_ACCEPTED}"'
#: Joining the machine's namespaces needs the capability, and its processes in sight; AppArmor's profile forbids it.
_HOST = {
    "cap_add": ["SYS_ADMIN", "SYS_PTRACE", "SYS_CHROOT"],
    "pid_mode": "host",
    "userns_mode": "host",
    "network_mode": "none",
    "security_opt": ["apparmor=unconfined"],
}


def build_command(action: Literal["suspend", "poweroff"]) -> list[str]:
    """Return the command of the container."""
    return ["nsenter", "--target=1", "--mount", "--", "sh", "-c", _SCRIPT, "sh", action]


async def send_to_sleep(daemons: DockerClients, node: str, action: Literal["suspend", "poweroff"]) -> None:
    """Let systemd suspend a machine or power it off; returns when it has accepted, before the machine sleeps.

    Raises:
        GpuhubError: It has refused; the text has the reason.
    """
    try:
        output = await run_probe(daemons, node, build_command(action), _HOST)
    except NodeUnreachable:
        # It may sleep before the daemon's answer arrives; if it does not, it continues answering, which is noticed.
        return
    if _ACCEPTED not in output:
        lines = output.strip().splitlines() or ["no output"]
        raise GpuhubError(f"node {node}: systemctl {action}: {' '.join(lines)[:_MAX_SHOWN]}")
