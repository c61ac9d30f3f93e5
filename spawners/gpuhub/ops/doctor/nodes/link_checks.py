"""Checks of a node's network port: its speed, its duplex, and that it is no Wi-Fi."""

from __future__ import annotations

from collections.abc import Iterator

from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.node_facts import HostFacts, LinkFacts

#: Speed of an ordinary port, Mb/s: faster ports must not fall back to it, and no port should run slower.
_GIGABIT = 1000
#: The slowest of the speeds above that, Mb/s.
_FAST = 2500
_CABLE_ADVICE = (
    "connect it with another cable (Cat 5e or better, all eight wires) to another port of the switch; "
    "both ends must negotiate the speed"
)


def check_data_link(host: HostFacts, address: str) -> Iterator[Finding]:
    """Check that the machine has its data address, and the port with it."""
    if not address:
        return
    if host.has_data_address is False:
        yield failed(
            "data address",
            f"no network port of the machine has {address}",
            "correct data_address of the node in cluster.toml, or configure the second network card",
        )
    elif host.data_link != host.link:
        yield from check_link(host.data_link)


def describe_data_network(interface: str) -> Iterator[Finding]:
    """Say what the administrator has chosen; whether the interface exists is the packet filter's finding."""
    if interface:
        yield ok(
            "data network", f"ranks use {interface} itself; other machines there can read and forge what ranks send"
        )


def check_link(link: LinkFacts | None) -> Iterator[Finding]:
    """Check the port with the node's address; an interface without a speed gives no finding."""
    if link is None:
        return
    if link.is_wireless:
        yield warning(
            "link",
            f"{link.interface} is Wi-Fi: images, homes and launches over nodes share its channel with other devices",
            "connect the node with a cable, and use the cable's address in cluster.toml",
        )
        return
    if link.speed is None:
        return
    value = f"{link.interface} runs at {link.speed} Mb/s"
    is_slow = link.speed < _GIGABIT or (link.speed == _GIGABIT and (link.max_speed or 0) >= _FAST)
    if link.duplex == "half":
        yield warning(
            "link",
            f"{value}, half duplex: it loses packets under load",
            "let both ends negotiate speed and duplex, or replace the cable",
        )
    elif is_slow:
        supported = f"; it supports {link.max_speed}" if (link.max_speed or 0) > link.speed else ""
        yield warning("link", f"{value}{supported}", _CABLE_ADVICE)
    else:
        yield ok("link", f"{value}{', full duplex' if link.duplex == 'full' else ''}")
