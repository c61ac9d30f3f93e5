"""One Docker Swarm over the nodes, for its overlay networks only: the first node keeps it, the others join."""

from __future__ import annotations

import asyncio
from typing import Any

from gpuhub.containers.daemons import Daemons
from gpuhub.errors import Conflict, GpuhubError, SetupError
from gpuhub.settings import Cluster, Node

SWARM_PORT = 2377
#: Each user's network.
_SUBNET_BITS = 24
_JOIN_DEADLINE_S = 30.0


def manager(cluster: Cluster) -> Node:
    """The node that keeps the Swarm."""
    return cluster.nodes[0]


async def ensure_swarm(daemons: Daemons, cluster: Cluster) -> None:
    """Make the nodes one Swarm where users' networks span nodes; idempotent, and mends nodes that have left.

    Raises:
        SetupError: a node belongs to another Swarm.
        NodeUnreachable: a node does not answer.
    """
    if not cluster.has_overlay:
        return
    lead = manager(cluster)
    swarm_id = await _ensure_manager(daemons, cluster, lead)
    tokens = (await daemons.call(lead.name, "inspect_swarm"))["JoinTokens"]
    await asyncio.gather(
        *(_ensure_joined(daemons, lead, node, swarm_id, tokens["Worker"]) for node in cluster.nodes if node != lead)
    )


async def ensure_member(daemons: Daemons, cluster: Cluster, node: Node) -> None:
    """Have one node join, whether the others answer or not; the first node keeps the Swarm and must answer.

    Raises:
        SetupError: it belongs to another Swarm, or cannot reach the first node's ports.
        NodeUnreachable: one of the two does not answer.
    """
    lead = manager(cluster)
    swarm_id = await _ensure_manager(daemons, cluster, lead)
    if node != lead:
        tokens = (await daemons.call(lead.name, "inspect_swarm"))["JoinTokens"]
        await _ensure_joined(daemons, lead, node, swarm_id, tokens["Worker"])


async def remove_member(daemons: Daemons, cluster: Cluster, node: Node) -> None:
    """Have one node leave, and the first node forget it; a node that is in no Swarm, or in another, is left alone."""
    lead = manager(cluster)
    node_id = (await _swarm_info(daemons, node.name)).get("NodeID")
    members = [member["ID"] for member in await daemons.call(lead.name, "nodes")] if node_id else []
    if node_id in members:
        await daemons.call(node.name, "leave_swarm", force=True)
        await daemons.call(lead.name, "remove_node", node_id, force=True)


async def leave_swarm(daemons: Daemons, cluster: Cluster) -> list[str]:
    """Dissolve the Swarm, workers before their manager; a line that says why where somebody else uses it too, or where
    a node cannot leave it, and then those that come after it stay as well.
    """
    lead = manager(cluster).name
    info = await _swarm_info(daemons, lead)
    if info["LocalNodeState"] != "active" or not info.get("ControlAvailable"):
        return []
    others = [
        network["Name"]
        for network in await daemons.call(lead, "networks", filters={"driver": ["overlay"]})
        if not network.get("Ingress") and network["Name"] != "ingress"
    ]
    if others or await daemons.call(lead, "services"):
        return [f"the Swarm stays: others use it ({', '.join(others) or 'services'})"]
    for node in reversed(cluster.nodes):
        try:
            if (await _swarm_info(daemons, node.name))["LocalNodeState"] == "active":
                await daemons.call(node.name, "leave_swarm", force=True)
        except GpuhubError as error:
            # A worker without its manager could not join anew.
            return [f"the Swarm stays: {error}"]
    return []


async def _ensure_manager(daemons: Daemons, cluster: Cluster, lead: Node) -> str:
    info = await _swarm_info(daemons, lead.name)
    if info["LocalNodeState"] == "active" and not info.get("ControlAvailable"):
        raise SetupError(
            f"node {lead.name} is a worker of a Swarm that gpuhub does not keep: run `docker swarm leave` there first"
        )
    if info["LocalNodeState"] != "active":
        if info["LocalNodeState"] in {"error", "pending"}:
            await daemons.call(lead.name, "leave_swarm", force=True)
        try:
            await daemons.call(
                lead.name,
                "init_swarm",
                advertise_addr=lead.address,
                listen_addr=f"{lead.address}:{SWARM_PORT}",
                data_path_addr=lead.address,
                default_addr_pool=[cluster.network.overlay_pool],
                subnet_size=_SUBNET_BITS,
            )
        except GpuhubError:
            # Somebody else was quicker: that is what we wanted.
            if (await _swarm_info(daemons, lead.name))["LocalNodeState"] != "active":
                raise
    return str((await daemons.call(lead.name, "inspect_swarm"))["ID"])


async def _ensure_joined(daemons: Daemons, lead: Node, node: Node, swarm_id: str, token: str) -> None:
    info = await _swarm_info(daemons, node.name)
    if info["LocalNodeState"] == "active":
        if await _is_member(daemons, lead, info["NodeID"]):
            return
        if info.get("ControlAvailable") or (info.get("Cluster") or {}).get("ID") not in (None, "", swarm_id):
            raise SetupError(
                f"node {node.name} belongs to another Swarm: "
                "run `docker swarm leave` there first (--force on a manager)"
            )
    if info["LocalNodeState"] != "inactive":
        # It was removed from our Swarm, or its manager was made anew.
        await daemons.call(node.name, "leave_swarm", force=True)
    await _join(daemons, lead, node, token)


async def _join(daemons: Daemons, lead: Node, node: Node, token: str) -> None:
    end = asyncio.get_running_loop().time() + _JOIN_DEADLINE_S
    while True:
        try:
            await daemons.call(
                node.name,
                "join_swarm",
                remote_addrs=[f"{lead.address}:{SWARM_PORT}"],
                join_token=token,
                listen_addr=f"{node.address}:{SWARM_PORT}",
                advertise_addr=node.address,
                data_path_addr=node.address,
            )
        except GpuhubError as error:
            info = await _swarm_info(daemons, node.name)
            if info["LocalNodeState"] == "active":
                return
            if asyncio.get_running_loop().time() > end or isinstance(error, Conflict):
                raise SetupError(
                    f"node {node.name} cannot join the Swarm at {lead.address}:{SWARM_PORT} of node {lead.name}: "
                    f"{error}. TCP 2377 and 7946 and UDP 7946 and 4789 must be open between the nodes"
                ) from error
            await asyncio.sleep(1)
        else:
            return


async def _is_member(daemons: Daemons, lead: Node, node_id: str) -> bool:
    members = await daemons.call(lead.name, "nodes")
    return any(member["ID"] == node_id and member["Status"]["State"] != "down" for member in members)


async def _swarm_info(daemons: Daemons, node: str) -> dict[str, Any]:
    info: dict[str, Any] = (await daemons.call(node, "info"))["Swarm"]
    return info
