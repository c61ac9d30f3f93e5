"""The head node's address, and the URLs of hub and broker there, as nodes and containers reach them."""

from __future__ import annotations

from typing import Literal

from gpuhub.common.errors import SetupError
from gpuhub.config.own_address import find_own_address
from gpuhub.config.settings import ClusterSettings

#: Path of the broker behind the hub's proxy.
BROKER_PREFIX = "/services/broker"


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
    address = find_own_address(node.address for node in cluster.own_nodes)
    if address is not None:
        return address
    raise SetupError(
        "this machine has no address that containers can reach: set hub.address in cluster.toml "
        "to the head node's address on the nodes' network"
    )


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
