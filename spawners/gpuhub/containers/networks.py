"""Networks on the nodes: the node-local access bridge, and one private network a user."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gpuhub import names
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.mtu import find_mtu
from gpuhub.containers.swarm import manager
from gpuhub.errors import Conflict, GpuhubError, NodeUnreachable, NotFound
from gpuhub.settings import Cluster

_SUBNET_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNetwork:
    """A user's private network as a container joins it."""

    name: str
    id: str
    #: CIDR, such as `10.201.3.0/24`.
    subnet: str


async def ensure_access_network(daemons: Daemons, cluster: Cluster, instance: str, node: str) -> str:
    """The node-local bridge for published ports and the way to the hub; containers on it cannot reach each other."""
    name = names.access_network(instance)
    found = await _inspect(daemons, node, name)
    if found is None:
        mtu = await asyncio.to_thread(find_mtu, cluster)
        found = await _create(daemons, node, name, build_access_network(instance, mtu))
    return str(found["Id"])


async def ensure_user_network(daemons: Daemons, cluster: Cluster, instance: str, owner: str) -> UserNetwork:
    """The owner's private network, made when it is not there; safe to call several times at once.

    Raises:
        NodeUnreachable: the node that keeps the networks does not answer.
        Conflict: containers from when there was one node only are still on a bridge of that node.
    """
    node = manager(cluster).name
    name = names.user_network(instance, owner)
    try:
        found = await _inspect(daemons, node, name)
        if found is not None and cluster.has_overlay and found["Driver"] != "overlay":
            await _remove_bridge(daemons, node, found, owner)
            found = None
        if found is None:
            mtu = await asyncio.to_thread(find_mtu, cluster)
            found = await _create(daemons, node, name, build_user_network(cluster, instance, owner, mtu))
    except NodeUnreachable as error:
        raise NodeUnreachable(f"{error}; it keeps the users' networks, so nothing can start until it does") from error
    end = asyncio.get_running_loop().time() + _SUBNET_DEADLINE_S
    while not (subnet := _subnet(found)):
        # Swarm gives an overlay its subnet a moment after the network is made.
        if asyncio.get_running_loop().time() > end:
            raise GpuhubError(f"network {name} got no subnet within {_SUBNET_DEADLINE_S:.0f} s")
        await asyncio.sleep(0.02)
        found = await daemons.call(node, "inspect_network", name)
    return UserNetwork(name=name, id=found["Id"], subnet=subnet)


async def connect(daemons: Daemons, node: str, container: str, network: UserNetwork) -> None:
    """Join a container to a user's network; a container that is on it already is left as it is."""
    try:
        await daemons.call(node, "connect_container_to_network", container, network.id)
    except GpuhubError as error:
        if "already exists" not in str(error) and "already attached" not in str(error):
            raise


async def remove_idle_user_networks(
    daemons: Daemons, cluster: Cluster, instance: str, keep_owners: Collection[str]
) -> list[str]:
    """Remove users' networks that no container uses, except those of `keep_owners`; returns the removed names.

    `keep_owners` are all with a lease in any state but released: their next container may be about to join.
    """
    node = manager(cluster).name
    filters = {"label": [f"{names.LABEL_INSTANCE}={instance}", names.LABEL_OWNER]}
    removed = []
    for network in await daemons.call(node, "networks", filters=filters):
        if network["Labels"][names.LABEL_OWNER] in keep_owners:
            continue
        try:
            await daemons.call(node, "remove_network", network["Id"])
        except NotFound:
            continue
        except GpuhubError as error:
            # A container on some node is on it: the daemon refuses, which is the check.
            if "in use" in str(error) or "active endpoints" in str(error):
                continue
            raise
        removed.append(str(network["Name"]))
    return removed


def build_access_network(instance: str, mtu: int) -> dict[str, Any]:
    """Arguments of `create_network` for a node's access bridge; `mtu` is that of the nodes' own network."""
    return {
        "driver": "bridge",
        "options": {
            "com.docker.network.bridge.enable_icc": "false",
            # By this name the guard's rules know what comes from containers.
            "com.docker.network.bridge.name": names.access_network(instance),
            "com.docker.network.driver.mtu": str(mtu),
        },
        "labels": {names.LABEL_INSTANCE: instance},
    }


def build_user_network(cluster: Cluster, instance: str, owner: str, mtu: int) -> dict[str, Any]:
    """Arguments of `create_network` for a user's private network; `mtu` is that of the nodes' own network."""
    labels = {names.LABEL_INSTANCE: instance, names.LABEL_OWNER: owner}
    if cluster.has_overlay:
        return {
            "driver": "overlay",
            "attachable": True,
            # The overlay driver takes VXLAN's header off by itself.
            "options": {"com.docker.network.driver.mtu": str(mtu)},
            "labels": labels,
        }
    return {
        "driver": "bridge",
        "options": {
            "com.docker.network.bridge.name": names.user_bridge(instance, owner),
            "com.docker.network.driver.mtu": str(mtu),
        },
        "labels": labels,
    }


async def _remove_bridge(daemons: Daemons, node: str, network: Mapping[str, Any], owner: str) -> None:
    try:
        await daemons.call(node, "remove_network", network["Id"])
    except NotFound:
        return
    except GpuhubError as error:
        raise Conflict(
            f"{owner} has a notebook or job from when {node} was the only node, on a network that other nodes cannot "
            "join: stop it first, then start again"
        ) from error


async def _create(daemons: Daemons, node: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        # Bridges may share a name unless this is asked for; an overlay never does.
        await daemons.call(node, "create_network", name, check_duplicate=True, **arguments)
    except GpuhubError:
        # Daemons word it differently when another start was quicker, so what counts is whether it is there.
        found = await _inspect(daemons, node, name)
        if found is None:
            raise
        return found
    created: dict[str, Any] = await daemons.call(node, "inspect_network", name)
    return created


async def _inspect(daemons: Daemons, node: str, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = await daemons.call(node, "inspect_network", name)
    except NotFound:
        return None
    return found


def _subnet(network: Mapping[str, Any]) -> str | None:
    for config in (network.get("IPAM") or {}).get("Config") or []:
        if config.get("Subnet"):
            return str(config["Subnet"])
    return None
