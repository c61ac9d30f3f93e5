"""What the broker knows, as its clients see it: leases, jobs, the queue, and sentences about them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from gpuhub.broker.rows import JobRow, LeasedGpu, LeaseRow
from gpuhub.broker.schemas import Gpu, Holder, Job, Lease, Obstacle, Purpose, QueueEntry, UsageView, Why, Worker
from gpuhub.engines import base


class Place(Protocol):
    """Where a waiting request stands; the engine's `Why` is one."""

    @property
    def position(self) -> int:
        """From 1."""
        ...

    @property
    def text(self) -> str:
        """One line for a person."""
        ...

    @property
    def expected_start(self) -> float | None:
        """None where it is not known."""
        ...


def as_time(seconds: float) -> datetime:
    """Seconds since 1970 as the wire has them: UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def as_time_or_none(seconds: float | None) -> datetime | None:
    """The same for what may not be known."""
    return None if seconds is None else as_time(seconds)


def build_gpu(gpu: LeasedGpu) -> Gpu:
    """A leased GPU, or a leased part of one."""
    return Gpu(
        uuid=gpu.uuid,
        node=gpu.node,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        share=gpu.share,
        memory_cap_mib=None if gpu.share == 1 else gpu.memory_mib // gpu.share,
    )


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
        waiting_for=None if place is None else place.text,
        expected_start=None if place is None else as_time_or_none(place.expected_start),
        note=lease.note,
        priority=lease.ask.priority,
        nodes=lease.nodes,
        gpus=tuple(build_gpu(gpu) for gpu in lease.gpus),
        slurm_job=lease.slurm_job,
        epoch=lease.epoch,
        created_at=as_time(lease.created_at),
        granted_at=as_time_or_none(lease.granted_at),
        expires_at=as_time_or_none(lease.expires_at),
        reason=lease.reason,
    )


def build_job(job: JobRow, lease: LeaseRow, version: int, place: Place | None, renew_within_s: float) -> Job:
    """A job as its owner sees it; `version` counts for the job and for the lease in it."""
    return Job(
        id=job.id,
        run_id=job.run_id,
        owner=job.owner,
        state=job.state,
        version=version,
        lease=build_lease(lease, version, place),
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
        min_nnodes=job.min_nnodes,
        gpus=job.gpus,
        scavenge=lease.ask.scavenge,
        preemptions=job.preemptions,
        checkpoint_until=as_time_or_none(job.checkpoint_until),
        array=job.array,
        detached=job.detached,
        name=job.name,
        joins=job.joins,
        created_at=as_time(job.created_at),
        started_at=as_time_or_none(job.started_at),
        ended_at=as_time_or_none(job.ended_at),
        exit_code=job.exit_code,
    )


def build_why(lease: LeaseRow, why: base.Why) -> Why:
    """Why a request waits, in full."""
    return Why(
        lease=lease.id,
        position=why.position,
        waits_for=why.text,
        expected_start=as_time_or_none(why.expected_start),
        obstacles=tuple(
            Obstacle(demand=one.demand, would_start_at=as_time_or_none(one.would_start_at)) for one in why.obstacles
        ),
    )


def build_queue_entry(lease: LeaseRow, position: int, expected_start: float | None, name: str = "") -> QueueEntry:
    """A waiting request as everybody sees it; `name` is its job's, if that has one."""
    return QueueEntry(
        lease=lease.id,
        position=position,
        owner=lease.owner,
        purpose=lease.purpose,
        wants=": ".join(text for text in (name, describe_wants(lease)) if text),
        since=as_time(lease.created_at),
        expected_start=as_time_or_none(expected_start),
    )


def build_usage(owner: str, usage: base.Usage, waiting: int, limits: base.Limits) -> UsageView:
    """What one owner has, had and may have."""
    return UsageView(
        owner=owner,
        gpus=usage.gpus,
        waiting=waiting,
        gpu_hours_week=round(usage.gpu_hours_week, 3),
        decayed_gpu_hours=round(usage.decayed_gpu_hours, 3),
        penalty_s=round(usage.penalty_s, 1),
        max_gpus=limits.max_gpus,
        max_gpu_hours_week=limits.gpu_hours_per_week,
        max_waiting=limits.max_waiting,
    )


def build_holder(lease: LeaseRow, name: str = "") -> Holder:
    """Who holds the GPUs of a lease; `name` is its job's, if that has one."""
    return Holder(
        owner=lease.owner,
        purpose=lease.purpose,
        since=as_time(lease.granted_at or lease.created_at),
        until=as_time_or_none(lease.expires_at),
        name=name,
        slurm_job=lease.slurm_job,
    )


def describe_wants(lease: LeaseRow) -> str:
    """For a person: `profile rtx5090`, `3 nodes × 1 GPU`, `1 to 3 nodes × 2 RTX 5090`, `8 GPUs anywhere`."""
    ask = lease.ask
    if lease.purpose is Purpose.NOTEBOOK:
        return f"profile {lease.profile}"
    gpu = " or ".join(ask.models) or "GPU"
    if ask.spread is not None:
        return ", ".join([f"{ask.spread} {_plural(gpu, ask.spread, ask.models)} anywhere", *_ways(lease)])
    least = f"{ask.least_nodes} to " if ask.least_nodes < ask.nodes else ""
    nodes = f"{least}{ask.nodes} node{'s' if ask.nodes > 1 else ''}"
    each = f"{ask.gpus_per_node} {_plural(gpu, ask.gpus_per_node, ask.models)}"
    return ", ".join([f"{nodes} × {each}", *_ways(lease)])


def _plural(gpu: str, count: int, models: Sequence[str]) -> str:
    return gpu if models or count == 1 else f"{gpu}s"


def _ways(lease: LeaseRow) -> list[str]:
    """What else is said of a request in the queue."""
    said = (
        ("exclusive", lease.ask.exclusive),
        ("scavenging", lease.ask.scavenge),
        ("batch", lease.ask.batch),
    )
    return [word for word, is_so in said if is_so]
