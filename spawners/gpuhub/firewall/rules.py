"""The firewall's rules: which addresses users' containers reach, as the text of nftables' tables.

Packets from containers are checked before Docker translates addresses, by their original destination; packets to
containers are checked after that, by the container's own port. With `data_interface` there is a second table, of that
interface. Both belong to gpuhub: rules of Docker and of the node's own firewall do not change, and packets that they
refuse stay refused.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gpuhub.common import names
from gpuhub.common.names import NOTEBOOK_PORT
from gpuhub.config.machines.data_network import build_hardware_address, list_user_ranges
from gpuhub.config.settings import ClusterSettings, NodeSettings

_DNS_PORT = 53
#: Port of Swarm's overlays, whose packets are not signed without IPsec.
_VXLAN_PORT = 4789
#: Metadata services of clouds, which hand out the machine's own rights; refused whatever `reach` allows.
_METADATA_NETWORKS = ("169.254.0.0/16", "fd00:ec2::254/128")
#: Networks that `egress = "internet"` excludes: private, shared, link-local, loopback and reserved addresses, and IPv6
#: addresses that embed an IPv4 address.
_PRIVATE_NETWORKS = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",
    "::/127",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "fc00::/7",
    "fe80::/9",
    "ff00::/8",
)

#: Connections that one container may have to hub and broker. A notebook with many launches needs some tens.
MAX_CONNECTIONS = 256
#: The set in which the kernel counts the containers' connections.
_COUNTED = "connections"

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallPolicy:
    """The settings and addresses from which a node's rules follow."""

    instance: str
    #: Addresses of all nodes.
    nodes: tuple[str, ...]
    #: Address and TCP ports where containers reach hub and broker.
    head: str
    head_ports: tuple[int, ...]
    #: Addresses from which the head node connects to the node's containers.
    callers: tuple[str, ...]
    egress: Literal["internet", "open", "none"]
    reach: tuple[str, ...]
    #: Whether users' networks span nodes.
    has_overlay: bool
    #: Whether packets between nodes must come through IPsec.
    is_encrypted: bool = False
    #: Where ranks' containers use the node's own network card: its interface, the network of their addresses, and the
    #: part of it that each user may get.
    data_interface: str | None = None
    data_pool: str = ""
    user_ranges: tuple[str, ...] = ()


def build_policy(
    cluster: ClusterSettings,
    instance: str,
    *,
    head: str,
    callers: Iterable[str],
    is_guest: bool = False,
    data_interface: str | None = None,
) -> FirewallPolicy:
    """Build a node's policy.

    Args:
        data_interface: The node's.
        is_guest: Its containers reach neither hub nor broker, and it has no users' networks.
        callers: The head node's own addresses on the route to the node; `head` is always one of them.

    Raises:
        ValueError: An address cannot be parsed.
    """
    hub = cluster.hub
    ports = {hub.api_port, hub.broker_port} | (set() if hub.is_loopback else {hub.port})
    return FirewallPolicy(
        instance=instance,
        nodes=_normalise(address for node in cluster.own_nodes for address in {node.address, node.rank_address}),
        head=str(ipaddress.ip_address(head)),
        head_ports=() if is_guest else tuple(sorted(ports)),
        callers=_normalise(each for each in (head, *callers) if not ipaddress.ip_address(each).is_loopback),
        egress=cluster.network.egress,
        reach=_normalise(cluster.network.reach),
        has_overlay=cluster.has_overlay and not is_guest,
        is_encrypted=cluster.has_encrypted_overlay and not is_guest,
        data_interface=data_interface,
        data_pool=cluster.network.data_pool if data_interface else "",
        user_ranges=list_user_ranges(cluster.network) if data_interface else (),
    )


def describe_rules(cluster: ClusterSettings, node: NodeSettings, policy: FirewallPolicy) -> str:
    """Return the rules with a summary for administrators, which also states if `network.guard` is false."""
    destinations = {
        "internet": "all except private addresses",
        "open": "all except the nodes and cloud metadata",
        "none": "nothing else",
    }[policy.egress]
    lines = [
        f"# Node {node.name} ({node.address}), instance {policy.instance}.",
        "# Users' containers reach: hub and broker, DNS, their own user's containers"
        + (", " + ", ".join(policy.reach) if policy.reach else "")
        + f"; and {destinations}.",
        f"# Their published ports can be reached from {', '.join(policy.callers)} only.",
        *(
            [f"# On {policy.data_interface}, ranks' containers reach those of their own user on other nodes only."]
            if policy.data_interface
            else []
        ),
        *([] if cluster.network.guard else ["# network.guard is false: these rules are NOT on the node."]),
    ]
    return "\n".join([*lines, "", format_rules(policy)])


def format_rules(policy: FirewallPolicy) -> str:
    """Return the script for `nft -f`, which replaces the instance's tables in one step or changes nothing."""
    table = names.firewall_table_name(policy.instance)
    access, users = names.access_network_name(policy.instance), names.user_bridge_pattern(policy.instance)
    chains = [
        _format_chain(
            "from_containers",
            "type filter hook prerouting priority mangle; policy accept;",
            f'iifname "{access}" jump leaving',
            f'iifname "{users}" jump within',
        ),
        _format_chain("within", "fib daddr type unicast fib daddr . iif oif exists accept", "jump leaving"),
        _format_chain("leaving", *_egress_rules(policy)),
        _format_chain(
            "refused",
            # Both notify the sender at once; the kernel limits the rate of the latter.
            "meta l4proto tcp counter reject with tcp reset",
            "counter reject with icmpx admin-prohibited",
        ),
        _format_chain(
            "to_containers",
            "type filter hook forward priority filter - 5; policy accept;",
            f'oifname "{access}" jump arriving',
            f'oifname "{users}" jump arriving',
        ),
        _format_chain("arriving", *_ingress_rules(policy, access, users)),
    ]
    if policy.has_overlay:
        chains.append(
            _format_chain(
                "to_node",
                "type filter hook input priority filter - 5; policy accept;",
                f"udp dport {_VXLAN_PORT} jump overlay",
            )
        )
        # A packet that the kernel has decrypted passes here again. ESP itself is accepted by the chain's policy.
        verdict = "meta ipsec exists return" if policy.is_encrypted else "return"
        chains.append(_format_chain("overlay", *_match_rules("saddr", policy.nodes, verdict), "counter drop"))
    body = "\n\n".join([_format_counting_set(policy), *chains])
    return _format_table("inet", table, body) + _format_data_table(policy)


def _format_table(family: Literal["inet", "netdev"], table: str, body: str) -> str:
    return f"table {family} {table}\ndelete table {family} {table}\ntable {family} {table} {{\n{body}\n}}\n"


def _format_data_table(policy: FirewallPolicy) -> str:
    """Return the table for packets between the wire and ranks' containers; empty where they are not on it.

    These packets do not pass the node's own network, so the table is the interface's. Containers are known by their
    Ethernet addresses, which they cannot change, and users by their parts of the network.
    """
    if policy.data_interface is None:
        return ""
    pool = ipaddress.IPv4Network(policy.data_pool)
    containers = "-".join(build_hardware_address(str(address)) for address in (pool[0], pool[-1]))
    hook = f'device "{policy.data_interface}" priority filter; policy accept;'
    pairs = ", ".join(f"{network} . {network}" for network in policy.user_ranges)
    same_user = ["type ipv4_addr . ipv4_addr", "flags interval", f"elements = {{ {pairs} }}"]
    body = [
        "\n".join(["\tset same_user {", *(f"\t\t{line}" for line in same_user), "\t}"]),
        _format_chain(
            "between_ranks",
            f"arp saddr ip {pool} arp daddr ip {pool} accept",
            "ip saddr . ip daddr @same_user accept",
            "counter drop",
        ),
        _format_chain(
            "to_wire",
            f"type filter hook egress {hook}",
            f"ether saddr {containers} jump between_ranks",
            f"ip saddr {pool} jump between_ranks",
        ),
        _format_chain(
            "from_wire",
            f"type filter hook ingress {hook}",
            f"ether daddr {containers} jump between_ranks",
            f"ip daddr {pool} jump between_ranks",
        ),
    ]
    return _format_table("netdev", names.firewall_table_name(policy.instance), "\n\n".join(body))


def format_removal(instance: str) -> str:
    """Return the script that removes the table if it exists."""
    table = names.firewall_table_name(instance)
    return f"table inet {table}\ndelete table inet {table}\n"


def _egress_rules(policy: FirewallPolicy) -> list[str]:
    """Return the rules for packets from containers, except those to their own user's bridge."""
    ports = ", ".join(map(str, policy.head_ports))
    family = _family(policy.head)
    dns = f"meta l4proto {{ tcp, udp }} th dport {_DNS_PORT} accept"
    machines = _normalise({*policy.nodes, policy.head})
    to_head = [
        # Matches the container's own address, which hub and broker do not see: Docker replaces it by the node's.
        f"{family} daddr {policy.head} tcp dport {{ {ports} }} ct state new "
        f"add @{_COUNTED} {{ {family} saddr ct count over {MAX_CONNECTIONS} }} goto refused",
        *_match_rules("daddr", [policy.head], f"tcp dport {{ {ports} }} accept"),
    ]
    rules = [
        "ct state established,related accept",
        *(to_head if policy.head_ports else ()),
        # Others on the same bridge.
        "fib daddr . iif oif exists goto refused",
        # Docker's resolver queries the node's own name servers from within the container. With `egress = "none"` only
        # private addresses are allowed, because data could leave by that port.
        *(
            [dns]
            if policy.egress != "none"
            else _match_rules("daddr", _normalise({*_PRIVATE_NETWORKS, *machines}), dns)
        ),
        # The node itself under any of its addresses, and broadcasts.
        "fib daddr type != unicast goto refused",
        *_match_rules("daddr", machines, "goto refused"),
        *_match_rules("daddr", _METADATA_NETWORKS, "goto refused"),
        *_match_rules("daddr", policy.reach, "accept"),
    ]
    if policy.egress == "none":
        rules.append("goto refused")
    elif policy.egress == "internet":
        rules += _match_rules("daddr", _PRIVATE_NETWORKS, "goto refused")
    return rules


def _format_counting_set(policy: FirewallPolicy) -> str:
    kind = {"ip": "ipv4_addr", "ip6": "ipv6_addr"}[_family(policy.head)]
    lines = [f"type {kind}", "size 65535", "flags dynamic"]
    return "\n".join([f"\tset {_COUNTED} {{", *(f"\t\t{line}" for line in lines), "\t}"])


def _family(address: str) -> Literal["ip", "ip6"]:
    return "ip" if ipaddress.ip_address(address).version == 4 else "ip6"


def _ingress_rules(policy: FirewallPolicy, access: str, users: str) -> list[str]:
    """Return the rules for packets to containers from other machines and bridges."""
    return [
        "ct state established,related accept",
        *_match_rules("saddr", policy.callers, f'oifname "{access}" tcp dport {NOTEBOOK_PORT} accept'),
        f'iifname "{users}" fib daddr . iif oif exists accept',
        f'iifname "{access}" goto refused',
        f'iifname "{users}" goto refused',
        # Dropped, so that others do not learn that there is a firewall.
        "counter drop",
    ]


def _match_rules(side: Literal["saddr", "daddr"], networks: Sequence[str], verdict: str) -> list[str]:
    """Return one rule for each IP version among the networks."""
    rules = []
    for version, family in ((4, "ip"), (6, "ip6")):
        matching = [text for text in networks if ipaddress.ip_network(text).version == version]
        if matching:
            rules.append(f"{family} {side} {{ {', '.join(matching)} }} {verdict}")
    return rules


def _normalise(networks: Iterable[str]) -> tuple[str, ...]:
    """Return the networks in a stable order and in nftables' notation, without duplicates and contained networks.

    Raises:
        ValueError: An entry is not an address or network.
    """
    parsed = {ipaddress.ip_network(text) for text in networks}
    outermost = [inner for inner in parsed if not any(inner != outer and _is_within(inner, outer) for outer in parsed)]
    outermost.sort(key=lambda network: (network.version, int(network.network_address)))
    return tuple(map(_format_network, outermost))


def _is_within(inner: _Network, outer: _Network) -> bool:
    return inner.version == outer.version and inner.prefixlen >= outer.prefixlen and inner.network_address in outer


def _format_network(network: _Network) -> str:
    # As nftables writes it; versions of Python differ in how they write IPv4 addresses within IPv6.
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    address = socket.inet_ntop(family, network.network_address.packed)
    return address if network.prefixlen == network.max_prefixlen else f"{address}/{network.prefixlen}"


def _format_chain(name: str, *lines: str) -> str:
    return "\n".join([f"\tchain {name} {{", *(f"\t\t{line}" for line in lines), "\t}"])
