"""To which addresses a user's notification may be sent: those of the internet, and what an administrator permits."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuhub.config.notifications import Address, AllowedAddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ROUTES, _ROUTES6 = Path("/proc/net/route"), Path("/proc/net/ipv6_route")
#: IPv6 prefix that stands for IPv4 addresses (NAT64), in its last 32 bits.
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


def explain_forbidden(
    address: Address, port: int | None, allowed: Iterable[AllowedAddress], connected: Iterable[Network] = ()
) -> str | None:
    """Return why nothing may be sent to an address; None if it may.

    Args:
        address: Where a message would be sent.
        port: Its port; None if it is not known.
        allowed: What an administrator permits.
        connected: Networks that this machine is connected to: neighbours may have addresses of the internet, too.
    """
    plain = _unwrap(address)
    if any(entry.includes(plain, port) for entry in allowed):
        return None
    is_public = plain.is_global and not plain.is_multicast
    is_tunnel = isinstance(plain, ipaddress.IPv6Address) and (plain.sixtofour is not None or plain.teredo is not None)
    if not is_public or is_tunnel:
        return f"{address} is not an address of the internet"
    if any(plain in network for network in connected):
        return f"{address} is an address of a network of the head node"
    return None


def read_connected_networks() -> tuple[Network, ...]:
    """Return the networks that this machine is connected to, which are the kernel's routes without a gateway."""
    return (*_parse_routes(_ROUTES.read_text()), *(_parse_routes6(_ROUTES6.read_text()) if _ROUTES6.exists() else ()))


def _parse_routes(text: str) -> Iterator[Network]:
    """Parse /proc/net/route; its addresses are numbers of the machine, whose first byte is the last."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        destination, gateway, mask = (bytes.fromhex(fields[index])[::-1] for index in (1, 2, 7))
        if not any(gateway) and any(mask):
            yield ipaddress.IPv4Network((destination, str(ipaddress.IPv4Address(mask))))


def _parse_routes6(text: str) -> Iterator[Network]:
    """Parse /proc/net/ipv6_route."""
    for line in text.splitlines():
        destination, length, _, _, gateway, *_ = line.split()
        if not int(gateway, 16) and int(length, 16):
            yield ipaddress.IPv6Network((bytes.fromhex(destination), int(length, 16)))


def _unwrap(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
