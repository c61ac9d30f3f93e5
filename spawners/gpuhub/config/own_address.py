"""This machine's own address, as other machines reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

#: Addresses of the documentation networks: no packet is sent there, only the route is looked up.
_EXTERNAL_ADDRESSES = ("192.0.2.1", "2001:db8::1")


def find_own_address(targets: Iterable[str]) -> str | None:
    """Return this machine's address on the route to the first target that is not reached over loopback.

    Without one it is the address of the default route; None without such a route.
    """
    for target in (*targets, *_EXTERNAL_ADDRESSES):
        source = find_source_address(target)
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    return None


def find_source_address(target: str) -> str | None:
    """Return this machine's address on the route to `target`, without sending a packet; None without a route."""
    family = socket.AF_INET6 if ipaddress.ip_address(target).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
