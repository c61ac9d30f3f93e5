"""`gpuhub node remove`: ends what runs on a node and removes all of gpuhub there, except images and scratch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import CordonRequest, NodeState
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, InvalidRequest, NodeUnreachable, NotFound
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker import ssh
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.firewall_container import remove_firewall
from gpuhub.docker.ssh import ssh_files
from gpuhub.docker.swarm import membership
from gpuhub.ops.broker_connection import connect_to_broker
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.provision import cluster_file, node_access
from gpuhub.ops.provision.ssh_session import SshSession, SshTarget, parse_target, resolve_target

_REASON = "it is being removed from the cluster"
#: Longer than the broker waits for a hub that does not stop a notebook, seconds.
_DRAIN_S = 120.0
#: Interval between two queries of the node's leases, seconds.
_POLL_S = 0.5
#: States of nodes that take no new work.
_CLOSED_STATES = frozenset({NodeState.CORDONED, NodeState.DRAINING})
_WORK_KINDS = frozenset({names.KIND_NOTEBOOK, names.KIND_WORKER})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalRequest:
    """The arguments and options of `gpuhub node remove`."""

    name: str
    cluster_file: Path
    #: End what runs there, and continue if the node does not answer.
    force: bool = False
    yes: bool = False
    #: The machine for the administrator's login; None for the one in cluster.toml.
    target: SshTarget | None = None


def remove_node(
    request: RemovalRequest, paths: Paths, console: OperatorConsole, start_services: Callable[[], None]
) -> None:
    """Remove the node from the cluster.

    Args:
        start_services: Called when services run, so that they no longer use the node.

    Raises:
        GpuhubError: The node stays, or something on it could not be undone.
    """
    cluster = settings.load(request.cluster_file)
    node = find_removable_node(cluster, request.name)
    _build_text(request)
    is_in_swarm = cluster.has_overlay and not node.guest
    was_open = asyncio.run(_is_open(node, paths))
    try:
        is_up = asyncio.run(_end_all_work(request, node, paths, console))
        failures = asyncio.run(_hand_over_swarm(cluster, node, paths, force=request.force)) if is_in_swarm else []
    except BaseException:
        if was_open:
            asyncio.run(_reopen(node, paths, console))
        raise
    # Built again: another node may have been added or removed since.
    before = cluster_file.replace_file(request.cluster_file, _build_text(request))
    console.write(f"  ✓ {request.cluster_file} no longer has {node.name}; the previous file is {before.name}")
    if _is_running(paths, node):
        try:
            start_services()
        except GpuhubError as error:
            failures.append(f"gpuhub did not start without it: {error}")
    if is_up:
        failures += asyncio.run(_clean_node(cluster, node, paths, console))
        failures += _revoke_access(request, node, paths, console)
    else:
        failures += asyncio.run(_remove_from_swarm(cluster, node, paths)) if is_in_swarm else []
        console.write(f"  ! nothing was undone on {node.name}, which does not answer: containers and key remain there")
    ssh_files(paths.instance).known_hosts(node.name).unlink(missing_ok=True)
    node_access.remove_certificates(node_access.find_client_files(paths, node.name))
    if failures:
        raise GpuhubError("\n".join([f"{node.name} is removed, and this remains to be done by hand:", *failures]))
    console.write(f"{node.name} is removed.")


def _build_text(request: RemovalRequest) -> str:
    """Return the file's text without the node.

    Raises:
        NotFound, SettingsError: It has no such node, or is not valid without it.
    """
    text = cluster_file.remove_node(request.cluster_file.read_text(encoding="utf-8"), request.name)
    cluster_file.check_text(text, request.cluster_file)
    return text


def find_removable_node(cluster: ClusterSettings, name: str) -> NodeSettings:
    """Return the node of that name if it can be removed.

    Raises:
        NotFound: There is none.
        InvalidRequest: The other nodes need it.
    """
    try:
        node = cluster.node(name)
    except KeyError:
        raise NotFound(
            f"there is no node {name!r}; there are {', '.join(node.name for node in cluster.nodes)}"
        ) from None
    if len(cluster.own_nodes) == 1:
        raise InvalidRequest(f"{name} is the only node: `sudo make down` stops gpuhub")
    return node


async def _end_all_work(request: RemovalRequest, node: NodeSettings, paths: Paths, console: OperatorConsole) -> bool:
    """End the users' work on the node, and return whether the node answers.

    Raises:
        Conflict: Something runs there, and `force` is not set.
        NodeUnreachable: The node does not answer, and `force` is not set.
    """
    daemons = DockerClients((node,), instance=paths.instance, run_dir=paths.run)
    try:
        if _is_running(paths, node):
            async with _open_broker(paths) as client:
                await drain_node(request, node, client, console)
        filters = {"label": [f"{names.LABEL_INSTANCE}={paths.instance}"]}
        containers = await daemons.call(node.name, "containers", filters=filters)
        running = [
            container["Names"][0].lstrip("/")
            for container in containers
            if container["Labels"].get(names.LABEL_KIND) in _WORK_KINDS
        ]
        if running and not request.force:
            raise Conflict(f"on {node.name} run {', '.join(running)}: --force ends them")
        if not request.yes:
            console.confirm(f"Remove {node.name} from the cluster?")
    except NodeUnreachable as error:
        if not request.force:
            raise NodeUnreachable(
                f"{error}. With --force it is removed from cluster.toml, and nothing is changed on the node"
            ) from None
        return False
    finally:
        daemons.close()
    return True


@asynccontextmanager
async def _open_broker(paths: Paths) -> AsyncIterator[AsyncBrokerClient]:
    client = connect_to_broker(paths)
    try:
        yield client
    finally:
        await client.close()


async def _is_open(node: NodeSettings, paths: Paths) -> bool:
    """Return whether services run that give the node new work."""
    if not _is_running(paths, node):
        return False
    async with _open_broker(paths) as client:
        return await _takes_work(node, client)


async def _reopen(node: NodeSettings, paths: Paths, console: OperatorConsole) -> None:
    """Let a node that stays take work again, unless leases have yet to end there."""
    try:
        async with _open_broker(paths) as client:
            if not await _takes_work(node, client) and not await client.leases(node=node.name):
                await client.change_node(node.name, "undrain")
    except GpuhubError as error:
        console.write(f"  ! {node.name} takes no new work until `gpuhub node undrain {node.name}`: {error}")


async def _takes_work(node: NodeSettings, client: AsyncBrokerClient) -> bool:
    return next(view.state for view in await client.nodes() if view.name == node.name) not in _CLOSED_STATES


async def drain_node(
    request: RemovalRequest, node: NodeSettings, client: AsyncBrokerClient, console: OperatorConsole
) -> None:
    """Drain the node, and return when the broker has no more leases there.

    Raises:
        Conflict: There are leases, and `force` is not set, or they did not end in time.
    """
    was_open = await _takes_work(node, client)
    # Nothing new starts there after the cordon.
    await client.change_node(node.name, "cordon", CordonRequest(reason=_REASON))
    try:
        await _confirm_end(request, node, client, console)
    except GpuhubError:
        if was_open:
            await client.change_node(node.name, "undrain")
        raise
    await client.change_node(node.name, "drain", CordonRequest(reason=_REASON, grace_s=0))
    end = time.monotonic() + _DRAIN_S
    while leases := await client.leases(node=node.name):
        if time.monotonic() > end:
            raise Conflict(
                f"{len(leases)} leases on {node.name} did not end within {_DRAIN_S:.0f} s: `gpuhub lease list` shows "
                f"them. {node.name} stays in the cluster, drained"
            )
        await asyncio.sleep(_POLL_S)


async def _confirm_end(
    request: RemovalRequest, node: NodeSettings, client: AsyncBrokerClient, console: OperatorConsole
) -> None:
    leases = await client.leases(node=node.name)
    if not leases:
        return
    console.write_leases(node.name, leases)
    if not request.force:
        raise Conflict(f"{node.name} has leases: `gpuhub node drain {node.name}` first, or --force to end them now")
    if not request.yes:
        console.confirm("End all of this now?")


async def _hand_over_swarm(cluster: ClusterSettings, node: NodeSettings, paths: Paths, *, force: bool) -> list[str]:
    """Let other nodes keep the users' networks, if this one does; with `force` return a line if they cannot.

    Raises:
        Conflict: They cannot, and `force` is not set.
    """
    try:
        with closing(DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)) as daemons:
            await membership.hand_over(daemons, cluster, node)
    except GpuhubError as error:
        if not force:
            raise Conflict(f"{node.name} stays: the others cannot keep users' networks without it: {error}") from None
        return [
            f"the other nodes did not take over the Swarm: {error}. If nothing starts: `sudo make down`, "
            "`docker swarm leave --force` on every node, `sudo make up`"
        ]
    return []


async def _remove_from_swarm(cluster: ClusterSettings, node: NodeSettings, paths: Paths) -> list[str]:
    """Remove a node that does not answer from the Swarm's members, and return a line for each failure."""
    try:
        with closing(DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)) as daemons:
            await membership.remove_member(daemons, cluster, node)
    except GpuhubError as error:
        return [f"the Swarm still has it as a member: {error}"]
    return []


def _is_running(paths: Paths, node: NodeSettings) -> bool:
    """Return whether services run that use the node."""
    if not paths.used_cluster_file.exists():
        return False
    return node.name in {used.name for used in settings.load(paths.used_cluster_file).nodes}


async def _clean_node(
    cluster: ClusterSettings, node: NodeSettings, paths: Paths, console: OperatorConsole
) -> list[str]:
    """Remove what gpuhub made on the node, and return a line for each failure."""
    daemons = DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        await container_lifecycle.remove_instance_objects(daemons, node.name, paths.instance, "container")
        await remove_firewall(daemons, paths.instance, node.name)
        await container_lifecycle.remove_instance_objects(daemons, node.name, paths.instance, "network")
        volumes = await container_lifecycle.remove_nfs_volumes(daemons, node.name, paths.instance)
        if cluster.has_overlay:
            await membership.remove_member(daemons, cluster, node)
        images = await daemons.call(node.name, "images", filters={"reference": "gpuhub/*"})
    except GpuhubError as error:
        return [str(error)]
    finally:
        daemons.close()
    console.write(
        "  ✓ containers, packet filter, networks and definitions of NFS volumes are removed, and it left the Swarm"
    )
    remaining = [f"{len(images)} images" if images else "", f"scratch ({', '.join(volumes)})" if volumes else ""]
    if any(remaining):
        console.write(f"  - remaining there: {' and '.join(part for part in remaining if part)}")
    return []


def _revoke_access(request: RemovalRequest, node: NodeSettings, paths: Paths, console: OperatorConsole) -> list[str]:
    """Remove the key or the certificates from the node over the administrator's SSH; return a line for each failure."""
    files = ssh_files(paths.instance)
    has_key = node.tls is None and files.known_hosts(node.name).exists()
    if not has_key and node.tls != node_access.find_client_files(paths, node.name):
        return []  # the access was set up by hand
    access = "gpuhub's key" if has_key else "the certificates"
    try:
        target = request.target or parse_target(node.docker if has_key else f"ssh://{node.address}")
        with _open_session(target, node, paths) as session:
            if has_key:
                node_access.revoke_key(session, files)
            elif node.tls is not None:
                session.run(node_access.REMOVE_TLS_SCRIPT, as_root=session.run("id -u").strip() != "0")
    except GpuhubError as error:
        location = "~/.ssh/authorized_keys" if has_key else f"{node_access.TLS_FOLDER} and {node_access.DROP_IN}"
        return [f"{access} could not be removed: {error}. See {location} of {node.name}"]
    console.write(f"  ✓ {access} was removed from authorized_keys" if has_key else f"  ✓ {access} were removed")
    return []


def _open_session(target: SshTarget, node: NodeSettings, paths: Paths) -> SshSession:
    resolved = resolve_target(target)
    shown = ssh.scan_host_keys(resolved.host, resolved.port)
    files = ssh_files(paths.instance)
    known_keys = files.read_host_keys(node.name)
    known_keys += ssh.find_known_keys(resolved.host, resolved.port, resolved.known_hosts)
    trusted_keys = ssh.select_known_keys(shown, known_keys, resolved.host, files.known_hosts(node.name))
    if not trusted_keys:
        raise InvalidRequest(f"{resolved.host} is new to ssh: run `ssh {resolved.host}` first")
    return SshSession(target, trusted_keys)
