"""The container that moves a notebook's GPU memory out and back: it runs for one command, and is removed.

It has rights over the node's other containers that no other container of gpuhub has, and runs a fixed script
(`nodes.gpu_suspension`) whose arguments are ids.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from docker.types import DeviceRequest

from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_spec import BASE_IMAGE
from gpuhub.nodes import gpu_suspension

#: Capabilities to read other users' processes and their open files, to enter their containers, and to change what is
#: mounted there.
_CAPABILITIES = ("SYS_PTRACE", "DAC_OVERRIDE", "SYS_CHROOT", "SYS_ADMIN")
#: A command that takes longer has failed: 0.5 s for each GiB are usual.
_TIMEOUT_S = 600.0
_POLL_S = 0.2
#: Characters of the container's output that are read.
_OUTPUT_LENGTH = 4096
#: Characters of an error that are shown.
_ERROR_LENGTH = 300
_MIB = 1024**2


class SuspensionOutcome(StrEnum):
    """The outcomes of the script."""

    DONE = "done"
    REFUSED = "refused"
    BUSY = "busy"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspensionResult:
    """What the script has done; see `nodes.gpu_suspension`."""

    outcome: SuspensionOutcome
    #: The reason, for the notebook's owner.
    text: str
    moved_mib: int


async def move_out(daemons: DockerClients, node: str, *, container: str, gpu: str, max_mib: int) -> SuspensionResult:
    """Free the GPU of a container; at most `max_mib` of GPU memory are moved.

    Raises:
        GpuhubError: The node does not answer, or cannot run the script: nothing is known of the container then.
    """
    return await _run(daemons, node, ("suspend", container, gpu, str(max_mib)))


async def move_back(daemons: DockerClients, node: str, *, container: str, gpu: str) -> SuspensionResult:
    """Bring the GPU memory of a container back.

    Raises:
        GpuhubError: As for `move_out`.
    """
    return await _run(daemons, node, ("resume", container, gpu))


async def set_memory_limit(daemons: DockerClients, node: str, container: str, memory_mib: int) -> None:
    """Set the memory limit of a container, without swap.

    Raises:
        GpuhubError: The node does not answer, or the container uses more.
    """
    size = memory_mib * _MIB
    await daemons.call(node, "update_container", container, mem_limit=size, memswap_limit=size)


async def remove_ended(daemons: DockerClients, node: str) -> bool:
    """Remove the containers of this module that do not run; return whether others are left.

    Raises:
        GpuhubError: The node does not answer.
    """
    labels = [f"{names.LABEL_INSTANCE}={daemons.instance}", f"{names.LABEL_KIND}={names.KIND_SUSPENDER}"]
    found = await daemons.call(node, "containers", all=True, filters={"label": labels})
    for container in found:
        if container["State"] != "running":
            await _remove(daemons, node, container["Id"])
    return any(container["State"] == "running" for container in found)


async def _run(daemons: DockerClients, node: str, arguments: tuple[str, ...]) -> SuspensionResult:
    name = f"{daemons.instance}-suspender-{arguments[1][:12]}"
    # One that an earlier broker has started is in the middle of something: it is waited for, and repeated.
    await _wait(daemons, node, name)
    host = await daemons.call(node, "create_host_config", **build_host_config())
    created = await daemons.call(
        node, "create_container", host_config=host, **build_container(daemons.instance, name, arguments)
    )
    try:
        await daemons.call(node, "start", created["Id"])
        await _wait(daemons, node, created["Id"], remove=False)
        text = await daemons.call(node, "logs", created["Id"], stdout=True, stderr=True, tail=20)
    finally:
        await _remove(daemons, node, created["Id"])
    return parse_result(text.decode(errors="replace")[-_OUTPUT_LENGTH:])


async def _wait(daemons: DockerClients, node: str, container: str, *, remove: bool = True) -> None:
    """Wait until a container has ended, if it exists."""
    end = asyncio.get_running_loop().time() + _TIMEOUT_S
    try:
        while (await daemons.call(node, "inspect_container", container))["State"]["Running"]:
            if asyncio.get_running_loop().time() > end:
                raise GpuhubError(f"node {node}: moving GPU memory takes longer than {_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_POLL_S)
    except NotFound:
        return
    if remove:
        await _remove(daemons, node, container)


async def _remove(daemons: DockerClients, node: str, container: str) -> None:
    try:
        await daemons.call(node, "remove_container", container, force=True, v=True)
    except (NotFound, Conflict):
        # Gone, or being removed now.
        return


def parse_result(text: str) -> SuspensionResult:
    """Parse the script's output.

    Raises:
        GpuhubError: It is none: the script did not come to its end.
    """
    last_line = text.strip().rpartition("\n")[2]
    try:
        raw = json.loads(last_line)
        return SuspensionResult(
            outcome=SuspensionOutcome(raw["outcome"]), text=str(raw["text"]), moved_mib=int(raw["moved_mib"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise GpuhubError(f"moving GPU memory failed: {last_line[-_ERROR_LENGTH:]}") from error


def build_container(instance: str, name: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Build the arguments of `create_container`."""
    return {
        "image": BASE_IMAGE,
        "name": name,
        "command": ["python3", "-I", "-c", inspect.getsource(gpu_suspension), *arguments],
        "user": "0:0",
        "labels": {names.LABEL_INSTANCE: instance, names.LABEL_KIND: names.KIND_SUSPENDER},
    }


def build_host_config() -> dict[str, Any]:
    """Build the arguments of `create_host_config`."""
    return {
        "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu", "compute", "utility"]])],
        "network_mode": "none",
        "pid_mode": "host",
        "cap_drop": ["ALL"],
        "cap_add": list(_CAPABILITIES),
        # Docker's AppArmor profile forbids mounting, and reading processes of other profiles.
        "security_opt": ["no-new-privileges", "apparmor=unconfined"],
        "read_only": True,
        "mem_limit": "1g",
        "memswap_limit": "1g",
        "pids_limit": 256,
    }
