"""The nodes' membership of the Swarm: they join, are removed, and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from gpuhub.common.errors import Conflict, GpuhubError, NodeUnreachable, SetupError
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.swarm.managers import (
    SWARM_PORT,
    ask_manager,
    assign_roles,
    ensure_managers,
    has_address,
    read_swarm_info,
    wait_for_leader,
)

#: Prefix length of each user's network.
_SUBNET_BITS = 24
_JOIN_DEADLINE_S = 30.0


async def ensure_swarm(
    daemons: DockerClients, cluster: ClusterSettings, *, away: Collection[str] = frozenset()
) -> str | None:
    """Join all nodes but guests in one Swarm if users' networks span nodes; nodes that have left join again.

    Returns a warning if fewer nodes manage it than should.

    Args:
        away: Nodes that do not answer, which stay what they are.

    Raises:
        SetupError: A node belongs to another Swarm, or the nodes' Swarm has lost more than half of its managers.
        NodeUnreachable: A node does not answer.
    """
    if not cluster.has_overlay:
        return None
    lead = await _ensure_manager(daemons, cluster)
    others = [node for node in cluster.own_nodes if node != lead and node.name not in away]
    await asyncio.gather(*(_ensure_joined(daemons, lead, node) for node in others))
    return await ensure_managers(daemons, cluster, lead)


async def ensure_member(daemons: DockerClients, cluster: ClusterSettings, node: NodeSettings) -> str | None:
    """Join one node to the Swarm; only this node and one that manages the Swarm must answer.

    Returns a warning if fewer nodes manage it than should.

    Raises:
        SetupError: The node belongs to another Swarm, or cannot reach the manager's ports.
        NodeUnreachable: One of the two does not answer.
    """
    lead = await _ensure_manager(daemons, cluster)
    if node != lead:
        await _ensure_joined(daemons, lead, node)
    return await ensure_managers(daemons, cluster, lead)


async def hand_over(daemons: DockerClients, cluster: ClusterSettings, node: NodeSettings) -> None:
    """Let the other nodes manage the Swarm without this one, which is about to leave.

    Raises:
        GpuhubError: They cannot: one of those that are to manage it does not answer, or the Swarm has no leader.
    """
    lead = await _find_manager(daemons, cluster)
    if lead is not None:
        others = _leave_out(cluster, node)
        await assign_roles(daemons, others, others.swarm_managers, lead, leaving=node)


async def remove_member(daemons: DockerClients, cluster: ClusterSettings, node: NodeSettings) -> None:
    """Remove one node from the Swarm, after `hand_over`; a node outside of the Swarm is ignored.

    A node that does not answer is removed from the list of members all the same.
    """
    others = _leave_out(cluster, node)
    members = await ask_manager(daemons, others, lambda manager: daemons.call(manager, "nodes"))
    try:
        node_id = (await read_swarm_info(daemons, node.name)).get("NodeID")
    except NodeUnreachable:
        node_id = next((member["ID"] for member in members if has_address(member, node.address)), None)
    else:
        if node_id in [member["ID"] for member in members]:
            await daemons.call(node.name, "leave_swarm", force=True)
    if node_id in [member["ID"] for member in members]:
        await ask_manager(daemons, others, lambda manager: daemons.call(manager, "remove_node", node_id, force=True))


def _leave_out(cluster: ClusterSettings, node: NodeSettings) -> ClusterSettings:
    return cluster.model_copy(update={"nodes": tuple(one for one in cluster.nodes if one != node)})


async def leave_swarm(daemons: DockerClients, cluster: ClusterSettings) -> list[str]:
    """Dissolve the Swarm, workers before their managers, and return warnings.

    The Swarm remains, with a warning, if it has networks or services of others. If a node cannot leave, so do the nodes
    after it.
    """
    managers: list[str] = []
    try:
        lead = await _find_manager(daemons, cluster)
        if lead is None:
            return []
        others = [
            network["Name"]
            for network in await daemons.call(lead.name, "networks", filters={"driver": ["overlay"]})
            if not network.get("Ingress") and network["Name"] != "ingress"
        ]
        if others or await daemons.call(lead.name, "services"):
            return [f"the Swarm remains: others use it ({', '.join(others) or 'services'})"]
        for node in reversed(cluster.own_nodes):
            info = await read_swarm_info(daemons, node.name)
            if info["LocalNodeState"] != "active":
                continue
            if info.get("ControlAvailable"):
                managers.append(node.name)
            else:
                await daemons.call(node.name, "leave_swarm", force=True)
        for name in managers:
            await daemons.call(name, "leave_swarm", force=True)
    except GpuhubError as error:
        # A worker without its manager could not join again.
        return [f"the Swarm remains: {error}"]
    return []


async def _find_manager(daemons: DockerClients, cluster: ClusterSettings) -> NodeSettings | None:
    """Return a node that answers and manages the nodes' Swarm; None where there is no Swarm yet.

    The first of the nodes that are to manage it counts whatever Swarm it manages. That of another node has to have the
    pool of addresses of the settings, so that nobody's own Swarm is taken for that of the cluster.

    Raises:
        NodeUnreachable: None was found, and a node does not answer.
        SetupError: None was found, and a node is a worker of some Swarm; or a Swarm has no leader.
    """
    wanted = list(cluster.swarm_managers)
    failure: GpuhubError | None = None
    for node in [*wanted, *(one for one in cluster.own_nodes if one not in wanted)]:
        try:
            info = await read_swarm_info(daemons, node.name)
        except NodeUnreachable as error:
            failure = failure or error
            continue
        if info["LocalNodeState"] != "active":
            continue
        if info.get("ControlAvailable"):
            await wait_for_leader(daemons, node)
            info = info if info.get("Cluster") else await read_swarm_info(daemons, node.name)
        if info.get("ControlAvailable") and (node == wanted[0] or _has_pool(info, cluster)):
            return node
        if node == wanted[0]:
            failure = failure or SetupError(
                f"node {node.name} is a worker of a Swarm that gpuhub does not manage: run `docker swarm leave` there "
                "first"
            )
    if failure is not None:
        raise failure
    return None


def _has_pool(info: dict[str, Any], cluster: ClusterSettings) -> bool:
    return (info.get("Cluster") or {}).get("DefaultAddrPool") == [cluster.network.overlay_pool]


async def _ensure_manager(daemons: DockerClients, cluster: ClusterSettings) -> NodeSettings:
    """Return a node that manages the Swarm, which is made on the first of the managers where there is none."""
    found = await _find_manager(daemons, cluster)
    if found is not None:
        return found
    lead = cluster.swarm_managers[0]
    if (await read_swarm_info(daemons, lead.name))["LocalNodeState"] in {"error", "pending"}:
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
        if (await read_swarm_info(daemons, lead.name))["LocalNodeState"] != "active":
            raise
    return lead


async def _ensure_joined(daemons: DockerClients, lead: NodeSettings, node: NodeSettings) -> None:
    swarm = await daemons.call(lead.name, "inspect_swarm")
    info = await read_swarm_info(daemons, node.name)
    if info["LocalNodeState"] == "active":
        if await _is_member(daemons, lead, info["NodeID"]):
            return
        own = (info.get("Cluster") or {}).get("ID")
        if own != swarm["ID"] and (own or info.get("ControlAvailable")):
            raise SetupError(
                f"node {node.name} belongs to another Swarm: "
                "run `docker swarm leave` there first (--force on a manager)"
            )
    if info["LocalNodeState"] != "inactive":
        # The node was removed from our Swarm, or its manager was set up again.
        await daemons.call(node.name, "leave_swarm", force=True)
    await _join(daemons, lead, node, swarm["JoinTokens"]["Worker"])


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
            info = await read_swarm_info(daemons, node.name)
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
