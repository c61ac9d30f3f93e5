"""The view of the whole cluster: nodes, GPUs, profiles and the queue; linear in nodes, GPUs, leases and requests."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from gpuhub.backends.interface import ExternalJob, ExternalUsage
from gpuhub.broker.views import serializers
from gpuhub.broker.views.profile_sizes import find_profile_sizes
from gpuhub.broker.views.serializers import QueuePlace
from gpuhub.broker_api.schemas import (
    Capabilities,
    ClusterView,
    GpuState,
    GpuView,
    HolderView,
    LeaseState,
    NodeState,
    NodeView,
    OutsideProcess,
    PartitionView,
    ProfileView,
    Purpose,
    QueueEntry,
    ReservationView,
)
from gpuhub.broker_api.schemas.bench import NodeBenchView
from gpuhub.common.gpu import GpuRequirement
from gpuhub.common.node_access import find_request_groups
from gpuhub.config.containers.container_size import build_profile_size
from gpuhub.config.containers.profiles import gpu_requirement
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.domain import reservations
from gpuhub.domain.models import LeaseRow
from gpuhub.domain.scheduler_input import build_request
from gpuhub.nodes import gpu_health
from gpuhub.nodes.inventory import GpuReading, Inventory, NodeStatus
from gpuhub.nodes.status import Cordon, GpuLeaseStatus
from gpuhub.scheduler.interface import Scheduler, SchedulingRequest

#: Maximum number of holders that are named for a profile: those whose time ends first.
MAX_HOLDERS_SHOWN = 8
#: Maximum number of requests that are shown of the queue's beginning, in addition to the caller's own.
MAX_QUEUE_SHOWN = 1000
#: The same for requests with an expected start, which takes a pass through the whole queue for each.
MAX_STARTS_SHOWN = 12
#: Maximum number of owners that are named for a node.
MAX_OWNERS_SHOWN = 2
_UNLEASED = GpuLeaseStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterViewInput:
    """The values that the view of the cluster is built from. `now` is in seconds since 1970."""

    cluster: ClusterSettings
    #: Open leases by id.
    leases: Mapping[str, LeaseRow]
    #: Places of waiting requests by lease, each computed on access.
    places: Mapping[str, QueuePlace]
    inventory: Inventory
    scheduler: Scheduler
    now: float
    monotonic: float
    cordons: Mapping[str, Cordon] = field(default_factory=dict)
    lease_statuses: Mapping[str, GpuLeaseStatus] = field(default_factory=dict)
    reservations: Sequence[ReservationView] = ()
    #: Jobs from outside gpuhub on the same GPUs, and the capabilities of the backend.
    external: ExternalUsage = field(default_factory=ExternalUsage)
    capabilities: Capabilities = field(default_factory=Capabilities)
    #: Builds the partitions that users may choose, from the nodes.
    build_partitions: Callable[[Sequence[NodeView]], tuple[PartitionView, ...]] = lambda _: ()
    #: Names of jobs by lease, if they have one.
    job_names: Mapping[str, str] = field(default_factory=dict)
    #: Since when notebooks are idle while others wait, by lease.
    idle_times: Mapping[str, float] = field(default_factory=dict)
    #: What `gpuhub bench` last found, by node.
    bench: Mapping[str, NodeBenchView] = field(default_factory=dict)
    #: The caller, whose groups, reservations and limits decide what starts at once; empty for a view for all users.
    owner: str = ""
    groups: frozenset[str] = frozenset()


@dataclass(slots=True)
class _GpuSummary:
    """Leases, reservations and holders of the cluster's GPUs, by UUID."""

    held: Mapping[str, Sequence[LeaseRow]]
    #: Number of shares of GPUs that are shared now.
    shares: Mapping[str, int]
    quarantined: frozenset[str]
    reserved: Mapping[str, str]
    #: Holders by lease.
    holders: Mapping[str, HolderView]
    #: Holders from outside gpuhub, by UUID.
    outside: Mapping[str, HolderView]
    free: set[str] = field(default_factory=set)
    #: Candidates and their holders, by requirement, share and those of the owner's groups that nodes are restricted to.
    serving: dict[tuple[GpuRequirement, int, frozenset[str]], tuple[frozenset[str], tuple[HolderView, ...]]] = field(
        default_factory=dict
    )
    #: The groups that some node is restricted to.
    node_groups: frozenset[str] = frozenset()


def build_cluster(inputs: ClusterViewInput) -> ClusterView:
    """Return the view of the whole cluster."""
    gpus = _summarise_gpus(inputs)
    order = inputs.scheduler.order_requests(inputs.now)
    # Jobs from outside gpuhub have positions as well.
    queue = [
        (position, inputs.leases[lease_id]) for position, lease_id in enumerate(order, 1) if lease_id in inputs.leases
    ]
    waiting = [lease for _, lease in queue]
    demand = _count_demand(inputs.scheduler, waiting, gpus)
    wanted_by = _list_waiting_owners(inputs, waiting, demand)
    nodes = tuple([node.model_copy(update={"wanted_by": wanted_by[node.name]}) for node in _build_nodes(inputs, gpus)])
    return ClusterView(
        nodes=nodes,
        profiles=tuple(
            _build_profile(inputs, profile, gpus, demand)
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
    return _build_nodes(inputs, _summarise_gpus(inputs))


def _build_nodes(inputs: ClusterViewInput, gpus: _GpuSummary) -> tuple[NodeView, ...]:
    nodes_of = Counter(node for lease in inputs.leases.values() for node in lease.nodes)
    return tuple(build_node(inputs, record, gpus, nodes_of[record.name]) for record in inputs.inventory.nodes.values())


def build_one_node(inputs: ClusterViewInput, name: str) -> NodeView:
    """Return the view of one node.

    Raises:
        KeyError: the node does not exist.
    """
    record = inputs.inventory.nodes[name]
    return build_node(
        inputs, record, _summarise_gpus(inputs), sum(name in lease.nodes for lease in inputs.leases.values())
    )


def _summarise_gpus(inputs: ClusterViewInput) -> _GpuSummary:
    held: defaultdict[str, list[LeaseRow]] = defaultdict(list)
    shares: dict[str, int] = {}
    quarantined: set[str] = set()
    for lease in inputs.leases.values():
        for gpu in lease.gpus:
            if gpu.released_at is None:
                held[gpu.uuid].append(lease)
                if gpu.share > 1:
                    shares[gpu.uuid] = gpu.share
                if lease.state is LeaseState.QUARANTINED:
                    quarantined.add(gpu.uuid)
    return _GpuSummary(
        held=held,
        shares=shares,
        quarantined=frozenset(quarantined),
        reserved=reservations.find_reserved(inputs.reservations, inputs.inventory, inputs.now),
        holders={
            lease.id: serializers.build_holder(
                lease, inputs.job_names.get(lease.id, ""), inputs.idle_times.get(lease.id)
            )
            for leases in held.values()
            for lease in leases
        },
        outside={uuid: _build_external_holder(job, inputs.now) for uuid, job in inputs.external.gpus.items()},
        node_groups=inputs.cluster.node_groups,
    )


# -- nodes and GPUs ---------------------------------------------------------------------------------------------------


def build_node(inputs: ClusterViewInput, record: NodeStatus, gpus: _GpuSummary, leases: int) -> NodeView:
    """Return the view of one node, and add its free GPUs to `gpus`."""
    cordon = inputs.cordons.get(record.name)
    condition = gpu_health.assess_node(
        inputs.inventory,
        record.name,
        cordon=cordon,
        monotonic=inputs.monotonic,
        scheduling=inputs.cluster.scheduling,
    )
    condition = _add_external_node(inputs.external, record.name, condition)
    described = inputs.inventory.configured_nodes[record.name]
    return NodeView(
        name=record.name,
        state=condition.state,
        message=condition.message,
        gpus=tuple(_build_gpu(inputs, record, gpu, gpus, cordon) for gpu in record.gpus),
        driver=record.driver,
        switch=described.switch,
        rack=described.rack,
        leases=leases,
        groups=tuple(sorted(described.groups)),
        is_open=described.admits(inputs.groups),
        owner=inputs.cluster.node(record.name).owner,
        takes_scavenging=described.admits(find_request_groups(inputs.groups, scavenge=True)),
        guest=inputs.cluster.node(record.name).guest,
        takes_guests=inputs.cluster.node(record.name).guest
        and described.admits(find_request_groups(inputs.groups, scavenge=False, guests=True)),
        bench=inputs.bench.get(record.name),
        power=None if record.power is None else serializers.build_power(record.power),
    )


def _build_gpu(
    inputs: ClusterViewInput, record: NodeStatus, gpu: GpuReading, gpus: _GpuSummary, cordon: Cordon | None
) -> GpuView:
    leases = gpus.held.get(gpu.uuid, ())
    condition = gpu_health.assess_gpu(
        inputs.inventory,
        record.name,
        gpu,
        is_held=bool(leases),
        is_quarantined=gpu.uuid in gpus.quarantined,
        cordon=cordon,
        lease_status=inputs.lease_statuses.get(gpu.uuid, _UNLEASED),
        monotonic=inputs.monotonic,
        scheduling=inputs.cluster.scheduling,
    )
    condition = _add_external_gpu(inputs.external, record.name, gpu.uuid, condition)
    if condition.state is GpuState.FREE:
        gpus.free.add(gpu.uuid)
    is_fresh = record.is_fresh(inputs.monotonic)
    holders = tuple([gpus.holders[lease.id] for lease in leases])
    if condition.state is GpuState.OUTSIDE and gpu.uuid in gpus.outside:
        holders = (gpus.outside[gpu.uuid],)
    return GpuView(
        uuid=gpu.uuid,
        node=record.name,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        state=condition.state,
        holder=holders[0] if holders else None,
        holders=holders,
        share=gpus.shares.get(gpu.uuid, 1),
        is_mig=gpu.is_mig,
        capability=None if gpu.capability is None else ".".join(map(str, gpu.capability)),
        message=condition.message,
        outside=tuple([OutsideProcess(pid=one.pid, memory_mib=one.memory_mib) for one in condition.outside_processes]),
        reservation=gpus.reserved.get(gpu.uuid),
        power_w=gpu.power_w if is_fresh else None,
        temperature_c=gpu.temperature_c if is_fresh else None,
        utilisation_percent=gpu.utilisation_percent if is_fresh else None,
        memory_used_mib=gpu.memory_used_mib if is_fresh else None,
    )


def _build_external_holder(job: ExternalJob, now: float) -> HolderView:
    return HolderView(
        owner=job.owner,
        purpose=Purpose.JOB,
        since=serializers.to_datetime(now if job.started_at is None else job.started_at),
        until=serializers.to_optional_datetime(job.ends_at),
        slurm_job=job.id,
        is_outside=True,
    )


def _add_external_gpu(
    external: ExternalUsage, node: str, uuid: str, condition: gpu_health.GpuCondition
) -> gpu_health.GpuCondition:
    """Return the condition of a GPU without a lease: an external job may have it, or its node may get no work."""
    job, reason = external.gpus.get(uuid), external.unavailable.get(node)
    if job is not None and condition.state in {GpuState.FREE, GpuState.OUTSIDE}:
        return replace(condition, state=GpuState.OUTSIDE, message=job.text)
    if reason is not None and condition.state is GpuState.FREE:
        return replace(condition, state=GpuState.UNAVAILABLE, message=reason)
    return condition


def _add_external_node(
    external: ExternalUsage, node: str, condition: gpu_health.NodeCondition
) -> gpu_health.NodeCondition:
    """Return the condition of a node; one that answers and gets no work from the backend counts as cordoned."""
    reason = external.unavailable.get(node)
    if reason is None or condition.state is not NodeState.UP:
        return condition
    message = "; ".join(text for text in (reason, condition.message) if text)
    return gpu_health.NodeCondition(state=NodeState.CORDONED, message=message)


# -- profiles ---------------------------------------------------------------------------------------------------------


def _count_demand(
    scheduler: Scheduler, waiting: Sequence[LeaseRow], gpus: _GpuSummary
) -> list[tuple[frozenset[str], Counter[str]]]:
    """Return the GPUs that meet each requirement in the queue, and the number of requests with it by owner."""
    kinds: defaultdict[tuple[GpuRequirement, frozenset[str]], Counter[str]] = defaultdict(Counter)
    for lease in waiting:
        if lease.resources.size:
            kinds[lease.resources.requirement, gpus.node_groups & build_request(lease).groups][lease.owner] += 1
    return [
        (_find_serving(scheduler, SchedulingRequest(id="", owner="", requirement=kind, groups=groups), gpus)[0], owners)
        for (kind, groups), owners in kinds.items()
    ]


def _list_waiting_owners(
    inputs: ClusterViewInput, waiting: Sequence[LeaseRow], demand: Sequence[tuple[frozenset[str], Counter[str]]]
) -> Mapping[str, tuple[str, ...]]:
    """Return by node whose requests could be granted there; those without a GPU could be on any node."""
    anywhere = {lease.owner for lease in waiting if not lease.resources.size}
    shown: dict[str, tuple[str, ...]] = {}
    for name, record in inputs.inventory.nodes.items():
        uuids = {gpu.uuid for gpu in record.gpus}
        # A request for one of its GPUs may wait for the CPU or memory of those who have another.
        owners = anywhere.union(*(owners for candidates, owners in demand if not uuids.isdisjoint(candidates)))
        shown[name] = tuple(heapq.nsmallest(MAX_OWNERS_SHOWN, owners))
    return shown


def _find_serving(
    scheduler: Scheduler, request: SchedulingRequest, gpus: _GpuSummary
) -> tuple[frozenset[str], tuple[HolderView, ...]]:
    """Return the GPUs that can serve a request, and their holders; computed once for equal requirements."""
    if not request.size:
        return frozenset(), ()
    key = (request.requirement, request.share, request.groups & gpus.node_groups)
    if key not in gpus.serving:
        serving = scheduler.find_candidates(request)
        gpus.serving[key] = serving, _find_holders(serving, gpus)
    return gpus.serving[key]


def _build_profile(
    inputs: ClusterViewInput,
    profile: ProfileSettings,
    gpus: _GpuSummary,
    demand: Sequence[tuple[frozenset[str], Counter[str]]],
) -> ProfileView:
    size = build_profile_size(profile, follows_gpus=inputs.cluster.counts_machines)
    request = SchedulingRequest(
        id="",
        owner=inputs.owner,
        groups=inputs.groups,
        created_at=inputs.now,
        gpus_per_node=profile.gpu_count,
        requirement=gpu_requirement(profile),
        share=profile.gpu_share,
        exclusive=profile.exclusive,
        time_limit_s=profile.time_limit,
        cpu_milli=size.cpu_milli,
        memory_mib=size.memory_mib,
        cpu_by_gpu=size.cpu_by_gpu,
        memory_by_gpu=size.memory_by_gpu,
    )
    serving, holders = _find_serving(inputs.scheduler, request, gpus)
    starts_now = inputs.scheduler.can_start_now(request, inputs.now)
    # A free GPU that would not be granted at once is claimed by an earlier request, or reserved.
    cpus, memory_mib = find_profile_sizes(profile, inputs.inventory, serving)
    free = 0 if profile.gpu_count == 1 and not starts_now else _count_free(profile.gpu_share, serving, gpus)
    return ProfileView(
        name=profile.name,
        title=profile.title,
        description=profile.description,
        gpu_count=profile.gpu_count,
        total=len(serving) * profile.gpu_share,
        free=free,
        starts_now=starts_now,
        ahead=0 if starts_now else sum(owners.total() for candidates, owners in demand if candidates & serving),
        holders=holders,
        share=profile.gpu_share,
        models=profile.models,
        image=profile.image,
        images=profile.offered_images,
        cpus=cpus,
        memory_mib=memory_mib,
    )


def _count_free(share: int, serving: frozenset[str], gpus: _GpuSummary) -> int:
    """Return the number of free GPUs, or of free GPU shares."""
    unused = len(gpus.free & serving) * share
    if share == 1:
        return unused
    shared = [uuid for uuid in serving & gpus.shares.keys() if gpus.shares[uuid] == share]
    return unused + sum(share - len(gpus.held[uuid]) for uuid in shared)


def _find_holders(serving: frozenset[str], gpus: _GpuSummary) -> tuple[HolderView, ...]:
    leases = {lease.id: lease for uuid in serving & gpus.held.keys() for lease in gpus.held[uuid]}
    jobs = {holder.slurm_job: holder for uuid in serving & gpus.outside.keys() for holder in (gpus.outside[uuid],)}
    holders = [gpus.holders[lease_id] for lease_id in sorted(leases)] + list(jobs.values())
    return tuple(heapq.nsmallest(MAX_HOLDERS_SHOWN, holders, key=_end_of))


def _end_of(holder: HolderView) -> tuple[float, float]:
    return (inf if holder.until is None else holder.until.timestamp(), holder.since.timestamp())
