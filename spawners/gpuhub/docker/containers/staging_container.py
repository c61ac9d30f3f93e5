"""Containers that list a dataset, or copy it to their node's disk and on to the next node.

They run as a user with no rights of its own, so they read what every user may read. Those that pass a dataset on are
on a network of their own, which no user's container joins.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from docker.types import LogConfig, Mount

from gpuhub.common import names
from gpuhub.common.errors import Conflict, InvalidRequest, NotFound
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.container_spec import BASE_IMAGE
from gpuhub.storage import staging_script

#: Where a staging container has the copy.
COPY = "/copy"
_UNPRIVILEGED = 65534
_POLL_S, _SLOWEST_POLL_S = 0.1, 1.0
#: Chunks of 16 KiB to read from the log; a line is shorter.
_LOG_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSpec:
    """A container that does one task of `storage.staging_script` on a node."""

    name: str
    node: str
    task: Mapping[str, Any]
    mounts: Sequence[Mount]
    #: Network on which the nodes pass the dataset on; None for a task of one node.
    network: str | None = None
    secret: str = ""

    @property
    def writes(self) -> bool:
        """Return whether the container writes a copy."""
        return bool(self.task.get("write"))


class StagingFailed(InvalidRequest):
    """A task failed; the text has the reason for the user."""


async def create_stager(daemons: DockerClients, spec: StagingSpec) -> str:
    """Create a task's container, and return its id.

    Raises:
        ImageMissing, NodeUnreachable, GpuhubError: The node refuses it.
    """
    with suppress(NotFound):
        await daemons.call(spec.node, "remove_container", spec.name, force=True, v=True)
    arguments = build_stager(daemons.instance, spec)
    container = await daemons.run(
        spec.node, lambda client: container_lifecycle.create_container(client, arguments), kind=CallKind.MOUNTING
    )
    if spec.writes:
        # A new volume belongs to root.
        archive = build_owner_archive()
        await daemons.run(spec.node, lambda client: client.put_archive(container, "/", archive), kind=CallKind.MOUNTING)
    return container


async def run_stager(
    daemons: DockerClients, spec: StagingSpec, container: str, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Start a task's container, return its last line, and remove it.

    Args:
        progress: Called with the bytes copied so far.

    Raises:
        StagingFailed: The task failed.
        NodeUnreachable, GpuhubError: The node does not answer, or refuses to start the container.
    """
    try:
        await daemons.run(spec.node, lambda client: client.start(container), kind=CallKind.MOUNTING)
        return await _wait(daemons, spec, container, progress or (lambda _copied: None))
    finally:
        await asyncio.shield(_remove(daemons, spec.node, container))


async def _wait(
    daemons: DockerClients, spec: StagingSpec, container: str, progress: Callable[[int], None]
) -> dict[str, Any]:
    pause_s = _POLL_S
    while True:
        state = (await daemons.call(spec.node, "inspect_container", container))["State"]
        output: bytes = await daemons.call(
            spec.node, "logs", container, stdout=True, stderr=not state["Running"], tail=_LOG_CHUNKS
        )
        line = parse_last_line(output)
        if not state["Running"]:
            if "error" in line or state["ExitCode"]:
                text = output.decode(errors="replace").strip() or f"exit code {state['ExitCode']}"
                raise StagingFailed(f"node {spec.node}: {line.get('error') or text[-300:]}")
            return line
        if "copied" in line:
            progress(int(line["copied"]))
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _SLOWEST_POLL_S)


async def _remove(daemons: DockerClients, node: str, container: str) -> None:
    with suppress(NotFound, Conflict):
        await daemons.run(node, lambda client: client.remove_container(container, force=True), kind=CallKind.MOUNTING)


def build_stager(instance: str, spec: StagingSpec) -> dict[str, Any]:
    """Build the arguments of `create_container`; those of `create_host_config` are in `host_config`."""
    return {
        "image": BASE_IMAGE,
        "name": spec.name,
        "command": ["python3", "-u", "-c", inspect.getsource(staging_script), json.dumps(dict(spec.task))],
        "user": f"{_UNPRIVILEGED}:{_UNPRIVILEGED}",
        "labels": {names.LABEL_INSTANCE: instance, names.LABEL_KIND: names.KIND_STAGER},
        "environment": {"NVIDIA_VISIBLE_DEVICES": "void", "GPUHUB_STAGING_SECRET": spec.secret},
        "host_config": {
            "network_mode": spec.network or "none",
            "mounts": list(spec.mounts),
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            # Docker gives a volume to its user only in a container whose own file system can be written.
            "read_only": not spec.writes,
            "init": True,
            "mem_limit": "512m",
            "pids_limit": 32,
            "log_config": LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
        },
    }


def build_owner_archive() -> bytes:
    """Build a tar that gives the folder of the copy to the user that writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(COPY.lstrip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        entry.uid = entry.gid = _UNPRIVILEGED
        archive.addfile(entry)
    return buffer.getvalue()


def parse_last_line(output: bytes) -> dict[str, Any]:
    """Return the last line of a task's output that is JSON; empty if there is none."""
    for line in reversed(output.decode("utf-8", "replace").splitlines()):
        with suppress(ValueError):
            parsed = json.loads(line)
            if isinstance(parsed, dict):
                return parsed
    return {}
