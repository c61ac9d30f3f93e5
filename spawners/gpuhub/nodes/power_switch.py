"""Switches nodes on and off in the ways that cluster.toml names: packets, systemd, ipmitool and commands."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.config.machines.nodes import NodeSettings
from gpuhub.config.machines.power import PowerSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.sleep_container import send_to_sleep
from gpuhub.nodes.magic_packet import send_magic_packet

#: Maximum duration of a command, seconds.
COMMAND_TIMEOUT_S = 60.0
#: Bytes of a command's output that are read.
_MAX_OUTPUT = 65536
#: Characters of the output's last line that are shown.
_MAX_SHOWN = 300
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


async def switch_on(node: NodeSettings, power: PowerSettings) -> None:
    """Wake a node, which answers some time later; repeated calls do no harm to one that is on.

    Raises:
        GpuhubError: It cannot be tried: no route, or the command has failed.
    """
    if isinstance(power.on, tuple):
        await run_power_command(power.on, node)
    elif power.on == "ipmi":
        await run_power_command(build_ipmi_command(node, power, "on"), node)
    elif node.power is not None and node.power.mac is not None:
        await asyncio.to_thread(send_magic_packet, node.power.mac, towards=node.address, broadcast=power.broadcast)
    else:
        raise GpuhubError(f"node {node.name}: cluster.toml has no power.mac for it")


async def switch_off(daemons: DockerClients, node: NodeSettings, power: PowerSettings) -> None:
    """Put a node to sleep; it stops answering some time later.

    Raises:
        GpuhubError: It was refused; the text has the reason.
    """
    if isinstance(power.off, tuple):
        await run_power_command(power.off, node)
    elif power.off == "ipmi":
        await run_power_command(build_ipmi_command(node, power, "soft"), node)
    else:
        await send_to_sleep(daemons, node.name, "poweroff" if power.off == "poweroff" else "suspend")


def build_ipmi_command(node: NodeSettings, power: PowerSettings, action: str) -> list[str]:
    """Return ipmitool's command, which reads the password from the file; `soft` is an ACPI shutdown.

    Raises:
        SetupError: Others than root can read the file.
    """
    if node.power is None or node.power.ipmi_address is None or power.ipmi_user is None:
        raise SetupError(f"node {node.name}: power: ipmi_address and ipmi_user are missing")
    file = power.ipmi_password_file
    if file is None:
        raise SetupError(f"node {node.name}: power: ipmi_password_file is missing")
    check_password_file(file)
    return [
        "ipmitool", "-I", "lanplus", "-H", node.power.ipmi_address, "-U", power.ipmi_user, "-f", str(file),
        "chassis", "power", action,
    ]  # fmt: skip


def check_password_file(file: Path) -> None:
    """Check that root alone can read a file.

    Raises:
        SetupError: It does not exist, or others can read it.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise SetupError(f"power.ipmi_password_file: {file}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SetupError(
            f"power.ipmi_password_file: {file} has to be a file that root alone can read: "
            f"`chown root {file}; chmod 600 {file}`"
        )


def check_ipmi(cluster: ClusterSettings) -> None:
    """Check the password files of all nodes with `ipmi`, and ipmitool, before anything is started.

    Raises:
        SetupError: ipmitool is not installed; or see `check_password_file`.
    """
    files = _list_password_files(cluster)
    for file in files:
        check_password_file(file)
    if files and shutil.which("ipmitool", path=_PATH) is None:
        raise SetupError('power: "ipmi" needs ipmitool on the head node: `apt-get install ipmitool`')


def _list_password_files(cluster: ClusterSettings) -> set[Path]:
    powers = filter(None, (cluster.find_power(node.name) for node in cluster.power_nodes))
    used = (power for power in powers if "ipmi" in (power.on, power.off))
    return {power.ipmi_password_file for power in used if power.ipmi_password_file is not None}


async def run_power_command(command: Sequence[str], node: NodeSettings) -> None:
    """Run a command without a shell, in an environment that has the node's name and address and nothing of gpuhub.

    Raises:
        GpuhubError: It cannot be started, fails, or takes too long; the text has the last line of its output.
    """
    environment = {"PATH": _PATH, "GPUHUB_NODE": node.name, "GPUHUB_NODE_ADDRESS": node.address}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise GpuhubError(f"node {node.name}: {command[0]} cannot be started: {error.strerror or error}") from error
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output = await _read_output(process)
            await process.wait()
    except TimeoutError:
        raise GpuhubError(
            f"node {node.name}: {command[0]} did not end within {COMMAND_TIMEOUT_S:.0f} s and was killed"
        ) from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        lines = output.decode("utf-8", "replace").strip().splitlines() or ["no output"]
        raise GpuhubError(
            f"node {node.name}: {command[0]} failed with exit code {process.returncode}: {lines[-1][:_MAX_SHOWN]}"
        )


async def _read_output(process: asyncio.subprocess.Process) -> bytes:
    """Return the end of a process's output, of which any amount may come."""
    output = b""
    while process.stdout is not None and (chunk := await process.stdout.read(_MAX_OUTPUT)):
        output = (output + chunk)[-_MAX_OUTPUT:]
    return output
