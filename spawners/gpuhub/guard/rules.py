"""What users' containers reach, as the text of one nftables table: pure, and the only place where it is decided.

Packets from containers are judged before Docker translates addresses, by where they were sent to; packets to containers
after that, by the container's own port. The table is gpuhub's alone: nothing of Docker or of the node's own firewall is
changed, and what those refuse stays refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gpuhub import names
from gpuhub.containers.arguments import NOTEBOOK_PORT
from gpuhub.settings import Cluster, Node

_DNS_PORT = 53
#: Swarm's overlays travel in it, and nobody signs them.
_VXLAN_PORT = 4789
#: Metadata services of clouds give away the machine's own rights; whatever `reach` says.
_NEVER = ("169.254.0.0/16", "fd00:ec2::254/128")
#: What `egress = "internet"` leaves out: private, shared, link-local, loopback and reserved addresses, and those that
#: carry an IPv4 address in an IPv6 one.
_PRIVATE = (
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

_Net = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """All that a node's rules depend on."""

    instance: str
    #: Every node's address.
    nodes: tuple[str, ...]
    #: Where containers find hub and broker, and at which TCP ports.
    head: str
    head_ports: tuple[int, ...]
    #: From where the head node connects to the node's containers.
    callers: tuple[str, ...]
    egress: Literal["internet", "open", "none"]
    reach: tuple[str, ...]
    #: Users' networks span nodes.
    has_overlay: bool


def plan_filter(cluster: Cluster, instance: str, *, head: str, callers: Iterable[str]) -> Filter:
    """A node's filter; `callers` are the head node's own addresses on the way there, `head` is always one of them.

    Raises:
        ValueError: an address is none.
    """
    hub = cluster.hub
    ports = {hub.api_port, hub.broker_port} | (set() if hub.is_loopback else {hub.port})
    return Filter(
        instance=instance,
        nodes=_sorted(node.address for node in cluster.nodes),
        head=str(ipaddress.ip_address(head)),
        head_ports=tuple(sorted(ports)),
        callers=_sorted(each for each in (head, *callers) if not ipaddress.ip_address(each).is_loopback),
        egress=cluster.network.egress,
        reach=_sorted(cluster.network.reach),
        has_overlay=cluster.has_overlay,
    )


def describe(cluster: Cluster, node: Node, plan: Filter) -> str:
    """The rules as an administrator reads them; without `guard` they are shown, and said not to be there."""
    told = {
        "internet": "all but private addresses",
        "open": "all but the nodes and cloud metadata",
        "none": "nothing else",
    }[plan.egress]
    lines = [
        f"# Node {node.name} ({node.address}), instance {plan.instance}.",
        "# Users' containers reach: hub and broker, DNS, their own user's containers"
        + (", " + ", ".join(plan.reach) if plan.reach else "")
        + f"; and {told}.",
        f"# Their published ports are reached from {', '.join(plan.callers)} only.",
        *([] if cluster.network.guard else ["# network.guard is false: these rules are NOT on the node."]),
    ]
    return "\n".join([*lines, "", write_rules(plan)])


def write_rules(plan: Filter) -> str:
    """The script for `nft -f`: replaces the instance's table in one step, or changes nothing."""
    table = names.filter_table(plan.instance)
    access, users = names.access_network(plan.instance), names.user_bridges(plan.instance)
    chains = [
        _chain(
            "from_containers",
            "type filter hook prerouting priority mangle; policy accept;",
            f'iifname "{access}" jump leaving',
            f'iifname "{users}" jump within',
        ),
        _chain("within", "fib daddr type unicast fib daddr . iif oif exists accept", "jump leaving"),
        _chain("leaving", *_leaving(plan)),
        _chain(
            "refused",
            # Both tell the sender at once; the kernel sends few of the latter a second.
            "meta l4proto tcp counter reject with tcp reset",
            "counter reject with icmpx admin-prohibited",
        ),
        _chain(
            "to_containers",
            "type filter hook forward priority filter - 5; policy accept;",
            f'oifname "{access}" jump arriving',
            f'oifname "{users}" jump arriving',
        ),
        _chain("arriving", *_arriving(plan, access, users)),
    ]
    if plan.has_overlay:
        chains.append(
            _chain(
                "to_node",
                "type filter hook input priority filter - 5; policy accept;",
                f"udp dport {_VXLAN_PORT} jump overlay",
            )
        )
        chains.append(_chain("overlay", *_match("saddr", plan.nodes, "return"), "counter drop"))
    body = "\n\n".join(chains)
    return f"table inet {table}\ndelete table inet {table}\ntable inet {table} {{\n{body}\n}}\n"


def write_removal(instance: str) -> str:
    """The script that takes the table away, whether it is there or not."""
    table = names.filter_table(instance)
    return f"table inet {table}\ndelete table inet {table}\n"


def _leaving(plan: Filter) -> list[str]:
    """A container's packet to anything but its own user's bridge."""
    ports = ", ".join(map(str, plan.head_ports))
    dns = f"meta l4proto {{ tcp, udp }} th dport {_DNS_PORT} accept"
    machines = _sorted({*plan.nodes, plan.head})
    rules = [
        "ct state established,related accept",
        *_match("daddr", [plan.head], f"tcp dport {{ {ports} }} accept"),
        # Whoever else is on the same bridge.
        "fib daddr . iif oif exists goto refused",
        # Docker's resolver asks the node's own name servers from within the container, wherever they are; with no
        # egress not beyond private addresses, or anything could leave by that port.
        *([dns] if plan.egress != "none" else _match("daddr", _sorted({*_PRIVATE, *machines}), dns)),
        # The node itself under any of its addresses, and everybody at once.
        "fib daddr type != unicast goto refused",
        *_match("daddr", machines, "goto refused"),
        *_match("daddr", _NEVER, "goto refused"),
        *_match("daddr", plan.reach, "accept"),
    ]
    if plan.egress == "none":
        rules.append("goto refused")
    elif plan.egress == "internet":
        rules += _match("daddr", _PRIVATE, "goto refused")
    return rules


def _arriving(plan: Filter, access: str, users: str) -> list[str]:
    """A packet to a container, from elsewhere than the node itself."""
    return [
        "ct state established,related accept",
        *_match("saddr", plan.callers, f'oifname "{access}" tcp dport {NOTEBOOK_PORT} accept'),
        f'iifname "{users}" fib daddr . iif oif exists accept',
        f'iifname "{access}" goto refused',
        f'iifname "{users}" goto refused',
        # Others learn nothing, not even that there is a filter.
        "counter drop",
    ]


def _match(side: Literal["saddr", "daddr"], networks: Sequence[str], verdict: str) -> list[str]:
    """A rule for each IP version that there is, in the order given."""
    rules = []
    for version, word in ((4, "ip"), (6, "ip6")):
        of_version = [text for text in networks if ipaddress.ip_network(text).version == version]
        if of_version:
            rules.append(f"{word} {side} {{ {', '.join(of_version)} }} {verdict}")
    return rules


def _sorted(networks: Iterable[str]) -> tuple[str, ...]:
    """In a lasting order, each once and as nftables writes it, without networks that lie in others.

    Raises:
        ValueError: one is no address or network.
    """
    parsed = {ipaddress.ip_network(text) for text in networks}
    kept = [one for one in parsed if not any(one != other and _lies_in(one, other) for other in parsed)]
    return tuple(_short(one) for one in sorted(kept, key=lambda one: (one.version, int(one.network_address))))


def _lies_in(one: _Net, other: _Net) -> bool:
    return one.version == other.version and one.prefixlen >= other.prefixlen and one.network_address in other


def _short(network: _Net) -> str:
    return str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)


def _chain(name: str, *lines: str) -> str:
    return "\n".join([f"\tchain {name} {{", *(f"\t\t{line}" for line in lines), "\t}"])
