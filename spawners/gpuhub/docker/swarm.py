"""The Docker Swarm of the nodes, used for overlay networks only: the first node manages it, the others join."""

from __future__ import annotations

import asyncio
from typing import Any

from gpuhub.common.errors import Conflict, GpuhubError, SetupError
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import DockerClients

SWARM_PORT = 2377
#: Prefix length of each user's network.
_SUBNET_BITS = 24
_JOIN_DEADLINE_S = 30.0


def manager_node(cluster: ClusterSettings) -> NodeSettings:
    """Return the node that manages the Swarm."""
    return cluster.own_nodes[0]


async def ensure_swarm(daemons: DockerClients, cluster: ClusterSettings) -> None:
    """Join all nodes but guests in one Swarm if users' networks span nodes; nodes that have left join again.

    Raises:
        SetupError: A node belongs to another Swarm.
        NodeUnreachable: A node does not answer.
    """
    if not cluster.has_overlay:
        return
    lead = manager_node(cluster)
    swarm_id = await _ensure_manager(daemons, cluster, lead)
    tokens = (await daemons.call(lead.name, "inspect_swarm"))["JoinTokens"]
    await asyncio.gather(
        *(_ensure_joined(daemons, lead, node, swarm_id, tokens["Worker"]) for node in cluster.own_nodes if node != lead)
    )


async def ensure_member(daemons: DockerClients, cluster: ClusterSettings, node: NodeSettings) -> None:
    """Join one node to the Swarm; only this node and the first node, which manages the Swarm, must answer.

    Raises:
        SetupError: The node belongs to another Swarm, or cannot reach the first node's ports.
        NodeUnreachable: One of the two does not answer.
    """
    lead = manager_node(cluster)
    swarm_id = await _ensure_manager(daemons, cluster, lead)
    if node != lead:
        tokens = (await daemons.call(lead.name, "inspect_swarm"))["JoinTokens"]
        await _ensure_joined(daemons, lead, node, swarm_id, tokens["Worker"])


async def remove_member(daemons: DockerClients, cluster: ClusterSettings, node: NodeSettings) -> None:
    """Remove one node from the Swarm; a node outside of the Swarm is ignored."""
    lead = manager_node(cluster)
    node_id = (await _swarm_info(daemons, node.name)).get("NodeID")
    members = [member["ID"] for member in await daemons.call(lead.name, "nodes")] if node_id else []
    if node_id in members:
        await daemons.call(node.name, "leave_swarm", force=True)
        await daemons.call(lead.name, "remove_node", node_id, force=True)


async def leave_swarm(daemons: DockerClients, cluster: ClusterSettings) -> list[str]:
    """Dissolve the Swarm, workers before their manager, and return warnings.

    The Swarm remains, with a warning, if it has networks or services of others. If a node cannot leave, so do the nodes
    after it.
    """
    lead = manager_node(cluster).name
    info = await _swarm_info(daemons, lead)
    if info["LocalNodeState"] != "active" or not info.get("ControlAvailable"):
        return []
    others = [
        network["Name"]
        for network in await daemons.call(lead, "networks", filters={"driver": ["overlay"]})
        if not network.get("Ingress") and network["Name"] != "ingress"
    ]
    if others or await daemons.call(lead, "services"):
        return [f"the Swarm remains: others use it ({', '.join(others) or 'services'})"]
    for node in reversed(cluster.own_nodes):
        try:
            if (await _swarm_info(daemons, node.name))["LocalNodeState"] == "active":
                await daemons.call(node.name, "leave_swarm", force=True)
        except GpuhubError as error:
            # A worker without its manager could not join again.
            return [f"the Swarm remains: {error}"]
    return []


async def _ensure_manager(daemons: DockerClients, cluster: ClusterSettings, lead: NodeSettings) -> str:
    info = await _swarm_info(daemons, lead.name)
    if info["LocalNodeState"] == "active" and not info.get("ControlAvailable"):
        raise SetupError(
            f"node {lead.name} is a worker of a Swarm that gpuhub does not manage: run `docker swarm leave` there first"
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
                data_path_addr=lead.rank_address,
                default_addr_pool=[cluster.network.overlay_pool],
                subnet_size=_SUBNET_BITS,
            )
        except GpuhubError:
            # A concurrent call may have initialised the Swarm.
            if (await _swarm_info(daemons, lead.name))["LocalNodeState"] != "active":
                raise
    return str((await daemons.call(lead.name, "inspect_swarm"))["ID"])


async def _ensure_joined(
    daemons: DockerClients, lead: NodeSettings, node: NodeSettings, swarm_id: str, token: str
) -> None:
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
        # The node was removed from our Swarm, or its manager was set up again.
        await daemons.call(node.name, "leave_swarm", force=True)
    await _join(daemons, lead, node, token)


async def _join(daemons: DockerClients, lead: NodeSettings, node: NodeSettings, token: str) -> None:
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
                data_path_addr=node.rank_address,
            )
        except GpuhubError as error:
            info = await _swarm_info(daemons, node.name)
            if info["LocalNodeState"] == "active":
                return
            if asyncio.get_running_loop().time() > end or isinstance(error, Conflict):
                raise SetupError(
                    f"node {node.name} cannot join the Swarm at {lead.address}:{SWARM_PORT} of node {lead.name}: "
                    f"{error}. TCP 2377 and 7946 and UDP 7946 and 4789 must be open between the nodes, and with "
                    "network.encrypt IP protocol 50"
                ) from error
            await asyncio.sleep(1)
        else:
            return


async def _is_member(daemons: DockerClients, lead: NodeSettings, node_id: str) -> bool:
    members = await daemons.call(lead.name, "nodes")
    return any(member["ID"] == node_id and member["Status"]["State"] != "down" for member in members)


async def _swarm_info(daemons: DockerClients, node: str) -> dict[str, Any]:
    info: dict[str, Any] = (await daemons.call(node, "info"))["Swarm"]
    return info
