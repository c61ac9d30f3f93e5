"""Creation and removal of Docker networks, which daemons show some moments after Swarm has made or removed them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.docker.client import DockerClients

#: Maximum wait for a removed network to be gone, and for another start's network to be shown, seconds.
SHOWN_DEADLINE_S = 20.0
#: Docker's texts for a network that a concurrent start creates, and that is not shown yet: an overlay, and a macvlan.
_CREATED_MEANWHILE = ("name conflicts", "already using parent interface")


async def wait_until_gone(daemons: DockerClients, node: str, network: Mapping[str, Any]) -> None:
    """Wait until a daemon no longer shows an overlay that Swarm has removed."""
    end = asyncio.get_running_loop().time() + SHOWN_DEADLINE_S
    while await inspect_network(daemons, node, network["Id"]) is not None:
        if asyncio.get_running_loop().time() > end:
            raise build_still_shown(node, network["Name"])
        await asyncio.sleep(0.1)


def build_still_shown(node: str, name: str) -> GpuhubError:
    return GpuhubError(f"Docker on {node} still shows the old network {name} after {SHOWN_DEADLINE_S:.0f} s")


async def remove_outdated(daemons: DockerClients, node: str, network: Mapping[str, Any], explanation: str) -> None:
    """Remove a network that does not fit the settings.

    Raises:
        Conflict: A container uses it; the text begins with `explanation`.
    """
    try:
        await daemons.call(node, "remove_network", network["Id"])
    except NotFound:
        return
    except GpuhubError as error:
        if is_in_use(error):
            raise Conflict(f"{explanation}: stop it first, then start again") from error
        # Swarm has removed it, and says so in its own way.
        if "not found" not in str(error):
            raise


def is_in_use(error: GpuhubError) -> bool:
    """Return whether a daemon refused to remove a network because a container on any node is connected."""
    return "in use" in str(error) or "active endpoints" in str(error)


async def create_network(daemons: DockerClients, node: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Create a network, or return the one that a concurrent start has created."""
    try:
        # Without this option two bridges may have the same name; overlays never do.
        await daemons.call(node, "create_network", name, check_duplicate=True, **arguments)
    except GpuhubError as error:
        # Daemons' messages differ when a concurrent start was first, so check for the network instead. Swarm knows it
        # some moments before the daemon does.
        end = asyncio.get_running_loop().time() + SHOWN_DEADLINE_S
        while (existing := await inspect_network(daemons, node, name)) is None:
            is_passing = any(sign in str(error) for sign in _CREATED_MEANWHILE)
            if not is_passing or asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.1)
        return existing
    created: dict[str, Any] = await daemons.call(node, "inspect_network", name)
    return created


async def inspect_network(daemons: DockerClients, node: str, name: str) -> dict[str, Any] | None:
    """Return what the daemon says of a network, or None if it does not exist."""
    try:
        network: dict[str, Any] = await daemons.call(node, "inspect_network", name)
    except NotFound:
        return None
    return network
