"""Metrics of nodes, of the head node's disk, and of certificates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gpuhub.broker_api.schemas import NodeState, NodeView
from gpuhub.nodes.status import NodeStatus


def collect_nodes(
    records: Mapping[str, NodeStatus], views: Sequence[NodeView], monotonic: float, *, has_firewall: bool
) -> Iterator[Metric]:
    """Yield the metrics of all nodes.

    Args:
        records: The nodes as last read, by name.
        views: The same nodes, as shown to all users.
        monotonic: The broker's monotonic time.
        has_firewall: Whether nodes have a packet filter of gpuhub.
    """
    yield _collect("gpuhub_node_up", "Whether the node answers.", {n.name: float(n.is_up) for n in records.values()})
    state = GaugeMetricFamily(
        "gpuhub_node_state", "1 for the node's current state, 0 for the others.", labels=("node", "state")
    )
    info = GaugeMetricFamily(
        "gpuhub_node_info", "Always 1; the labels describe the node.", labels=("node", "driver", "switch", "rack")
    )
    for view in views:
        for one in NodeState:
            state.add_metric((view.name, one.value), float(view.state is one))
        info.add_metric((view.name, view.driver or "", view.switch or "", view.rack or ""), 1.0)
    yield from (state, info)
    yield _collect(
        "gpuhub_node_leases", "Open leases with containers on the node.", {view.name: view.leases for view in views}
    )
    yield _collect(
        "gpuhub_node_reading_age_seconds",
        "Age of the last reading of the node's GPUs.",
        {node.name: monotonic - node.read_at for node in records.values() if node.read_at is not None},
    )
    yield _collect(
        "gpuhub_node_disk_free_bytes",
        "Free space for Docker's data on the node.",
        {node.name: node.disk_free for node in records.values() if node.disk_free is not None},
    )
    if has_firewall:
        yield _collect(
            "gpuhub_node_firewall_up",
            "Whether the node's packet filter is in place.",
            {node.name: float(node.firewall_error is None) for node in records.values() if node.is_up},
        )
        yield _collect_rejected(records)


def _collect_rejected(records: Mapping[str, NodeStatus]) -> Metric:
    family = CounterMetricFamily(
        "gpuhub_node_firewall_rejected_packets",
        "Packets that the node's packet filter has refused since its rules were applied.",
        labels=("node",),
    )
    for node in records.values():
        if node.firewall_rejected is not None:
            family.add_metric((node.name,), float(node.firewall_rejected))
    return family


def collect_disk(*, required_free: int, head_free: int | None) -> Iterator[Metric]:
    """Yield the head node's free space and the least that a node must have, bytes; `head_free` None if unknown."""
    yield GaugeMetricFamily(
        "gpuhub_disk_required_free_bytes", "Free space below which a node gets no work.", value=float(required_free)
    )
    if head_free is not None:
        yield GaugeMetricFamily(
            "gpuhub_head_disk_free_bytes", "Free space for gpuhub's data on the head node.", value=float(head_free)
        )


def collect_certificates(ends: Mapping[str, float]) -> Iterator[Metric]:
    """Yield when each certificate ends, by its name, in seconds since 1970."""
    yield _collect("gpuhub_certificate_expiry_timestamp_seconds", "End of a certificate.", ends, label="certificate")


def _collect(name: str, text: str, values: Mapping[str, float], *, label: str = "node") -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), float(value))
    return family
