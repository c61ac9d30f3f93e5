"""To which addresses a user's notification may be sent: those of the internet, and what an administrator permits."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from gpuhub.config.notifications import Address, AllowedAddress

#: IPv6 prefix that stands for IPv4 addresses (NAT64), in its last 32 bits.
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


def explain_forbidden(address: Address, port: int | None, allowed: Iterable[AllowedAddress]) -> str | None:
    """Return why nothing may be sent to an address; None if it may."""
    plain = _unwrap(address)
    if any(entry.includes(plain, port) for entry in allowed):
        return None
    is_public = plain.is_global and not plain.is_multicast
    is_tunnel = isinstance(plain, ipaddress.IPv6Address) and (plain.sixtofour is not None or plain.teredo is not None)
    if is_public and not is_tunnel:
        return None
    return f"{address} is not an address of the internet"


def _unwrap(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
