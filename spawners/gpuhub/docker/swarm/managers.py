"""Which nodes manage the Swarm, and which of them is asked.

Three nodes manage it, so that one of them may be away; a cluster of fewer has one manager, because two would both be
needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from gpuhub.common.errors import GpuhubError, NodeSilent, NodeUnreachable, SetupError
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import DockerClients

SWARM_PORT = 2377
#: Maximum wait for the managers to agree on a leader after one has gone or come back, seconds. An election takes 10 to
#: 20 s, and the first may have no winner.
_ELECTION_DEADLINE_S = 60.0
#: Maximum wait for new managers, seconds. For 35 s a manager that has lost its role may be unable to have it again.
_PROMOTION_DEADLINE_S = 60.0
#: Maximum wait for all changes of roles together, seconds.
_ROLES_DEADLINE_S = 90.0
#: Maximum wait for an answer at a port, seconds.
_PORT_DEADLINE_S = 3.0
_PAUSE_S = 0.5
#: Parts of Docker's errors of a node that cannot answer for the Swarm: its managers have no leader, or it is not a
#: manager.
_NO_LEADER = ("does not have a leader", "context deadline exceeded", "no elected primary cluster manager")
_NO_MANAGER = ("not a swarm manager", "not part of a swarm")

T = TypeVar("T")


async def ask_manager(daemons: DockerClients, cluster: ClusterSettings, work: Callable[[str], Awaitable[T]]) -> T:
    """Run `work` with the name of a node that manages the Swarm, or of the only node, and return what it returns.

    It may be run again with another node's name, where a manager does not answer or the managers choose a new leader.

    Raises:
        NodeUnreachable: No manager answers, or too few of them do.
        GpuhubError: What `work` raises otherwise.
    """
    end = asyncio.get_running_loop().time() + _ELECTION_DEADLINE_S
    while True:
        failures: list[GpuhubError] = []
        for node in _order_managers(daemons, cluster):
            try:
                result = await work(node)
            except GpuhubError as error:
                if not _is_manager_away(error):
                    raise
                failures.append(error)
            else:
                daemons.swarm_manager = node
                return result
        if not _is_electing(failures) or asyncio.get_running_loop().time() > end:
            raise NodeUnreachable("; ".join(dict.fromkeys(str(error) for error in failures))) from failures[0]
        await asyncio.sleep(_PAUSE_S)


def _order_managers(daemons: DockerClients, cluster: ClusterSettings) -> list[str]:
    """Return the managers' names, first the one that answered last."""
    managers = [node.name for node in cluster.swarm_managers]
    return sorted(managers, key=lambda name: name != daemons.swarm_manager)


def _is_electing(failures: Sequence[GpuhubError]) -> bool:
    """Return whether the managers may be choosing a leader, by why each did not answer.

    Until there is one, a manager may leave requests without an answer.
    """
    is_silent = len(failures) > 1 and any(isinstance(error, NodeSilent) for error in failures)
    return is_silent or any(_mentions(error, _NO_LEADER) for error in failures)


def _is_manager_away(error: GpuhubError) -> bool:
    return isinstance(error, NodeUnreachable) or _mentions(error, (*_NO_LEADER, *_NO_MANAGER))


def _mentions(error: GpuhubError, texts: Iterable[str]) -> bool:
    return any(text in str(error) for text in texts)


async def wait_for_leader(daemons: DockerClients, manager: NodeSettings) -> None:
    """Wait until the managers of the Swarm have chosen a leader, as after all of them have started.

    Raises:
        SetupError: They have not, because more than half of them do not answer.
    """
    end = asyncio.get_running_loop().time() + _ELECTION_DEADLINE_S
    while True:
        try:
            await daemons.call(manager.name, "inspect_swarm")
        except GpuhubError as error:
            if not isinstance(error, NodeSilent) and not _mentions(error, _NO_LEADER):
                raise
            if asyncio.get_running_loop().time() > end:
                raise SetupError(
                    f"the Swarm that node {manager.name} manages has no leader: start the nodes that manage it as "
                    f"well. If they are lost, run `docker swarm leave --force` on {manager.name}; `sudo make up` then "
                    "makes another"
                ) from error
        else:
            return
        await asyncio.sleep(_PAUSE_S)


async def ensure_managers(daemons: DockerClients, cluster: ClusterSettings, lead: NodeSettings) -> str | None:
    """Let `cluster.swarm_managers` manage the Swarm; where one cannot, `lead` alone does, and a warning is returned.

    So a cluster whose firewalls let only its first node's port through continues as before.
    """
    managers = cluster.swarm_managers
    members = await daemons.call(lead.name, "nodes")
    new = [node for node in managers if not any(_is_manager(one) and has_address(one, node.address) for one in members)]
    closed = [
        node for node, is_open in zip(new, await asyncio.gather(*map(_is_port_open, new)), strict=True) if not is_open
    ]
    if closed:
        addresses = ", ".join(f"{node.address}:{SWARM_PORT}" for node in closed)
        problem = f"{addresses} cannot be reached: TCP {SWARM_PORT} must be open between the nodes"
    else:
        try:
            await assign_roles(daemons, cluster, managers, lead, within_s=_PROMOTION_DEADLINE_S)
        except SetupError as error:
            problem = str(error)
        else:
            return None
    await assign_roles(daemons, cluster, (lead,), lead)
    names = ", ".join(node.name for node in managers)
    return (
        f"{lead.name} alone keeps users' networks, and nothing starts while it is down; of {names} one could be away, "
        f"but {problem}"
    )


async def _is_port_open(node: NodeSettings) -> bool:
    """Return whether a node lets the managers' port through; nothing may listen there yet."""
    try:
        async with asyncio.timeout(_PORT_DEADLINE_S):
            _, writer = await asyncio.open_connection(node.address, SWARM_PORT)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def assign_roles(
    daemons: DockerClients,
    cluster: ClusterSettings,
    managers: Sequence[NodeSettings],
    lead: NodeSettings,
    *,
    leaving: NodeSettings | None = None,
    within_s: float = _ROLES_DEADLINE_S,
) -> None:
    """Let these nodes manage the Swarm, and no other node of the cluster nor the one that is leaving.

    While one of the managers does not answer, or has yet to join, nothing changes: of two, both would be needed.

    Args:
        lead: Manages it now.
        within_s: Longest wait, seconds.

    Raises:
        SetupError: The roles are not as they should be in time; or a node wants to leave, and a manager has yet to
            join.
        NodeUnreachable: A node wants to leave, and one of the managers does not answer.
    """
    try:
        infos = await asyncio.gather(*(read_swarm_info(daemons, node.name) for node in managers))
    except NodeUnreachable:
        if leaving is not None:
            raise
        return
    outside = [node.name for node, info in zip(managers, infos, strict=True) if info["LocalNodeState"] != "active"]
    if outside:
        if leaving is not None:
            raise SetupError(f"{', '.join(outside)} is not in the Swarm: `sudo make up` lets it join")
        return
    wanted = {str(info["NodeID"]) for info in infos}
    addresses = {node.address for node in (*cluster.own_nodes, *([] if leaving is None else [leaving]))}
    end = asyncio.get_running_loop().time() + within_s
    asked, problem = lead.name, ""
    while True:
        try:
            members: list[dict[str, Any]] = await daemons.call(asked, "nodes")
            surplus = _find_surplus(members, wanted, addresses)
            has_all = all(_is_manager(member) for member in members if member["ID"] in wanted)
            if has_all and not surplus:
                return
            for member, role in _choose_role_changes(members, wanted, surplus if has_all else []):
                await _set_role(daemons, asked, member, role)
            if has_all:
                # The node that was asked so far may be one that loses its role.
                asked = managers[0].name
        except GpuhubError as error:
            # The managers are choosing a leader, or another program changes roles as well.
            problem = f" ({error})"
        if asyncio.get_running_loop().time() > end:
            names = ", ".join(node.name for node in managers)
            raise SetupError(
                f"the Swarm is not managed by {names} after {within_s:.0f} s{problem}: TCP {SWARM_PORT} must be open "
                "between these nodes"
            )
        await asyncio.sleep(_PAUSE_S)


def _choose_role_changes(
    members: Iterable[dict[str, Any]], wanted: Collection[str], surplus: Iterable[dict[str, Any]]
) -> list[tuple[dict[str, Any], str]]:
    """Return the members that need another role: all that should be managers, otherwise one of the surplus.

    Those that do not answer lose the role first: managers cannot do without more than half of them.
    """
    missing = [member for member in members if member["ID"] in wanted and member["Spec"]["Role"] != "manager"]
    if missing:
        return [(member, "manager") for member in missing]
    removable = [member for member in surplus if member["Spec"]["Role"] == "manager"]
    removable.sort(key=lambda member: member["ManagerStatus"]["Reachability"] == "reachable")
    return [(member, "worker") for member in removable[:1]]


def _find_surplus(
    members: Iterable[dict[str, Any]], wanted: Collection[str], addresses: Collection[str]
) -> list[dict[str, Any]]:
    """Return the managers at nodes of the cluster that are not to be managers, also as what a node was before.

    A member that has the role and could never join the others is none: it has no vote, and cannot lose the role.
    """
    return [
        member
        for member in members
        if member["ID"] not in wanted and _is_manager(member) and any(has_address(member, each) for each in addresses)
    ]


def _is_manager(member: dict[str, Any]) -> bool:
    """Return whether a member takes part in the managers' votes; for one that does not answer this is so as well."""
    return member.get("ManagerStatus") is not None


def has_address(member: dict[str, Any], address: str) -> bool:
    """Return whether a member of the Swarm, as Docker lists it, is at this address."""
    # A leader may report 0.0.0.0 in its status.
    as_manager = (member.get("ManagerStatus") or {}).get("Addr") or ""
    return address in {member["Status"].get("Addr"), as_manager.rpartition(":")[0]}


async def _set_role(daemons: DockerClients, asked: str, member: dict[str, Any], role: str) -> None:
    await daemons.call(asked, "update_node", member["ID"], member["Version"]["Index"], {**member["Spec"], "Role": role})


async def read_swarm_info(daemons: DockerClients, node: str) -> dict[str, Any]:
    """Return what a daemon knows about the Swarm that it is in.

    While that Swarm has no leader, the answer takes 20 s and lacks the Swarm's own settings (`Cluster`).

    Raises:
        NodeUnreachable: It does not answer.
    """
    info: dict[str, Any] = (await daemons.call(node, "info"))["Swarm"]
    return info
