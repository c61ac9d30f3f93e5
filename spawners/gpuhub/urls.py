"""Where hub and broker are reached on the head node's own address. Pure."""

from __future__ import annotations

from typing import Literal

from gpuhub.settings import Cluster

BROKER_PREFIX = "/services/broker"


def in_url(address: str) -> str:
    """An IP address as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def scheme(*, tls: bool) -> Literal["http", "https"]:
    """Of an address that is reached with TLS, or without."""
    return "https" if tls else "http"


def hub_origin(cluster: Cluster, head_address: str) -> str:
    """The hub itself, past the proxy, such as `https://10.77.0.1:8081`."""
    return _origin(cluster, head_address, cluster.hub.api_port)


def broker_origin(cluster: Cluster, head_address: str) -> str:
    """The broker without its prefix, such as `https://10.77.0.1:8010`."""
    return _origin(cluster, head_address, cluster.hub.broker_port)


def broker_url(cluster: Cluster, head_address: str) -> str:
    """The broker, such as `https://10.77.0.1:8010/services/broker`."""
    return broker_origin(cluster, head_address) + BROKER_PREFIX


def _origin(cluster: Cluster, head_address: str, port: int) -> str:
    return f"{scheme(tls=cluster.has_internal_tls)}://{in_url(head_address)}:{port}"
