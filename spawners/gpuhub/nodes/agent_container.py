"""Runs the GPU agent's container on a node, and reads its last line through Docker, without a port or network."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

from docker.types import DeviceRequest, LogConfig

from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.docker.client import DockerClients
from gpuhub.docker.container_spec import BASE_IMAGE
from gpuhub.nodes import agent

#: Hash of script and image; when it differs, the container is replaced.
LABEL_BUILD = "gpuhub.agent"
_UNPRIVILEGED_USER = "65534:65534"
#: Chunks of 16 KiB to read from the log; more than a line of 64 GPUs has.
_LOG_CHUNKS = 8


async def ensure_agent(daemons: DockerClients, node: str, existing: Mapping[str, Any] | None) -> str:
    """Ensure that an agent of this version runs, and return its container's id.

    Args:
        existing: The daemon's list entry of the current container; None if there is none.

    Raises:
        ImageMissing, NodeUnreachable, GpuhubError: The agent cannot run there now.
    """
    image = await daemons.call(node, "inspect_image", BASE_IMAGE)
    build = build_hash(agent_script(), str(image["Id"]))
    if existing is not None:
        is_same = (existing.get("Labels") or {}).get(LABEL_BUILD) == build
        if is_same and existing.get("State") == "running":
            return str(existing["Id"])
        await _remove(daemons, node, str(existing["Id"]))
    host = await daemons.call(node, "create_host_config", **build_host_config())
    created = await daemons.call(
        node, "create_container", host_config=host, **build_container(daemons.instance, build, agent_script())
    )
    try:
        await daemons.call(node, "start", created["Id"])
    except GpuhubError as error:
        await _remove(daemons, node, str(created["Id"]))
        if "could not select device driver" in str(error):
            raise GpuhubError(
                f"node {node}: its Docker has no NVIDIA container toolkit, so its GPUs cannot be used"
            ) from error
        raise
    return str(created["Id"])


async def read_last_line(daemons: DockerClients, node: str, container_id: str) -> bytes:
    """Return the agent's last complete line; empty right after its start.

    Raises:
        NodeUnreachable: The node does not answer.
        NotFound: The container does not exist.
    """
    text: bytes = await daemons.call(node, "logs", container_id, stdout=True, stderr=False, tail=_LOG_CHUNKS)
    return find_last_line(text)


def find_last_line(text: bytes) -> bytes:
    """Return the last line with a line end; Docker counts each 16 KiB of a long line as one line."""
    lines = text.split(b"\n")
    return lines[-2] if len(lines) > 1 else b""


def agent_script() -> str:
    """Return the source of `agent`, which runs without gpuhub."""
    return inspect.getsource(agent)


def build_hash(script: str, image_id: str) -> str:
    """Return a hash of the script, the image and the container's arguments."""
    arguments = repr(build_host_config()) + repr(build_container("", "", ""))
    return hashlib.sha256("\0".join((script, image_id, arguments)).encode()).hexdigest()[:32]


def build_container(instance: str, build: str, script: str) -> dict[str, Any]:
    """Build the arguments of `create_container`."""
    return {
        "image": BASE_IMAGE,
        "name": names.agent_container_name(instance),
        "command": ["python3", "-u", "-c", script],
        "user": _UNPRIVILEGED_USER,
        "labels": {
            names.LABEL_INSTANCE: instance,
            names.LABEL_KIND: names.KIND_AGENT,
            LABEL_BUILD: build,
        },
    }


def build_host_config() -> dict[str, Any]:
    """Build the arguments of `create_host_config`: access to all GPUs, and to nothing else."""
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


async def _remove(daemons: DockerClients, node: str, container_id: str) -> None:
    try:
        await daemons.call(node, "remove_container", container_id, force=True, v=True)
    except (NotFound, Conflict):
        # Gone, or being removed now; the next poll shows which.
        return
