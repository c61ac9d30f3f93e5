"""Keeps the GPU agent's container on a node, and reads its last line through Docker: no port, no network."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

from docker.types import DeviceRequest, LogConfig

from gpuhub import names
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import Conflict, GpuhubError, NotFound
from gpuhub.nodes import agent

IMAGE = "gpuhub/base:latest"
#: Says which agent runs: another script or image makes another container.
LABEL_BUILD = "gpuhub.agent"
_NOBODY = "65534:65534"
#: Of 16 KiB; more than a line of 64 GPUs has.
_CHUNKS = 8


async def ensure_agent(daemons: Daemons, node: str, listed: Mapping[str, Any] | None) -> str:
    """The id of a running agent of this version; `listed` is the daemon's list entry of the one there is.

    Raises:
        ImageMissing, NodeUnreachable, GpuhubError: it cannot be run there at present.
    """
    image = await daemons.call(node, "inspect_image", IMAGE)
    build = build_hash(agent_script(), str(image["Id"]))
    if listed is not None:
        is_same = (listed.get("Labels") or {}).get(LABEL_BUILD) == build
        if is_same and listed.get("State") == "running":
            return str(listed["Id"])
        await _remove(daemons, node, str(listed["Id"]))
    host = await daemons.call(node, "create_host_config", **build_host_config())
    made = await daemons.call(
        node, "create_container", host_config=host, **build_container(daemons.instance, build, agent_script())
    )
    try:
        await daemons.call(node, "start", made["Id"])
    except GpuhubError as error:
        await _remove(daemons, node, str(made["Id"]))
        if "could not select device driver" in str(error):
            raise GpuhubError(
                f"node {node}: its Docker has no NVIDIA container toolkit, so no GPU can be given there"
            ) from error
        raise
    return str(made["Id"])


async def read_last_line(daemons: Daemons, node: str, container_id: str) -> bytes:
    """The agent's last whole line; empty right after its start.

    Raises:
        NodeUnreachable, NotFound.
    """
    text: bytes = await daemons.call(node, "logs", container_id, stdout=True, stderr=False, tail=_CHUNKS)
    return last_whole_line(text)


def last_whole_line(text: bytes) -> bytes:
    """The last line that has its end; Docker counts each 16 KiB of a long line as a line of its own."""
    lines = text.split(b"\n")
    return lines[-2] if len(lines) > 1 else b""


def agent_script() -> str:
    """The text of `agent`, which runs without gpuhub."""
    return inspect.getsource(agent)


def build_hash(script: str, image_id: str) -> str:
    """Differs when the script, the image or the container's arguments differ."""
    arguments = repr(build_host_config()) + repr(build_container("", "", ""))
    return hashlib.sha256("\0".join((script, image_id, arguments)).encode()).hexdigest()[:32]


def build_container(instance: str, build: str, script: str) -> dict[str, Any]:
    """Arguments of `create_container`."""
    return {
        "image": IMAGE,
        "name": names.agent_container(instance),
        "command": ["python3", "-u", "-c", script],
        "user": _NOBODY,
        "labels": {
            names.LABEL_INSTANCE: instance,
            names.LABEL_KIND: names.KIND_AGENT,
            LABEL_BUILD: build,
        },
    }


def build_host_config() -> dict[str, Any]:
    """Arguments of `create_host_config`: all GPUs to look at, and nothing else."""
    return {
        "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])],
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "init": True,
        "mem_limit": "256m",
        "pids_limit": 32,
        "log_config": LogConfig(type="json-file", config={"max-size": "1m", "max-file": "2"}),
    }


async def _remove(daemons: Daemons, node: str, container_id: str) -> None:
    try:
        await daemons.call(node, "remove_container", container_id, force=True, v=True)
    except (NotFound, Conflict):
        # Gone, or being removed at this moment: the next look tells.
        return
