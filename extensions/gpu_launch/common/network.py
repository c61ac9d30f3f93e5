"""This container's address on the network of the user's containers, and free ports."""

from __future__ import annotations

import ipaddress
import random
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpu_launch.errors import NetworkError

#: Seconds until a container's network must be connected after its start.
CONNECT_TIMEOUT_S = 30.0
_POLL_S = 0.05  # seconds
#: The first port that the system assigns to connections.
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST_EPHEMERAL = 32768
#: Lower ports belong to services.
_LOWEST_PORT = 20000
_TRIES, _ENOUGH = 100, 1000


@dataclass(frozen=True, kw_only=True)
class Interface:
    """An IPv4 address of this container."""

    name: str
    address: str


LOOPBACK = Interface(name="lo", address="127.0.0.1")


def choose_interface(interfaces: Iterable[Interface], subnet: str) -> Interface | None:
    """Return the interface whose address is in `subnet` (CIDR), None if there is none yet.

    A single address, such as 10.0.0.5/32, is the node's own, used on nodes without a network for each user.
    """
    try:
        network = ipaddress.ip_network(subnet, strict=False)
    except ValueError as error:
        raise NetworkError(f"GPUHUB_NETWORK_SUBNET is {subnet!r}, not a subnet such as 10.0.1.0/24.") from error
    if network.num_addresses == 1 and network.network_address.is_loopback:
        # All of 127.0.0.0/8 exists, whichever address the subnet names.
        return Interface(name="lo", address=str(network.network_address))
    candidates = [interface for interface in interfaces if ipaddress.ip_address(interface.address) in network]
    return min(candidates, key=lambda interface: (interface.name, interface.address), default=None)


def list_interfaces() -> list[Interface]:
    """Return this container's IPv4 addresses."""
    import psutil  # type: ignore[import-untyped]

    return [
        Interface(name=name, address=entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def find_own_interface(subnet: str | None, *, wait_s: float = CONNECT_TIMEOUT_S) -> Interface:
    """Return this container's interface on `subnet`, waiting for its connection; loopback without a subnet.

    Raises:
        NetworkError: The interface did not appear in time.
    """
    if subnet is None:
        return LOOPBACK
    deadline = time.monotonic() + wait_s
    while (interface := choose_interface(list_interfaces(), subnet)) is None:
        if time.monotonic() > deadline:
            raise NetworkError(
                f"This container has no address in {subnet} after {wait_s:.0f} s, so other nodes cannot reach it. "
                "Restart the server; if it happens again, tell the administrator."
            )
        time.sleep(_POLL_S)
    return interface


def find_free_port() -> int:
    """Return a TCP port that is free and outside the range the system assigns to connections."""
    try:
        first_ephemeral = int(_PORT_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = _DEFAULT_FIRST_EPHEMERAL
    # Among a few ports, two callers at the same time would get the same one.
    for _ in range(_TRIES if first_ephemeral - _LOWEST_PORT >= _ENOUGH else 0):
        port = random.randrange(_LOWEST_PORT, first_ephemeral)  # noqa: S311 - it is no secret
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    # The administrator has assigned nearly all ports to connections.
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
