"""What the broker knows, as its clients see it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from gpuhub.broker import schedule
from gpuhub.broker.ledger import Place, Snapshot
from gpuhub.broker.rows import JobRow, LeasedGpu, LeaseRow
from gpuhub.broker.schemas import (
    ClusterView,
    Gpu,
    GpuState,
    GpuView,
    Holder,
    Job,
    Lease,
    NodeState,
    NodeView,
    ProfileView,
    Purpose,
    QueueEntry,
    Worker,
)
from gpuhub.engines.base import Engine, Request, Slot, Supply
from gpuhub.nodes.inventory import GpuReading, Inventory, NodeRecord
from gpuhub.settings import Cluster, Profile, gpu_requirement


def as_time(seconds: float) -> datetime:
    """Seconds since 1970 as the wire has them: UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def _as_time_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else as_time(seconds)


def build_gpu(gpu: LeasedGpu) -> Gpu:
    """A leased GPU."""
    return Gpu(uuid=gpu.uuid, node=gpu.node, index=gpu.index, model=gpu.model, memory_mib=gpu.memory_mib)


def build_lease(lease: LeaseRow, version: int, place: Place | None) -> Lease:
    """A lease as its owner sees it."""
    return Lease(
        id=lease.id,
        owner=lease.owner,
        purpose=lease.purpose,
        subject=lease.subject,
        profile=lease.profile,
        state=lease.state,
        version=version,
        position=None if place is None else place.position,
        waiting_for=None if place is None else place.wait.text,
        nodes=lease.nodes,
        gpus=tuple(build_gpu(gpu) for gpu in lease.gpus),
        epoch=lease.epoch,
        created_at=as_time(lease.created_at),
        granted_at=_as_time_or_none(lease.granted_at),
        expires_at=_as_time_or_none(lease.expires_at),
        reason=lease.reason,
    )


def build_job(job: JobRow, lease: LeaseRow, snapshot: Snapshot, renew_within_s: float) -> Job:
    """A job as its owner sees it."""
    return Job(
        id=job.id,
        run_id=job.run_id,
        owner=job.owner,
        state=job.state,
        version=snapshot.job_version(job, lease),
        lease=build_lease(lease, snapshot.lease_version(lease), snapshot.places.get(lease.id)),
        workers=tuple(
            Worker(
                index=worker.index,
                node=worker.node,
                gpus=tuple(build_gpu(gpu) for gpu in lease.gpus if gpu.worker == worker.index),
                state=worker.state,
                exit_code=worker.exit_code,
                message=worker.message,
            )
            for worker in job.workers
        ),
        nnodes=job.nnodes,
        nproc_per_node=job.nproc_per_node,
        reason=job.reason,
        renew_within_s=renew_within_s,
    )


def build_cluster(
    *, cluster: Cluster, snapshot: Snapshot, inventory: Inventory, engine: Engine, now: float, monotonic: float
) -> ClusterView:
    """The whole cluster at one moment."""
    supply = schedule.build_supply(snapshot.leases.values(), inventory, None, monotonic)
    holders = {gpu.uuid: _holder(lease) for lease in snapshot.leases.values() for gpu in lease.held}
    slots = {slot.uuid: slot for slot in supply.slots}
    return ClusterView(
        nodes=tuple(_node(node, inventory, slots, holders, monotonic) for node in inventory.nodes.values()),
        profiles=tuple(_profile(profile, snapshot, supply, engine, holders) for profile in cluster.profiles),
        queue=tuple(
            QueueEntry(
                lease=lease.id,
                position=snapshot.places[lease.id].position,
                owner=lease.owner,
                purpose=lease.purpose,
                wants=describe_wants(lease),
                since=as_time(lease.created_at),
            )
            for lease in schedule.waiting(snapshot.leases.values())
        ),
        now=as_time(now),
    )


def describe_wants(lease: LeaseRow) -> str:
    """For a person: `profile rtx5090`, or `3 nodes × 1 GPU`."""
    if lease.purpose is Purpose.NOTEBOOK:
        return f"profile {lease.profile}"
    nodes = f"{lease.ask.nodes} node{'s' if lease.ask.nodes > 1 else ''}"
    gpus = f"{lease.ask.gpus_per_node} {lease.ask.model or 'GPU'}{'s' if lease.ask.gpus_per_node > 1 else ''}"
    return f"{nodes} × {gpus}"


def _holder(lease: LeaseRow) -> Holder:
    return Holder(
        owner=lease.owner,
        purpose=lease.purpose,
        since=as_time(lease.granted_at or lease.created_at),
        until=_as_time_or_none(lease.expires_at),
    )


def _node(
    node: NodeRecord,
    inventory: Inventory,
    slots: Mapping[str, Slot],
    holders: Mapping[str, Holder],
    monotonic: float,
) -> NodeView:
    return NodeView(
        name=node.name,
        state=NodeState.UP if node.is_up else NodeState.UNREACHABLE,
        message=inventory.message(node.name, monotonic),
        gpus=tuple(
            _gpu(gpu, node, slots[gpu.uuid], holders.get(gpu.uuid), is_fresh=node.is_fresh(monotonic))
            for gpu in node.gpus
        ),
    )


def _gpu(gpu: GpuReading, node: NodeRecord, slot: Slot, holder: Holder | None, *, is_fresh: bool) -> GpuView:
    if not slot.available or slot.node != node.name:
        state = GpuState.UNAVAILABLE
    else:
        state = GpuState.FREE if holder is None else GpuState.HELD
    return GpuView(
        uuid=gpu.uuid,
        node=node.name,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        state=state,
        holder=holder,
        utilisation_percent=gpu.utilisation_percent if is_fresh else None,
        memory_used_mib=gpu.memory_used_mib if is_fresh else None,
    )


def _profile(
    profile: Profile, snapshot: Snapshot, supply: Supply, engine: Engine, holders: Mapping[str, Holder]
) -> ProfileView:
    request = Request(id="", owner="", gpus_per_node=profile.gpu_count, requirement=gpu_requirement(profile))
    serving = engine.candidates(request, supply.slots) if profile.gpu_count else frozenset()
    claims = [place.wait.claims for place in snapshot.places.values()]
    blocked = dict(supply.held) | {uuid: "" for claim in claims for uuid in claim}
    now = Supply(slots=supply.slots, held=blocked, notebooks=supply.notebooks)
    starts_now = "" in engine.decide([request], now).grants
    return ProfileView(
        name=profile.name,
        title=profile.title,
        description=profile.description,
        gpu_count=profile.gpu_count,
        total=len(serving),
        free=sum(slot.available and slot.uuid in serving and slot.uuid not in blocked for slot in supply.slots),
        starts_now=starts_now,
        ahead=0 if starts_now else sum(bool(claim & serving) for claim in claims),
        holders=_distinct(holders[uuid] for uuid in sorted(serving) if uuid in holders),
    )


def _distinct(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    found: Sequence[Holder] = sorted(holders, key=lambda holder: holder.since)
    return tuple(dict.fromkeys(found))
