"""The view of the whole cluster: nodes, GPUs, profiles and the queue; linear in nodes, GPUs, leases and requests."""

from __future__ import annotations

from collections import Counter

from gpuhub.broker.views import serializers
from gpuhub.broker.views.gpu_summary import ClusterViewInput, GpuSummary, summarise_gpus
from gpuhub.broker.views.node_views import build_node
from gpuhub.broker.views.profile_views import build_profile, count_demand, list_waiting_owners
from gpuhub.broker_api.schemas import ClusterView, NodeView, QueueEntry
from gpuhub.domain.models import LeaseRow

#: Maximum number of requests that are shown of the queue's beginning, in addition to the caller's own.
MAX_QUEUE_SHOWN = 1000
#: Maximum number of requests that are shown with an expected start, which takes a pass through the whole queue for
#: each.
MAX_STARTS_SHOWN = 12


def build_cluster(inputs: ClusterViewInput) -> ClusterView:
    """Return the view of the whole cluster."""
    gpus = summarise_gpus(inputs)
    order = inputs.scheduler.order_requests(inputs.now)
    # Jobs from outside gpuhub have positions as well.
    queue = [
        (position, inputs.leases[lease_id]) for position, lease_id in enumerate(order, 1) if lease_id in inputs.leases
    ]
    waiting = [lease for _, lease in queue]
    demand = count_demand(inputs.scheduler, waiting, gpus)
    wanted_by = list_waiting_owners(inputs, waiting, demand)
    nodes = tuple([node.model_copy(update={"wanted_by": wanted_by[node.name]}) for node in _build_nodes(inputs, gpus)])
    return ClusterView(
        nodes=nodes,
        profiles=tuple(
            build_profile(inputs, profile, gpus, demand)
            for profile in inputs.cluster.profiles
            if profile.admits(inputs.groups)
        ),
        queue=tuple(
            _build_entry(inputs, lease, position, number)
            for number, (position, lease) in enumerate(queue, 1)
            if _is_shown(inputs, lease, number)
        ),
        waiting=len(queue),
        waiting_outside=inputs.external.waiting,
        reservations=tuple(inputs.reservations),
        engine=inputs.cluster.engine,
        capabilities=inputs.capabilities,
        partitions=inputs.build_partitions(nodes),
        now=serializers.to_datetime(inputs.now),
    )


def _is_shown(inputs: ClusterViewInput, lease: LeaseRow, number: int) -> bool:
    return number <= MAX_QUEUE_SHOWN or lease.owner == inputs.owner


def _build_entry(inputs: ClusterViewInput, lease: LeaseRow, position: int, number: int) -> QueueEntry:
    is_near = number <= MAX_STARTS_SHOWN or lease.owner == inputs.owner
    place = inputs.places.get(lease.id) if is_near else None
    expected_start = None if place is None else place.expected_start
    return serializers.build_queue_entry(lease, position, expected_start, inputs.job_names.get(lease.id, ""))


def build_nodes(inputs: ClusterViewInput) -> tuple[NodeView, ...]:
    """Return the views of all nodes."""
    return _build_nodes(inputs, summarise_gpus(inputs))


def _build_nodes(inputs: ClusterViewInput, gpus: GpuSummary) -> tuple[NodeView, ...]:
    nodes_of = Counter(node for lease in inputs.leases.values() for node in lease.nodes)
    return tuple(build_node(inputs, record, gpus, nodes_of[record.name]) for record in inputs.inventory.nodes.values())


def build_one_node(inputs: ClusterViewInput, name: str) -> NodeView:
    """Return the view of one node.

    Raises:
        KeyError: the node does not exist.
    """
    record = inputs.inventory.nodes[name]
    return build_node(
        inputs, record, summarise_gpus(inputs), sum(name in lease.nodes for lease in inputs.leases.values())
    )
