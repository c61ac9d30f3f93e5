"""The head node's address, and the URLs of hub and broker there, as nodes and containers reach them."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

from gpuhub.common.errors import SetupError
from gpuhub.config.settings import ClusterSettings

#: Path of the broker behind the hub's proxy.
BROKER_PREFIX = "/services/broker"
#: Addresses of the documentation networks: no packet is sent there, only the route is looked up.
_EXTERNAL_ADDRESSES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def find_head_address(cluster: ClusterSettings) -> str:
    """Return the address on which hub and broker listen.

    This is `hub.address` where it is set, else this machine's address on the route to the first node that is not
    reached over loopback. Where this machine is the only node, with a loopback address, it is the address of the
    default route: a container reaches the host there, but never at 127.0.0.1.

    Raises:
        SetupError: the address does not exist.
    """
    if cluster.hub.address is not None:
        return cluster.hub.address
    for target in [*(node.address for node in cluster.nodes), *_EXTERNAL_ADDRESSES.values()]:
        source = find_source_address(target)
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    raise SetupError(
        "this machine has no address that containers can reach: set hub.address in cluster.toml "
        "to the head node's address on the nodes' network"
    )


def find_source_address(target: str) -> str | None:
    """Return this machine's address on the route to `target`, without sending a packet; None without a route."""
    family = socket.AF_INET6 if ipaddress.ip_address(target).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def format_host(address: str) -> str:
    """Return an IP address as a URL contains it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def url_scheme(*, tls: bool) -> Literal["http", "https"]:
    return "https" if tls else "http"


def build_hub_origin(cluster: ClusterSettings, head_address: str) -> str:
    """Return the origin of the hub itself, without the proxy, such as `https://10.77.0.1:8081`."""
    return _origin(cluster, head_address, cluster.hub.api_port)


def build_broker_origin(cluster: ClusterSettings, head_address: str) -> str:
    """Return the origin of the broker, such as `https://10.77.0.1:8010`."""
    return _origin(cluster, head_address, cluster.hub.broker_port)


def build_broker_url(cluster: ClusterSettings, head_address: str) -> str:
    """Return the URL of the broker, such as `https://10.77.0.1:8010/services/broker`."""
    return build_broker_origin(cluster, head_address) + BROKER_PREFIX


def _origin(cluster: ClusterSettings, head_address: str, port: int) -> str:
    return f"{url_scheme(tls=cluster.has_internal_tls)}://{format_host(head_address)}:{port}"
