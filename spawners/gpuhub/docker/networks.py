"""Networks on the nodes: the node-local access bridge, one private network per user, and the MTU of both."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, NodeSilent, NodeUnreachable, NotFound, SetupError, Unavailable
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.network_lifecycle import (
    SHOWN_DEADLINE_S,
    build_still_shown,
    create_network,
    inspect_network,
    is_in_use,
    remove_outdated,
    wait_until_gone,
)
from gpuhub.docker.swarm.managers import ask_manager

#: Maximum wait for an overlay's subnet, seconds.
_SUBNET_DEADLINE_S = 10.0
#: Maximum wait for the kernel's answer about a route, seconds.
_ROUTE_DEADLINE_S = 5.0
#: Time after which no further attempt is made to connect a container to an overlay, and the pause between two, seconds.
#: For up to 50 s after a network partition a node receives nothing from the leader. Then another may be elected, which
#: takes up to 20 s, and nodes find it after up to 15 s.
_JOIN_DEADLINE_S, _JOIN_PAUSE_S = 150.0, 1.0
#: Docker's texts for attempts that failed in Swarm.
_JOIN_FAILURES = ("attaching to network failed", "Could not attach to network")
#: Size of VXLAN's header in each packet, bytes.
VXLAN_OVERHEAD = 50
#: Maximum number of bytes that IPsec's ESP adds to each packet of an encrypted overlay, with the padding to 4 bytes.
ESP_OVERHEAD = 29
#: Docker's own figure of it, before the padding.
_ESP_HEADERS = 26
#: Docker's option of an overlay whose packets are encrypted.
_ENCRYPTED = "encrypted"
#: Smallest MTU of an IPv4 network, which containers need, bytes.
MIN_MTU = 576
#: Ethernet's MTU, bytes. A larger one needs a setting, because this machine cannot see the interfaces of other machines
#: or the switches on the route.
ETHERNET_MTU = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNetwork:
    """A user's private network as a container joins it."""

    name: str
    id: str
    #: CIDR, such as `10.201.3.0/24`.
    subnet: str


async def ensure_access_network(daemons: DockerClients, cluster: ClusterSettings, instance: str, node: str) -> str:
    """Create the node-local bridge for published ports and for access to the hub, unless it exists; return its id.

    Containers on it cannot reach each other.
    """
    name = names.access_network_name(instance)
    network = await inspect_network(daemons, node, name)
    if network is None:
        mtu = await asyncio.to_thread(find_mtu, cluster)
        network = await create_network(daemons, node, name, build_access_network(instance, mtu))
    return str(network["Id"])


async def ensure_user_network(
    daemons: DockerClients, cluster: ClusterSettings, instance: str, owner: str
) -> UserNetwork:
    """Create the owner's private network unless it exists. Safe to call concurrently.

    Raises:
        Unavailable: The nodes that manage the networks do not answer.
        Conflict: Containers are still on a network of other settings: a bridge of a single node, or an overlay with or
            without encryption; or the network is another user's.
    """
    name = names.user_network_name(instance, owner)
    try:
        network = await ask_manager(
            daemons, cluster, lambda node: _ensure_current(daemons, node, cluster, instance, owner)
        )
        names.check_owner(name, network.get("Labels"), owner)
    except NodeUnreachable as error:
        # Not NodeUnreachable: the node on which something starts may answer.
        raise Unavailable(f"{error}; nothing can start until {_name_keepers(cluster)}") from error
    return UserNetwork(name=name, id=network["Id"], subnet=str(_read_subnet(network)))


def _name_keepers(cluster: ClusterSettings) -> str:
    """Return which nodes must answer for users' networks, as the end of a sentence."""
    *others, last = (node.name for node in cluster.swarm_managers)
    if not others:
        return f"{last} does, which keeps users' networks"
    return f"two of {', '.join(others)} and {last} do, which keep users' networks"


async def _ensure_current(
    daemons: DockerClients, node: str, cluster: ClusterSettings, instance: str, owner: str
) -> dict[str, Any]:
    """Return a user's network as the settings have it; one that does not fit is replaced."""
    name = names.user_network_name(instance, owner)
    began = asyncio.get_running_loop().time()
    while True:
        network = await inspect_network(daemons, node, name)
        if network is None:
            mtu = await asyncio.to_thread(find_mtu, cluster)
            network = await create_network(daemons, node, name, build_user_network(cluster, instance, owner, mtu))
        passed_s = asyncio.get_running_loop().time() - began
        if not network["Driver"] or not _read_subnet(network):
            # Swarm gives an overlay its driver, options and subnet a moment after a concurrent start has created it.
            if passed_s > _SUBNET_DEADLINE_S:
                raise GpuhubError(f"network {name} got no subnet within {_SUBNET_DEADLINE_S:.0f} s")
            await asyncio.sleep(0.02)
            continue
        outdated = _explain_outdated(cluster, network, node)
        if outdated is None:
            return network
        await remove_outdated(daemons, node, network, f"{owner} has a notebook or job {outdated}")
        # A daemon shows an overlay for some moments after Swarm has removed it.
        if passed_s > SHOWN_DEADLINE_S:
            raise build_still_shown(node, name)
        await asyncio.sleep(0.1)


async def connect_container(
    daemons: DockerClients,
    node: str,
    container: str,
    network: UserNetwork,
    *,
    aliases: Sequence[str] = (),
    report_retry: Callable[[], None] = lambda: None,
) -> None:
    """Connect a container to a user's network, unless it is connected.

    Swarm may fail to set up a network on a node whose daemon was killed, because parts of an older one are still there,
    and on a node that has just come back from a network partition, until it has found the leader again. It is tried
    again for a while; for a moment the daemon then may not know the network at all.

    Args:
        aliases: Further names of the container for the others in the network.
        report_retry: Called before the second attempt.
    """
    began = asyncio.get_running_loop().time()
    has_failed = False
    while True:
        try:
            await daemons.run(
                node,
                lambda client: client.connect_container_to_network(container, network.id, aliases=list(aliases)),
                kind=CallKind.SWARM,
            )
        except GpuhubError as error:
            text = str(error)
            if "already exists" in text or "already attached" in text:
                return
            # A silent daemon may still be busy with the attempt before.
            failed = isinstance(error, NodeSilent) or any(sign in text for sign in _JOIN_FAILURES)
            is_first = failed and not has_failed
            has_failed |= failed
            is_passing = has_failed and (failed or f"network {network.id} not found" in text)
            if not is_passing or asyncio.get_running_loop().time() - began > _JOIN_DEADLINE_S:
                raise
            if is_first:
                report_retry()
        else:
            return
        await asyncio.sleep(_JOIN_PAUSE_S)


async def remove_idle_user_networks(
    daemons: DockerClients, cluster: ClusterSettings, instance: str, keep_owners: Collection[str]
) -> list[str]:
    """Remove users' networks that no container uses, except those of `keep_owners`; return the removed names.

    `keep_owners` are all with a lease in any state but released: their next container may be about to join. When this
    returns, no daemon offers a removed network any more to what starts next.

    Raises:
        GpuhubError: A network cannot be removed, or the manager still shows a removed one after 20 s.
    """
    return await ask_manager(daemons, cluster, lambda node: _remove_idle(daemons, node, instance, keep_owners))


async def _remove_idle(daemons: DockerClients, node: str, instance: str, keep_owners: Collection[str]) -> list[str]:
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
            if is_in_use(error):
                continue
            raise
        removed.append(network)
    for network in removed:
        await wait_until_gone(daemons, node, network)
    return [str(network["Name"]) for network in removed]


def build_access_network(instance: str, mtu: int) -> dict[str, Any]:
    """Build the arguments of `create_network` for a node's access bridge; `mtu` is that of the nodes' own network."""
    return {
        "driver": "bridge",
        "options": {
            "com.docker.network.bridge.enable_icc": "false",
            # The firewall's rules recognise containers' packets by this name.
            "com.docker.network.bridge.name": names.access_network_name(instance),
            "com.docker.network.driver.mtu": str(mtu),
        },
        "labels": {names.LABEL_INSTANCE: instance},
    }


def build_user_network(cluster: ClusterSettings, instance: str, owner: str, mtu: int) -> dict[str, Any]:
    """Build the arguments of `create_network` for a user's network; `mtu` is that of the nodes' own network."""
    labels = {names.LABEL_INSTANCE: instance, names.LABEL_OWNER: owner}
    if cluster.has_overlay:
        return {
            "driver": "overlay",
            "attachable": True,
            # The overlay driver subtracts the headers of VXLAN and ESP.
            "options": {
                "com.docker.network.driver.mtu": str(mtu),
                **({_ENCRYPTED: ""} if cluster.has_encrypted_overlay else {}),
            },
            "labels": labels,
        }
    return {
        "driver": "bridge",
        "options": {
            "com.docker.network.bridge.name": names.user_bridge_name(instance, owner),
            "com.docker.network.driver.mtu": str(mtu),
        },
        "labels": labels,
    }


def _explain_outdated(cluster: ClusterSettings, network: Mapping[str, Any], node: str) -> str | None:
    """Return why an existing network does not fit the settings, as the end of a sentence about its containers."""
    if not cluster.has_overlay:
        return None
    if network["Driver"] != "overlay":
        return f"from when {node} was the only node, on a network that other nodes cannot join"
    is_encrypted = _ENCRYPTED in (network.get("Options") or {})
    if is_encrypted == cluster.has_encrypted_overlay:
        return None
    return f"from before network.encrypt was changed, on a network that is {'' if is_encrypted else 'not '}encrypted"


def _read_subnet(network: Mapping[str, Any]) -> str | None:
    for config in (network.get("IPAM") or {}).get("Config") or []:
        if config.get("Subnet"):
            return str(config["Subnet"])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The route from this machine to an address."""

    address: str
    interface: str
    #: Bytes; None where the kernel does not report it.
    mtu: int | None


def find_mtu(cluster: ClusterSettings) -> int:
    """Return the MTU of the nodes' own network, from the settings or else from the kernel. Blocks.

    Raises:
        SetupError: It is too small for users' networks.
    """
    if cluster.network.mtu != "auto":
        return cluster.network.mtu
    routes = [route for node in cluster.own_nodes if (route := read_route(node.address)) is not None]
    return choose_mtu(routes, find_min_mtu(is_encrypted=cluster.has_encrypted_overlay))


def find_min_mtu(*, is_encrypted: bool) -> int:
    """Return the smallest MTU of the nodes' network on which overlays are possible."""
    return MIN_MTU + VXLAN_OVERHEAD + ESP_OVERHEAD * is_encrypted


def compute_user_mtu(mtu: int, *, has_overlay: bool, is_encrypted: bool) -> int:
    """Return the MTU that users' networks get, as Docker computes it from that of the nodes' network."""
    if not has_overlay:
        return mtu
    mtu -= VXLAN_OVERHEAD
    return (mtu - _ESP_HEADERS) // 4 * 4 if is_encrypted else mtu


def choose_mtu(routes: Iterable[Route], least: int = MIN_MTU + VXLAN_OVERHEAD) -> int:
    """Return the smallest MTU of the routes that leave this machine, or Ethernet's if there are none.

    Args:
        least: See `find_min_mtu`.

    Raises:
        SetupError: An overlay network on top would be too small; the text names the interface.
    """
    outward = [(route.mtu, route) for route in routes if route.interface != "lo" and route.mtu is not None]
    if not outward:
        return ETHERNET_MTU
    mtu, route = min(outward, key=lambda each: each[0])
    if mtu < least:
        raise SetupError(
            f"the route to {route.address} over {route.interface} has an MTU of {mtu} bytes, and users' networks need "
            f"{least} at least: raise it there, or set network.mtu in cluster.toml"
        )
    return min(mtu, ETHERNET_MTU)


def read_route(address: str) -> Route | None:
    """Return this machine's route to an address, or None if it is unknown."""
    try:
        done = subprocess.run(
            ["ip", "-json", "route", "get", address], capture_output=True, check=True, timeout=_ROUTE_DEADLINE_S
        )
        return parse_route(address, done.stdout, Path("/sys/class/net"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def parse_route(address: str, text: bytes, interfaces: Path) -> Route | None:
    """Parse the output of `ip -json route get`, such as
    `[{"dst": "10.0.0.7", "dev": "wg0", "metrics": [{"mtu": 1400}]}]`.

    Args:
        interfaces: Folder with the interfaces' own MTUs, laid out like `/sys/class/net`.
    """
    entry = next(iter(json.loads(text)), None)
    if not isinstance(entry, dict) or "dev" not in entry:
        return None
    interface = "lo" if entry.get("type") == "local" else str(entry["dev"])
    mtus = [int(metric["mtu"]) for metric in entry.get("metrics", ()) if "mtu" in metric]
    mtu_file = interfaces / interface / "mtu"
    if mtu_file.exists():
        mtus.append(int(mtu_file.read_text(encoding="ascii")))
    return Route(address=address, interface=interface, mtu=min(mtus, default=None))
