"""The data network: addresses of ranks' containers on the nodes' own network cards, where `data_interface` is set.

A container's data address follows from its address on its user's overlay, which Swarm gives to no other container: both
are the same number of addresses after the first one of their pool. So each user has a /24 network of the data pool, as
of the pool of the overlays, and the firewall can tell users apart.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Sequence

from gpuhub.config.machines.network import NetworkSettings
from gpuhub.config.machines.nodes import NodeSettings

#: What administrators read about it.
DATA_NETWORK_NOTE = (
    "Ranks use the nodes' own network cards (data_interface): other machines on that network can read and forge what "
    "ranks send, and the containers' Ethernet addresses must be admitted by its switches"
)
#: Length of the network prefix of each user's overlay.
USER_PREFIX = 24
#: The pool of the overlays has at most as many addresses as a network with this prefix: a rule stands for each user.
_LARGEST_PREFIX = 16


def map_data_address(network: NetworkSettings, overlay_address: str) -> str:
    """Return the data address of the container with this address on its user's overlay.

    Raises:
        ValueError: The address is not in `overlay_pool`.
    """
    pool = ipaddress.IPv4Network(network.overlay_pool)
    address = ipaddress.IPv4Address(overlay_address)
    if address not in pool:
        raise ValueError(f"{overlay_address} is not in network.overlay_pool, {pool}")
    offset = int(address) - int(pool.network_address)
    return str(ipaddress.IPv4Network(network.data_pool).network_address + offset)


def build_hardware_address(address: str) -> str:
    """Return the Ethernet address of a container with this data address, as Docker derives it before version 28."""
    return ":".join(f"{byte:02x}" for byte in (0x02, 0x42, *ipaddress.IPv4Address(address).packed))


def list_user_ranges(network: NetworkSettings) -> tuple[str, ...]:
    """Return the network of the data pool that each user may get."""
    pool = ipaddress.IPv4Network(network.overlay_pool)
    start = ipaddress.IPv4Network(network.data_pool).network_address
    used = ipaddress.IPv4Network((start, pool.prefixlen))
    return tuple(str(each) for each in used.subnets(new_prefix=USER_PREFIX))


def find_data_network_mistakes(
    network: NetworkSettings, own_nodes: Sequence[NodeSettings], *, machines: Collection[str]
) -> Iterator[str]:
    """Return one line for each reason why the nodes cannot have the data network that some of them name.

    Args:
        own_nodes: Those that users' networks span.
        machines: Addresses of nodes and head node.
    """
    named = [node.name for node in own_nodes if node.data_interface]
    lacking = [node.name for node in own_nodes if not node.data_interface]
    without_docker = [node.name for node in own_nodes if node.data_interface and not node.docker]
    if not named:
        return
    if lacking:
        yield (
            f"nodes: data_interface is missing for {', '.join(lacking)}, and ranks must all be on one network: add it "
            f"there (`gpuhub node add --data-interface` for a new node), or remove it from {', '.join(named)}"
        )
    if without_docker:
        yield (
            f"nodes: data_interface of {', '.join(without_docker)}: without Docker ranks are on the node's network "
            "already: remove it, and use data_address"
        )
    if network.encrypt:
        yield (
            "nodes: data_interface with network.encrypt = true: what ranks send there is not encrypted; remove one of "
            "the two"
        )
    if not network.guard:
        yield (
            "nodes: data_interface needs network.guard = true: only the firewall separates users there; remove one of "
            "the two"
        )
    yield from _find_pool_mistakes(network, machines)


def find_data_address_mistakes(nodes: Sequence[NodeSettings], own_nodes: Sequence[NodeSettings]) -> list[str]:
    """Return the data addresses that cannot carry traffic between the nodes, one line for each."""
    first = {node.address: node.name for node in nodes}
    mistakes, versions = [], set()
    for node in own_nodes:
        versions.add(ipaddress.ip_address(node.rank_address).version)
        if node.data_address is None or node.data_address == node.address:
            continue
        other = first.setdefault(node.data_address, node.name)
        if other != node.name:
            mistakes.append(f"nodes: data_address {node.data_address!r} of {node.name} is an address of {other}")
    if len(versions) > 1 and any(node.data_address for node in own_nodes):
        mistakes.append("nodes: data_address: IPv4 and IPv6 addresses do not reach each other: use one of both")
    return mistakes


def _find_pool_mistakes(network: NetworkSettings, machines: Collection[str]) -> Iterator[str]:
    data, overlays = ipaddress.ip_network(network.data_pool), ipaddress.ip_network(network.overlay_pool)
    if overlays.version != 4 or overlays.prefixlen < _LARGEST_PREFIX:
        yield (
            f"network: overlay_pool = {network.overlay_pool!r} with data_interface of nodes: an IPv4 network of "
            f"/{_LARGEST_PREFIX} or smaller is needed"
        )
        return
    if data.prefixlen > overlays.prefixlen:
        yield (
            f"network: data_pool = {network.data_pool!r} is smaller than overlay_pool, {network.overlay_pool}: write "
            f"a network of /{overlays.prefixlen} or larger"
        )
    if data.overlaps(overlays):
        yield (
            f"network: data_pool = {network.data_pool!r} overlaps overlay_pool, {network.overlay_pool}: choose a "
            "network that nothing uses"
        )
    for address in sorted(machines):
        if ipaddress.ip_address(address) in data:
            yield (
                f"network: data_pool = {network.data_pool!r} contains {address}, the address of a machine: choose a "
                "network that nothing uses"
            )
