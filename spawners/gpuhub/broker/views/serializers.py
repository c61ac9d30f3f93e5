"""Conversion of the broker's rows to wire models, and texts about requests for users."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Protocol

from gpuhub.broker_api.schemas import (
    ConstraintView,
    ContainerSizeView,
    CostView,
    HolderView,
    IdleView,
    JobView,
    LeasedGpuView,
    LeaseView,
    OutputShareView,
    PendingReasonView,
    PowerView,
    Purpose,
    QueueEntry,
    SuspensionView,
    UsageView,
    WorkerView,
)
from gpuhub.broker_api.schemas.limits import UserLimitsView
from gpuhub.broker_api.schemas.live import JobSummaryView
from gpuhub.domain.costs import CostRecord, describe_costs
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow, OutputShareRow
from gpuhub.domain.owner_limits import OwnLimits
from gpuhub.nodes.power_status import PowerStatus
from gpuhub.scheduler import interface

#: The hub's pages of a shared job and of a shared notebook, below the hub's address, which `web` serves.
SHARED_PAGE, SHARED_NOTEBOOK_PAGE = "/hub/gpuhub/shared", "/hub/gpuhub/shared-notebook"


class QueuePlace(Protocol):
    """The place of a waiting request in the queue; the scheduler's `PendingReason` is one."""

    @property
    def position(self) -> int:
        """Position in the queue, from 1."""
        ...

    @property
    def text(self) -> str:
        """Text of one line for the user that explains why the request waits."""
        ...

    @property
    def expected_start(self) -> float | None:
        """Expected time of the grant, seconds since 1970; None if unknown."""
        ...


def to_datetime(seconds: float) -> datetime:
    """Return seconds since 1970 as a UTC time."""
    return datetime.fromtimestamp(seconds, UTC)


def to_optional_datetime(seconds: float | None) -> datetime | None:
    """Return seconds since 1970 as a UTC time, and None for None."""
    return None if seconds is None else to_datetime(seconds)


def build_power(power: PowerStatus) -> PowerView:
    """Return the wire model of a node's power."""
    return PowerView(
        state=power.state.value,
        since=to_datetime(power.changed_at),
        usual_wake_s=power.usual_wake_s,
        retry_at=to_optional_datetime(power.retry_at),
        error=power.error,
    )


def build_gpu(gpu: LeasedGpu) -> LeasedGpuView:
    """Return the wire model of a leased GPU or GPU share."""
    return LeasedGpuView(
        uuid=gpu.uuid,
        node=gpu.node,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        share=gpu.share,
        memory_cap_mib=None if gpu.share == 1 else gpu.memory_mib // gpu.share,
    )


def build_lease(
    lease: LeaseRow,
    version: int,
    place: QueuePlace | None,
    *,
    idle: IdleView | None = None,
    gpu_problems: tuple[str, ...] = (),
    suspension: SuspensionView | None = None,
    may_suspend: bool = False,
) -> LeaseView:
    """Return a lease, as shown to its owner; `place` is its place in the queue, if it waits."""
    return LeaseView(
        id=lease.id,
        owner=lease.owner,
        purpose=lease.purpose,
        subject=lease.subject,
        profile=lease.profile,
        state=lease.state,
        version=version,
        position=None if place is None else place.position,
        waiting_for=None if place is None else place.text,
        expected_start=None if place is None else to_optional_datetime(place.expected_start),
        note=lease.note,
        priority=lease.resources.priority,
        nodes=lease.nodes,
        gpus=tuple(build_gpu(gpu) for gpu in lease.gpus),
        sizes=tuple(
            ContainerSizeView(node=node, cpus=size.cpu_milli / 1000, memory_mib=size.memory_mib)
            for node, size in lease.sizes.items()
        ),
        slurm_job=lease.slurm_job,
        epoch=lease.epoch,
        created_at=to_datetime(lease.created_at),
        granted_at=to_optional_datetime(lease.granted_at),
        expires_at=to_optional_datetime(lease.expires_at),
        reason=lease.reason,
        persistent=lease.is_persistent,
        idle=idle,
        gpu_problems=gpu_problems,
        suspension=suspension,
        may_suspend=may_suspend,
    )


def build_costs(record: CostRecord) -> CostView:
    """Return what a job or a notebook used."""
    used = record.used
    return CostView(
        id=record.id,
        owner=record.owner,
        purpose=record.purpose,
        name=record.name,
        model=record.model,
        gpu_count=record.gpu_count,
        started_at=to_datetime(record.started_at),
        ended_at=to_optional_datetime(record.ended_at),
        gpu_hours=round(used.gpu_hours, 4),
        busy_percent=None if used.busy_percent is None else round(used.busy_percent, 1),
        peak_memory_mib=used.peak_memory_mib or None,
        memory_mib=record.memory_mib,
        energy_kwh=None if used.energy_kwh is None else round(used.energy_kwh, 6),
        is_energy_estimated=used.estimated_j > 0,
        cost=round(used.amount, 4) if record.currency else None,
        currency=record.currency,
        smaller_gpu=record.advice,
        text=describe_costs(record),
    )


def build_job(
    job: JobRow,
    lease: LeaseRow,
    version: int,
    place: QueuePlace | None,
    renew_within_s: float,
    *,
    gpu_problems: tuple[str, ...] = (),
    costs: CostRecord | None = None,
    suspension: SuspensionView | None = None,
    unreachable: Collection[str] = (),
) -> JobView:
    """Return a job, as shown to its owner; `version` covers the job and its lease."""
    lease_view = build_lease(lease, version, place, gpu_problems=gpu_problems, suspension=suspension)
    if lease.is_held:
        lease_view = lease_view.model_copy(update={"waiting_for": describe_hold(job)})
    return JobView(
        id=job.id,
        run_id=job.run_id,
        owner=job.owner,
        state=job.state,
        version=version,
        lease=lease_view,
        workers=tuple(
            WorkerView(
                index=worker.index,
                node=worker.node,
                gpus=tuple(build_gpu(gpu) for gpu in lease.gpus if gpu.worker == worker.index),
                state=worker.state,
                exit_code=worker.exit_code,
                message=worker.message,
                is_reachable=worker.node not in unreachable,
            )
            for worker in job.workers
        ),
        nnodes=job.nnodes,
        nproc_per_node=job.nproc_per_node,
        reason=job.reason,
        renew_within_s=renew_within_s,
        min_nnodes=job.min_nnodes,
        gpus=job.gpus,
        scavenge=lease.resources.scavenge,
        preemptions=job.preemptions,
        checkpoint_until=to_optional_datetime(job.checkpoint_until),
        array=job.array,
        array_limit=job.array_limit,
        after=job.after,
        max_retries=job.max_retries,
        retries=job.retries,
        sleeps=job.sleeps,
        times_asleep=job.times_asleep,
        detached=job.detached,
        name=job.name,
        port=job.port,
        port_users=job.port_users,
        joins=job.joins,
        created_at=to_datetime(job.created_at),
        started_at=to_optional_datetime(job.started_at),
        ended_at=to_optional_datetime(job.ended_at),
        exit_code=job.exit_code,
        costs=None if costs is None else build_costs(costs),
    )


def build_job_summary(job: JobRow, lease: LeaseRow, place: QueuePlace | None) -> JobSummaryView:
    """Return a job for a list; `place` is its place in the queue, if it waits."""
    waiting_for = describe_hold(job) if lease.is_held else None if place is None else place.text
    return JobSummaryView(
        id=job.id,
        run_id=job.run_id,
        name=job.name,
        state=job.state,
        lease=lease.id,
        nodes=lease.nodes,
        gpu_count=len(lease.gpus),
        wants=describe_request(lease),
        detached=job.detached,
        position=None if place is None else place.position,
        waiting_for=waiting_for,
        created_at=to_datetime(job.created_at),
        started_at=to_optional_datetime(job.started_at),
        ended_at=to_optional_datetime(job.ended_at),
        reason=job.reason,
        exit_code=job.exit_code,
    )


def build_output_share(row: OutputShareRow, caller: str) -> OutputShareView:
    """Return an output share, as its owner or its viewer sees it."""
    return OutputShareView(
        id=row.subject,
        job="" if row.path else row.subject,
        notebook=row.path if caller == row.owner else "",
        run_id=row.run_id,
        name=row.name,
        owner=row.owner,
        viewer=row.viewer,
        created_at=to_datetime(row.created_at),
        expires_at=to_datetime(row.expires_at),
        path=f"{SHARED_NOTEBOOK_PAGE if row.path else SHARED_PAGE}/{row.subject}",
    )


def describe_hold(job: JobRow) -> str:
    """Return what a job waits for before it waits for GPUs."""
    if job.after is not None:
        return f"the end of {job.after}"
    if job.array_limit is None:
        return "a request to its port: it is asleep"
    return f"its turn: {job.array_limit} of its array's tasks run at the same time"


def build_why(
    lease: LeaseRow, why: interface.PendingReason, constraints: Iterable[interface.Constraint]
) -> PendingReasonView:
    """Return all reasons why a request waits."""
    return PendingReasonView(
        lease=lease.id,
        position=why.position,
        waits_for=why.text,
        expected_start=to_optional_datetime(why.expected_start),
        obstacles=tuple(
            ConstraintView(
                demand=constraint.requirement, would_start_at=to_optional_datetime(constraint.would_start_at)
            )
            for constraint in constraints
        ),
    )


def build_queue_entry(lease: LeaseRow, position: int, expected_start: float | None, name: str = "") -> QueueEntry:
    """Return a waiting request, as shown to all users; `name` is that of its job, if any."""
    return QueueEntry(
        lease=lease.id,
        position=position,
        owner=lease.owner,
        purpose=lease.purpose,
        wants=": ".join(text for text in (name, describe_request(lease)) if text),
        since=to_datetime(lease.created_at),
        expected_start=to_optional_datetime(expected_start),
    )


def build_usage(
    owner: str,
    usage: interface.OwnerUsage,
    waiting: int,
    limits: interface.QuotaLimits,
    own: OwnLimits | None,
) -> UsageView:
    """Return usage and limits of one owner, with those among them that were set for this owner alone."""
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
        max_jobs=limits.max_jobs,
        longest_lease_s=limits.longest_lease_s,
        own_limits=None if own is None else build_user_limits(own),
    )


def build_user_limits(limits: OwnLimits) -> UserLimitsView:
    """Return the limits that were set for one user."""
    return UserLimitsView(**asdict(limits) | {"at": to_datetime(limits.at)})


def build_holder(lease: LeaseRow, name: str = "", idle_since: float | None = None) -> HolderView:
    """Return the holder of a lease's GPUs; `name` is that of its job, if any."""
    return HolderView(
        owner=lease.owner,
        purpose=lease.purpose,
        since=to_datetime(lease.granted_at or lease.created_at),
        until=to_optional_datetime(lease.expires_at),
        name=name,
        slurm_job=lease.slurm_job,
        idle_since=to_optional_datetime(idle_since),
    )


def describe_request(lease: LeaseRow) -> str:
    """Return a text for users, such as `profile rtx5090`, `1 to 3 nodes × 2 RTX 5090` or `8 GPUs anywhere`."""
    ask = lease.resources
    if lease.purpose is Purpose.NOTEBOOK:
        return f"profile {lease.profile}"
    gpu = " or ".join(ask.models) or "GPU"
    if ask.spread is not None:
        return ", ".join([f"{ask.spread} {_plural(gpu, ask.spread, ask.models)} anywhere", *_list_flags(lease)])
    least = f"{ask.least_nodes} to " if ask.least_nodes < ask.nodes else ""
    nodes = f"{least}{ask.nodes} node{'s' if ask.nodes > 1 else ''}"
    each = f"{ask.gpus_per_node} {_plural(gpu, ask.gpus_per_node, ask.models)}"
    return ", ".join([f"{nodes} × {each}", *_list_flags(lease)])


def _plural(gpu: str, count: int, models: Sequence[str]) -> str:
    return gpu if models or count == 1 else f"{gpu}s"


def _list_flags(lease: LeaseRow) -> list[str]:
    """Return further properties of a request, for its text in the queue."""
    flags = (
        ("exclusive", lease.resources.exclusive),
        ("scavenging", lease.resources.scavenge),
        ("batch", lease.resources.batch),
    )
    return [name for name, is_set in flags if is_set]
