"""Suspended notebooks and jobs: their transitions, which notebook is suspended for whom, and what their owners read.

```
(none) ──begin──▶ suspending ──prove──▶ suspended ──request_resume──▶ resuming ──regrant──▶ restoring ──finish──▶ (none)
                      │  └──────────prove, if it is wanted──────────────▲
                      └──abandon──▶ (none)
```

A scavenging job begins with `begin_job`, and is wanted from the beginning.

The lease stays active meanwhile. Its GPU is free on proof alone: the node has shown that it is empty and that no
program of the notebook can start on it (`prove`). It continues with the same GPU alone: its programs see no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose, SuspensionState
from gpuhub.common.errors import Conflict
from gpuhub.common.units import format_span
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow, Suspension

#: States in which others may have the GPU.
WITHOUT_GPU = frozenset({SuspensionState.SUSPENDED, SuspensionState.RESUMING})


def explain_unsuitable(lease: LeaseRow) -> str | None:
    """Return why a lease cannot be suspended, for its owner; None if it can."""
    if lease.purpose is not Purpose.NOTEBOOK:
        return "only notebooks can be suspended"
    if lease.state is not LeaseState.ACTIVE or lease.container_id is None:
        return f"it is {lease.state}: only a notebook that runs can be suspended"
    return _explain_unsuitable_gpus(lease)


def _explain_unsuitable_gpus(lease: LeaseRow) -> str | None:
    if lease.slurm_job is not None:
        return "Slurm holds its GPU until its job ends"
    if len(lease.gpus) != 1 or lease.gpus[0].share != 1:
        return "only a notebook or job with one whole GPU can be suspended"
    if lease.gpus[0].uuid.startswith("MIG-"):
        return "a MIG device cannot be suspended"
    return None


def can_suspend_job(lease: LeaseRow, job: JobRow) -> bool:
    """Return whether a job can be suspended for others: a scavenging one of one process, which no notebook follows."""
    is_single = job.nnodes == job.nproc_per_node == len(job.workers) == 1 and lease.resources.spread is None
    return (
        is_single
        and job.detached
        and job.state is JobState.RUNNING
        and lease.state is LeaseState.ACTIVE
        and lease.suspension is None
        and lease.resources.scavenge
        and not lease.resources.guests
        and _explain_unsuitable_gpus(lease) is None
    )


def find_state(lease: LeaseRow) -> SuspensionState | None:
    """Return the state of a lease's suspension; None while it has its GPUs as usual."""
    return None if lease.suspension is None else lease.suspension.state


def is_without_gpu(lease: LeaseRow) -> bool:
    """Return whether a notebook or job runs and others may have its GPU."""
    return find_state(lease) in WITHOUT_GPU


def is_time_stopped(lease: LeaseRow) -> bool:
    """Return whether the time limit of a lease does not continue: that of a suspended job."""
    return lease.purpose is Purpose.JOB and is_without_gpu(lease)


def set_time_left(lease: LeaseRow, seconds: float) -> LeaseRow:
    """Set the time that a suspended job has from the moment at which it continues."""
    if lease.suspension is None:
        return lease
    return lease.evolve(suspension=replace(lease.suspension, left_s=float(seconds)))


def list_bound_gpus(lease: LeaseRow) -> tuple[LeasedGpu, ...]:
    """Return the GPUs with whose containers a lease continues: those that it holds, or the one that it waits for."""
    return lease.gpus if is_without_gpu(lease) else lease.held


def begin(lease: LeaseRow, memory_mib: int, now: float) -> LeaseRow:
    """Begin to suspend a notebook; repeated calls change nothing.

    Args:
        lease: Its lease.
        memory_mib: The memory that it uses on its GPU.
        now: Seconds since 1970.

    Raises:
        Conflict: It cannot be suspended.
    """
    if lease.suspension is not None:
        return lease
    reason = explain_unsuitable(lease)
    if reason is not None:
        raise Conflict(f"lease {lease.id} cannot be suspended: {reason}")
    state = SuspensionState.SUSPENDING
    return lease.evolve(suspension=Suspension(state=state, since=now, moved_mib=memory_mib, begun_at=now))


def begin_job(lease: LeaseRow, memory_mib: int, now: float) -> LeaseRow:
    """Begin to suspend a job for others. It continues as soon as the scheduler gives it its GPU again."""
    state = SuspensionState.SUSPENDING
    begun = Suspension(state=state, since=now, moved_mib=memory_mib, begun_at=now, is_wanted=True)
    return lease.evolve(suspension=begun)


def abandon(lease: LeaseRow) -> LeaseRow:
    """End an attempt to suspend a notebook or job, which has its GPU as before."""
    _require(lease, SuspensionState.SUSPENDING)
    return lease.evolve(suspension=None)


def prove(lease: LeaseRow, moved_mib: int, now: float) -> LeaseRow:
    """Free the GPU, which its node has shown to be empty; a notebook that is wanted and a job wait for it at once."""
    _require(lease, SuspensionState.SUSPENDING)
    gpus = tuple(replace(gpu, released_at=now) for gpu in lease.gpus)
    is_wanted = lease.suspension is not None and lease.suspension.is_wanted
    state = SuspensionState.RESUMING if is_wanted else SuspensionState.SUSPENDED
    freed = _enter(lease, state, now, moved_mib).evolve(gpus=gpus)
    if lease.purpose is Purpose.NOTEBOOK or lease.expires_at is None or freed.suspension is None:
        return freed
    left_s = max(1.0, lease.expires_at - now)
    return freed.evolve(expires_at=None, suspension=replace(freed.suspension, left_s=left_s))


def request_resume(lease: LeaseRow, now: float) -> LeaseRow:
    """Let a suspended notebook wait for its GPU, also one that is being suspended; others do not change."""
    if lease.state is not LeaseState.ACTIVE or lease.suspension is None:
        return lease
    if lease.suspension.state is SuspensionState.SUSPENDING and not lease.suspension.is_wanted:
        return lease.evolve(suspension=replace(lease.suspension, is_wanted=True))
    if lease.suspension.state is not SuspensionState.SUSPENDED:
        return lease
    return _enter(lease, SuspensionState.RESUMING, now)


def regrant(lease: LeaseRow, now: float) -> LeaseRow:
    """Grant a waiting notebook or job its GPU again. Its epoch and what proves its end stay as they are.

    So does a notebook's time limit; that of a job did not continue.
    """
    _require(lease, SuspensionState.RESUMING)
    gpus = tuple(replace(gpu, released_at=None) for gpu in lease.gpus)
    granted = _enter(lease, SuspensionState.RESTORING, now).evolve(gpus=gpus, held_from=now)
    left_s = None if lease.suspension is None else lease.suspension.left_s
    if left_s is None:
        return granted
    # It may have been shortened meanwhile.
    return granted.evolve(expires_at=min(now + left_s, lease.expires_at or now + left_s))


def finish(lease: LeaseRow) -> LeaseRow:
    """Note that the memory of a notebook or job is back on its GPU."""
    _require(lease, SuspensionState.RESTORING)
    return lease.evolve(suspension=None)


def shift_times(lease: LeaseRow, seconds: float) -> LeaseRow:
    """Move the times of a suspension by a jump of the machine's clock."""
    held_from = None if lease.held_from is None else lease.held_from + seconds
    if lease.suspension is None:
        return lease.evolve(held_from=held_from)
    before = lease.suspension
    moved = replace(before, since=before.since + seconds, begun_at=before.begun_at + seconds)
    return lease.evolve(held_from=held_from, suspension=moved)


def _require(lease: LeaseRow, state: SuspensionState) -> None:
    found = find_state(lease)
    if lease.state is not LeaseState.ACTIVE or found is not state:
        raise Conflict(f"lease {lease.id} is {lease.state} and {found or 'not suspended'}, not {state}")


def _enter(lease: LeaseRow, state: SuspensionState, now: float, moved_mib: int | None = None) -> LeaseRow:
    before = lease.suspension or Suspension(state=state, since=now)
    moved_mib = before.moved_mib if moved_mib is None else moved_mib
    return lease.evolve(suspension=replace(before, state=state, since=now, moved_mib=moved_mib))


# -- choice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingDemand:
    """A waiting request, as far as idle notebooks could help it."""

    #: Whole GPUs that it needs at least, on all nodes together.
    gpus: int
    #: UUIDs of the GPUs that it could use, free or not.
    candidates: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleHolder:
    """A notebook that may be suspended for others."""

    lease: str
    uuid: str
    #: Seconds since it was last active.
    idle_s: float


def choose(demands: Iterable[WaitingDemand], holders: Sequence[IdleHolder], free: Collection[str]) -> list[str]:
    """Return the leases to suspend, so that as many of the first requests as possible start.

    A request that would still wait then suspends nothing, and one GPU serves one request.

    Args:
        demands: The waiting requests, in their order.
        holders: The notebooks that may be suspended.
        free: UUIDs of the GPUs that are free, or will be soon.
    """
    unused, left, chosen = set(free), sorted(holders, key=lambda holder: -holder.idle_s), []
    for demand in demands:
        usable = sorted(unused & demand.candidates)[: demand.gpus]
        suitable = [holder for holder in left if holder.uuid in demand.candidates][: demand.gpus - len(usable)]
        if len(usable) + len(suitable) < demand.gpus:
            continue
        unused -= set(usable)
        left = [holder for holder in left if holder not in suitable]
        chosen += [holder.lease for holder in suitable]
    return chosen


# -- texts ------------------------------------------------------------------------------------------------------------


def describe(lease: LeaseRow, suspension: Suspension, now: float, position: int | None = None) -> str:
    """Return the state of a suspension for people; `position` is its place in the queue, if it waits."""
    gpu, memory = _describe_gpu(lease.gpus[0]), f"{suspension.moved_mib / 1024:.1f} GiB"
    match suspension.state:
        case SuspensionState.SUSPENDING:
            return f"its GPU memory is being moved into host memory ({memory})"
        case SuspensionState.SUSPENDED:
            age_s = now - suspension.since
            span = "less than a minute" if age_s < 60 else format_span(age_s // 60 * 60)
            return (
                f"suspended for {span}: {memory} of GPU memory are kept in host memory; a cell that runs brings it back"
            )
        case SuspensionState.RESUMING:
            place = "" if position is None else f": number {position} in the queue"
            return f"waits for {gpu}, which others use{place}"
        case SuspensionState.RESTORING:
            return f"its memory is being moved back to {gpu} ({memory})"


def _describe_gpu(gpu: LeasedGpu) -> str:
    return f"the {gpu.model} on {gpu.node}"
