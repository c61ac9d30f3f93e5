"""Short-lived containers that find out something about a node and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpuhub.common.errors import NotFound
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers.container_spec import BASE_IMAGE

#: The label of these containers, which belong to no lease: it differs from those of gpuhub's other containers.
LABEL_DOCTOR = "gpuhub.doctor"
#: Maximum duration of a probe, seconds.
_RUN_S = 60


async def run_probe(daemons: DockerClients, node: str, command: Sequence[str], host: Mapping[str, Any]) -> str:
    """Run a command as the container's root, and return its output.

    Args:
        host: The arguments of `create_host_config`.

    Raises:
        ImageMissing: The node does not have the image yet.
        GpuhubError: The container could not run, or does not end.
    """
    host_config = await daemons.call(node, "create_host_config", **host)
    await _remove_leftovers(daemons, node)
    container = await daemons.call(
        node,
        "create_container",
        image=BASE_IMAGE,
        user="0:0",
        command=list(command),
        labels={LABEL_DOCTOR: daemons.instance},
        host_config=host_config,
    )
    try:
        await daemons.call(node, "start", container["Id"])
        await daemons.run(node, lambda client: client.wait(container["Id"], timeout=_RUN_S), kind=CallKind.LONG)
        text: bytes = await daemons.call(node, "logs", container["Id"], stdout=True, stderr=True)
    finally:
        with suppress(NotFound):
            await daemons.call(node, "remove_container", container["Id"], force=True, v=True)
    return text.decode("utf-8", "replace")


async def _remove_leftovers(daemons: DockerClients, node: str) -> None:
    """Remove the containers of a program that was killed."""
    filters = {"label": [f"{LABEL_DOCTOR}={daemons.instance}"], "status": ["exited", "created"]}
    for leftover in await daemons.call(node, "containers", all=True, filters=filters):
        with suppress(NotFound):
            await daemons.call(node, "remove_container", leftover["Id"], force=True, v=True)
