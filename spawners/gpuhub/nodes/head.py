"""The head node's own address, as nodes and containers reach it."""

from __future__ import annotations

import ipaddress
import socket

from gpuhub.errors import SetupError
from gpuhub.settings import Cluster

#: An address of the documentation network: no packet is sent there, only the route is asked for.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def head_address(cluster: Cluster) -> str:
    """The address on which hub and broker listen.

    `hub.address` where it is set, else this machine's address on the way to the first node that is not reached over
    loopback. Where the only node is this machine under a loopback address, it is the address of the default route:
    a container reaches the host there, but never at 127.0.0.1.

    Raises:
        SetupError: when there is no such address.
    """
    if cluster.hub.address is not None:
        return cluster.hub.address
    for target in [*(node.address for node in cluster.nodes), *_ELSEWHERE.values()]:
        source = source_address(target)
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    raise SetupError(
        "this machine has no address that containers can reach: set hub.address in cluster.toml "
        "to the head node's address on the nodes' network"
    )


def source_address(target: str) -> str | None:
    """This machine's address on the way to `target`; None without a route. Sends nothing."""
    family = socket.AF_INET6 if ipaddress.ip_address(target).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
