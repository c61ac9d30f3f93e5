"""The whole cluster at one moment, as everybody sees it. Pure; linear in nodes, GPUs, leases and requests."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from gpuhub.broker import reservations, sharing, views
from gpuhub.broker.cordons import Cordon
from gpuhub.broker.rows import LeaseRow
from gpuhub.broker.schemas import (
    ClusterView,
    GpuState,
    GpuView,
    Holder,
    LeaseState,
    NodeView,
    OutsideProcess,
    ProfileView,
    QueueEntry,
    Reservation,
)
from gpuhub.broker.sharing import Beside
from gpuhub.broker.views import Place
from gpuhub.engines.base import Engine, Request
from gpuhub.gpus import Requirement
from gpuhub.nodes import health
from gpuhub.nodes.inventory import GpuReading, Inventory, NodeRecord
from gpuhub.nodes.records import Guard
from gpuhub.settings import Cluster, Profile, gpu_requirement

#: Of those who hold what a profile could use, so many are named: the ones whose time ends first.
HOLDERS_NAMED = 8
#: Of a long queue its beginning is told, and one's own requests; when they are expected to start, of fewer: each
#: costs a look through the whole queue.
QUEUE_TOLD = 1000
STARTS_TOLD = 12
_UNLEASED = Guard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a look at the cluster is made of. `now` is seconds since 1970."""

    cluster: Cluster
    #: Open leases by id, and the places of the waiting ones, each worked out when it is asked for.
    leases: Mapping[str, LeaseRow]
    places: Mapping[str, Place]
    inventory: Inventory
    engine: Engine
    now: float
    monotonic: float
    cordons: Mapping[str, Cordon] = field(default_factory=dict)
    guards: Mapping[str, Guard] = field(default_factory=dict)
    reservations: Sequence[Reservation] = ()
    #: What Slurm says of others' jobs on the same GPUs.
    beside: Beside = field(default_factory=Beside)
    #: Names of jobs that have one, by lease.
    job_names: Mapping[str, str] = field(default_factory=dict)
    #: Who looks: reservations and limits of theirs count for what starts at once. Empty for nobody in particular.
    owner: str = ""
    groups: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Gpus:
    """What is known of the cluster's GPUs, by UUID."""

    held: Mapping[str, Sequence[LeaseRow]]
    #: Of those that are shared at present.
    shares: Mapping[str, int]
    quarantined: frozenset[str]
    reserved: Mapping[str, str]
    #: By lease, and of others' jobs by UUID.
    holders: Mapping[str, Holder]
    outside: Mapping[str, Holder]
    free: set[str] = field(default_factory=set)
    #: By what is asked of a GPU: which could serve, and who of their holders is named.
    serving: dict[tuple[Requirement, int], tuple[frozenset[str], tuple[Holder, ...]]] = field(default_factory=dict)


def build_cluster(scene: Scene) -> ClusterView:
    """The whole cluster."""
    gpus = _gather(scene)
    order = scene.engine.order(scene.now)
    # Jobs beside gpuhub's have their places too.
    queue = [(place, scene.leases[one]) for place, one in enumerate(order, 1) if one in scene.leases]
    demand = _demand(scene.engine, [lease for _, lease in queue], gpus)
    nodes_of = Counter(node for lease in scene.leases.values() for node in lease.nodes)
    nodes = tuple(build_node(scene, record, gpus, nodes_of[record.name]) for record in scene.inventory.nodes.values())
    return ClusterView(
        nodes=nodes,
        profiles=tuple(_profile(scene, profile, gpus, demand) for profile in scene.cluster.profiles),
        queue=tuple(
            _entry(scene, lease, position, number)
            for number, (position, lease) in enumerate(queue, 1)
            if _is_told(scene, lease, number)
        ),
        waiting=len(queue),
        waiting_outside=scene.beside.waiting,
        reservations=tuple(scene.reservations),
        engine=scene.cluster.engine,
        partitions=sharing.build_partitions(scene.cluster, scene.beside.site, nodes),
        now=views.as_time(scene.now),
    )


def _is_told(scene: Scene, lease: LeaseRow, number: int) -> bool:
    return number <= QUEUE_TOLD or lease.owner == scene.owner


def _entry(scene: Scene, lease: LeaseRow, position: int, number: int) -> QueueEntry:
    is_near = number <= STARTS_TOLD or lease.owner == scene.owner
    place = scene.places.get(lease.id) if is_near else None
    expected_start = None if place is None else place.expected_start
    return views.build_queue_entry(lease, position, expected_start, scene.job_names.get(lease.id, ""))


def build_one_node(scene: Scene, name: str) -> NodeView:
    """One node; KeyError when there is none."""
    record = scene.inventory.nodes[name]
    return build_node(scene, record, _gather(scene), sum(name in lease.nodes for lease in scene.leases.values()))


def _gather(scene: Scene) -> _Gpus:
    held: defaultdict[str, list[LeaseRow]] = defaultdict(list)
    shares: dict[str, int] = {}
    quarantined: set[str] = set()
    for lease in scene.leases.values():
        for gpu in lease.gpus:
            if gpu.released_at is None:
                held[gpu.uuid].append(lease)
                if gpu.share > 1:
                    shares[gpu.uuid] = gpu.share
                if lease.state is LeaseState.QUARANTINED:
                    quarantined.add(gpu.uuid)
    return _Gpus(
        held=held,
        shares=shares,
        quarantined=frozenset(quarantined),
        reserved=reservations.find_kept(scene.reservations, scene.inventory, scene.now),
        holders={
            lease.id: views.build_holder(lease, scene.job_names.get(lease.id, ""))
            for leases in held.values()
            for lease in leases
        },
        outside={uuid: sharing.build_holder(job, scene.now) for uuid, job in scene.beside.outside.items()},
    )


# -- nodes and GPUs ---------------------------------------------------------------------------------------------------


def build_node(scene: Scene, record: NodeRecord, gpus: _Gpus, leases: int) -> NodeView:
    """One node; its free GPUs are noted in `gpus`."""
    cordon = scene.cordons.get(record.name)
    condition = health.node_state(
        scene.inventory,
        record.name,
        cordon=cordon,
        monotonic=scene.monotonic,
        scheduling=scene.cluster.scheduling,
    )
    condition = sharing.judge_node(scene.beside, record.name, condition)
    described = scene.inventory.described[record.name]
    return NodeView(
        name=record.name,
        state=condition.state,
        message=condition.message,
        gpus=tuple(_gpu(scene, record, gpu, gpus, cordon) for gpu in record.gpus),
        driver=record.driver,
        switch=described.switch,
        rack=described.rack,
        leases=leases,
    )


def _gpu(scene: Scene, record: NodeRecord, gpu: GpuReading, gpus: _Gpus, cordon: Cordon | None) -> GpuView:
    leases = gpus.held.get(gpu.uuid, ())
    condition = health.gpu_state(
        scene.inventory,
        record.name,
        gpu,
        is_held=bool(leases),
        is_quarantined=gpu.uuid in gpus.quarantined,
        cordon=cordon,
        guard=scene.guards.get(gpu.uuid, _UNLEASED),
        monotonic=scene.monotonic,
        scheduling=scene.cluster.scheduling,
    )
    condition = sharing.judge_gpu(scene.beside, record.name, gpu.uuid, condition, scene.now)
    if condition.state is GpuState.FREE:
        gpus.free.add(gpu.uuid)
    is_fresh = record.is_fresh(scene.monotonic)
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
        outside=tuple([OutsideProcess(pid=one.pid, memory_mib=one.memory_mib) for one in condition.outside]),
        reservation=gpus.reserved.get(gpu.uuid),
        power_w=gpu.power_w if is_fresh else None,
        temperature_c=gpu.temperature_c if is_fresh else None,
        utilisation_percent=gpu.utilisation_percent if is_fresh else None,
        memory_used_mib=gpu.memory_used_mib if is_fresh else None,
    )


# -- profiles ---------------------------------------------------------------------------------------------------------


def _demand(engine: Engine, waiting: Sequence[LeaseRow], gpus: _Gpus) -> list[tuple[frozenset[str], int]]:
    """For each kind of GPU that is waited for: which could serve, and how many requests wait for such."""
    asks = [lease.ask for lease in waiting if lease.ask.size]
    kinds = Counter((ask.models, ask.least_memory_mib, ask.least_driver, ask.least_capability) for ask in asks)
    some = {(ask.models, ask.least_memory_mib, ask.least_driver, ask.least_capability): ask for ask in asks}
    return [
        (_serving(engine, Request(id="", owner="", requirement=some[kind].requirement), gpus)[0], count)
        for kind, count in kinds.items()
    ]


def _serving(engine: Engine, request: Request, gpus: _Gpus) -> tuple[frozenset[str], tuple[Holder, ...]]:
    """Every GPU that could serve, and who holds them; worked out once for all that ask for the same."""
    if not request.size:
        return frozenset(), ()
    key = (request.requirement, request.share)
    if key not in gpus.serving:
        serving = engine.candidates(request)
        gpus.serving[key] = serving, _holders(serving, gpus)
    return gpus.serving[key]


def _profile(scene: Scene, profile: Profile, gpus: _Gpus, demand: Sequence[tuple[frozenset[str], int]]) -> ProfileView:
    request = Request(
        id="",
        owner=scene.owner,
        groups=scene.groups,
        created_at=scene.now,
        gpus_per_node=profile.gpu_count,
        requirement=gpu_requirement(profile),
        share=profile.gpu_share,
        exclusive=profile.exclusive,
        time_limit_s=profile.time_limit,
        cpu_milli=round(profile.cpus * 1000),
        memory_mib=profile.memory // 1024**2,
    )
    serving, holders = _serving(scene.engine, request, gpus)
    starts_now = scene.engine.starts_now(request, scene.now)
    # One GPU that is free and yet not given at once is claimed by an earlier waiter, or reserved.
    free = 0 if profile.gpu_count == 1 and not starts_now else _count_free(profile.gpu_share, serving, gpus)
    return ProfileView(
        name=profile.name,
        title=profile.title,
        description=profile.description,
        gpu_count=profile.gpu_count,
        total=len(serving) * profile.gpu_share,
        free=free,
        starts_now=starts_now,
        ahead=0 if starts_now else sum(count for could, count in demand if could & serving),
        holders=holders,
        share=profile.gpu_share,
    )


def _count_free(share: int, serving: frozenset[str], gpus: _Gpus) -> int:
    """Free GPUs, or free parts of GPUs."""
    whole = len(gpus.free & serving) * share
    if share == 1:
        return whole
    parted = [uuid for uuid in serving & gpus.shares.keys() if gpus.shares[uuid] == share]
    return whole + sum(share - len(gpus.held[uuid]) for uuid in parted)


def _holders(serving: frozenset[str], gpus: _Gpus) -> tuple[Holder, ...]:
    leases = {lease.id: lease for uuid in serving & gpus.held.keys() for lease in gpus.held[uuid]}
    jobs = {holder.slurm_job: holder for uuid in serving & gpus.outside.keys() for holder in (gpus.outside[uuid],)}
    known = [gpus.holders[lease_id] for lease_id in sorted(leases)] + list(jobs.values())
    return tuple(heapq.nsmallest(HOLDERS_NAMED, known, key=_end_of))


def _end_of(holder: Holder) -> tuple[float, float]:
    return (inf if holder.until is None else holder.until.timestamp(), holder.since.timestamp())
