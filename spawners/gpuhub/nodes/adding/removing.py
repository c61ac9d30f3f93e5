"""`gpuhub node remove`: nothing runs there any more, nothing of gpuhub's is left there but images and scratch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuhub import names, settings
from gpuhub.admin import tables
from gpuhub.admin.client import open_broker
from gpuhub.admin.commands import Console
from gpuhub.broker.client import BrokerClient
from gpuhub.broker.schemas import CordonRequest, NodeState
from gpuhub.containers import clearing, swarm
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.ssh import ssh_files
from gpuhub.errors import Conflict, GpuhubError, InvalidRequest, NodeUnreachable, NotFound
from gpuhub.guard.container import remove_guard
from gpuhub.nodes.adding import certificates, cluster_file, daemon_tls, hostkeys, steps
from gpuhub.nodes.adding.remote import Remote, resolve
from gpuhub.nodes.adding.target import Target, parse_target
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Node

_REASON = "it is being taken out of the cluster"
#: Longer than the broker waits for a hub that does not stop a notebook, seconds.
_DRAIN_S = 120.0
_LOOK_AGAIN_S = 0.5
_SHUT = frozenset({NodeState.CORDONED, NodeState.DRAINING})
_WORK = frozenset({names.KIND_NOTEBOOK, names.KIND_WORKER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """What was asked for."""

    name: str
    cluster_file: Path
    #: End what runs there, and go on where the node does not answer.
    force: bool = False
    yes: bool = False
    #: How the administrator logs in there, where cluster.toml does not say it.
    target: Target | None = None


def remove(wish: Farewell, paths: Paths, console: Console, bring_up: Callable[[], None]) -> None:
    """Take the node out; `bring_up` has running services forget it.

    Raises:
        GpuhubError: with why it stays, or what could not be undone.
    """
    cluster = settings.load(wish.cluster_file)
    node = find_leaving(cluster, wish.name)
    text = cluster_file.take_node(wish.cluster_file.read_text(encoding="utf-8"), node.name)
    cluster_file.check(text, wish.cluster_file)
    is_up = asyncio.run(_empty(wish, node, paths, console))
    before = cluster_file.write(wish.cluster_file, text)
    console.say(f"  ✓ {wish.cluster_file} has {node.name} no more; what it was before is in {before.name}")
    troubles = []
    if _is_running(paths, node):
        try:
            bring_up()
        except GpuhubError as error:
            troubles.append(f"gpuhub did not come up without it: {error}")
    if is_up:
        troubles += asyncio.run(_clear(cluster, node, paths, console))
        troubles += _forget(wish, node, paths, console)
    else:
        console.say(
            f"  ! nothing was undone on {node.name}, which does not answer: containers, key and Swarm are as they were"
        )
    ssh_files(paths.instance).known_hosts(node.name).unlink(missing_ok=True)
    certificates.forget(certificates.client_files(paths, node.name))
    if troubles:
        raise GpuhubError("\n".join([f"{node.name} is out, and this is left to do by hand:", *troubles]))
    console.say(f"{node.name} is out.")


def find_leaving(cluster: Cluster, name: str) -> Node:
    """The node that can leave. Pure.

    Raises:
        NotFound: there is none of that name.
        InvalidRequest: the others need it.
    """
    try:
        node = cluster.node(name)
    except KeyError:
        raise NotFound(
            f"there is no node {name!r}; there are {', '.join(node.name for node in cluster.nodes)}"
        ) from None
    if len(cluster.nodes) == 1:
        raise InvalidRequest(f"{name} is the only node: `sudo make down` stops gpuhub")
    if node == swarm.manager(cluster) and cluster.has_overlay:
        raise InvalidRequest(
            f"{name} is the first node and keeps the Swarm with everybody's networks: without it nothing can start "
            "anywhere. To replace it: `sudo make down`, move the table of another node to the top of cluster.toml, "
            "`sudo make up`; then remove it"
        )
    return node


async def _empty(wish: Farewell, node: Node, paths: Paths, console: Console) -> bool:
    """Return when nothing of users runs there; whether the node answers.

    Raises:
        Conflict: something runs there, and may not be ended.
        NodeUnreachable: it does not answer.
    """
    daemons = Daemons((node,), instance=paths.instance, run_dir=paths.run)
    try:
        if _is_running(paths, node):
            client = open_broker(paths)
            try:
                await drain(wish, node, client, console)
            finally:
                await client.close()
        mine = {"label": [f"{names.LABEL_INSTANCE}={paths.instance}"]}
        found = await daemons.call(node.name, "containers", filters=mine)
        running = [each["Names"][0].lstrip("/") for each in found if each["Labels"].get(names.LABEL_KIND) in _WORK]
        if running and not wish.force:
            raise Conflict(f"on {node.name} run {', '.join(running)}: --force ends them")
        if not wish.yes:
            console.confirm(f"Take {node.name} out of the cluster?")
    except NodeUnreachable as error:
        if not wish.force:
            raise NodeUnreachable(f"{error}. With --force it is taken out of cluster.toml and left as it is") from None
        return False
    finally:
        daemons.close()
    return True


async def drain(wish: Farewell, node: Node, client: BrokerClient, console: Console) -> None:
    """Return when the broker has no lease there any more, and gives none.

    Raises:
        Conflict: there are some, and they may not be ended, or did not end.
    """
    was_open = next(view.state for view in await client.nodes() if view.name == node.name) not in _SHUT
    # Nothing begins there while it is looked at.
    await client.change_node(node.name, "cordon", CordonRequest(reason=_REASON))
    try:
        await _agree(wish, node, client, console)
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
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _agree(wish: Farewell, node: Node, client: BrokerClient, console: Console) -> None:
    leases = await client.leases(node=node.name)
    if not leases:
        return
    console.say(f"What runs on {node.name}:")
    console.say(tables.format_runs(leases, node.name, console.now, console.width))
    if not wish.force:
        raise Conflict(f"{node.name} has leases: `gpuhub node drain {node.name}` first, or --force to end them now")
    if not wish.yes:
        console.confirm("End all of this now?")


def _is_running(paths: Paths, node: Node) -> bool:
    """Whether services run that know the node."""
    if not paths.used_cluster_file.exists():
        return False
    return node.name in {each.name for each in settings.load(paths.used_cluster_file).nodes}


async def _clear(cluster: Cluster, node: Node, paths: Paths, console: Console) -> list[str]:
    """Remove what gpuhub has made there; a line for each thing that stays against the wish."""
    daemons = Daemons(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        await clearing.remove_all(daemons, node.name, paths.instance, "container")
        await remove_guard(daemons, paths.instance, node.name)
        await clearing.remove_all(daemons, node.name, paths.instance, "network")
        volumes = await clearing.remove_definitions(daemons, node.name, paths.instance)
        if cluster.has_overlay:
            await swarm.remove_member(daemons, cluster, node)
        images = await daemons.call(node.name, "images", filters={"reference": "gpuhub/*"})
    except GpuhubError as error:
        return [str(error)]
    finally:
        daemons.close()
    console.say("  ✓ containers, packet filter, networks and definitions of NFS volumes are gone; it left the Swarm")
    kept = [f"{len(images)} images" if images else "", f"scratch ({', '.join(volumes)})" if volumes else ""]
    if any(kept):
        console.say(f"  - left there: {' and '.join(part for part in kept if part)}")
    return []


def _forget(wish: Farewell, node: Node, paths: Paths, console: Console) -> list[str]:
    """Take key or certificates away from the node, over the administrator's own SSH."""
    files = ssh_files(paths.instance)
    has_key = node.tls is None and files.known_hosts(node.name).exists()
    if not has_key and node.tls != certificates.client_files(paths, node.name):
        return []  # set up by hand
    what = "gpuhub's key" if has_key else "the certificates"
    try:
        target = wish.target or parse_target(node.docker if has_key else f"ssh://{node.address}")
        with _log_in(target, node, paths) as remote:
            if has_key:
                steps.take_key_out(remote, files)
            elif node.tls is not None:
                remote.run(daemon_tls.REMOVE, as_root=remote.run("id -u").strip() != "0")
    except GpuhubError as error:
        place = "~/.ssh/authorized_keys" if has_key else f"{daemon_tls.FOLDER} and {daemon_tls.DROP_IN}"
        return [f"{what} could not be taken away: {error}. See {place} of {node.name}"]
    console.say(f"  ✓ {what} was taken out of authorized_keys" if has_key else f"  ✓ {what} were taken away")
    return []


def _log_in(target: Target, node: Node, paths: Paths) -> Remote:
    resolved = resolve(target)
    shown = hostkeys.scan(resolved.host, resolved.port)
    kept = ssh_files(paths.instance).known_hosts(node.name)
    known = hostkeys.parse_keys(kept.read_text(encoding="ascii")) if kept.exists() else []
    known += hostkeys.find_known(resolved.host, resolved.port, resolved.known_hosts)
    if not hostkeys.is_known(shown, known, resolved.host):
        raise InvalidRequest(f"{resolved.host} was never seen before: `ssh {resolved.host}` first")
    return Remote(target, shown)
