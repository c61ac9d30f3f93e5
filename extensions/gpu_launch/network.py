"""Which address and interface of this container the user's other containers reach, and free ports on it."""

from __future__ import annotations

import ipaddress
import random
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpu_launch.errors import NetworkError

#: How long a container's network may take to be connected after its start.
CONNECT_S = 30.0
_POLL_S = 0.05  # seconds
#: Says from which port on the system gives them to connections.
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUALLY_GIVEN = 32768
#: Below are services'.
_LOWEST = 20000
_TRIES, _ENOUGH = 100, 1000


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One IPv4 address of this container."""

    name: str
    address: str


LOOPBACK = Interface(name="lo", address="127.0.0.1")


def choose(interfaces: Iterable[Interface], subnet: str) -> Interface | None:
    """The interface whose address lies in `subnet` (CIDR); None where there is none yet. A single address, such
    as 10.0.0.5/32, is the node's own, where its users' processes have no network of their own.
    """
    try:
        network = ipaddress.ip_network(subnet, strict=False)
    except ValueError as error:
        raise NetworkError(f"GPUHUB_NETWORK_SUBNET is {subnet!r}, not a subnet such as 10.0.1.0/24.") from error
    if network.num_addresses == 1 and network.network_address.is_loopback:
        # All of 127.0.0.0/8 is there, whichever of it is written down.
        return Interface(name="lo", address=str(network.network_address))
    found = [item for item in interfaces if ipaddress.ip_address(item.address) in network]
    return min(found, key=lambda item: (item.name, item.address), default=None)


def interfaces() -> list[Interface]:
    """This container's IPv4 addresses."""
    import psutil  # type: ignore[import-untyped]

    return [
        Interface(name=name, address=entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def own(subnet: str | None, *, wait_s: float = CONNECT_S) -> Interface:
    """This container's interface on `subnet`, waiting for it to be connected; loopback where no subnet was told."""
    if subnet is None:
        return LOOPBACK
    deadline = time.monotonic() + wait_s
    while (found := choose(interfaces(), subnet)) is None:
        if time.monotonic() > deadline:
            raise NetworkError(
                f"This container has no address in {subnet} after {wait_s:.0f} s, so other nodes cannot reach it. "
                "Restart the server; if it happens again, tell the administrator."
            )
        time.sleep(_POLL_S)
    return found


def free_port() -> int:
    """A TCP port that nobody uses now, and that the system gives no connection before it is used."""
    try:
        first_given = int(_GIVEN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_given = _USUALLY_GIVEN
    # Among a few, two who ask at the same time would get the same.
    for _ in range(_TRIES if first_given - _LOWEST >= _ENOUGH else 0):
        port = random.randrange(_LOWEST, first_given)  # noqa: S311 - it is no secret
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    # Where an administrator lets connections have nearly all ports.
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
