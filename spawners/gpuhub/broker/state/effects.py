"""Effects of changes: jobs follow their leases and notebooks, and the scheduler's decisions become rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuhub.broker.state import chains
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose
from gpuhub.domain import job_states, lease_states, suspension
from gpuhub.domain.models import JobRow, LeaseRow, ResourceRequest, new_id
from gpuhub.domain.scheduler_input import HOST_SUFFIX
from gpuhub.scheduler.interface import Grant, NodeAllocation, Preemption, SchedulingDecision

_OVER = lease_states.ENDING | {LeaseState.RELEASED}

#: Returns ids of a node's Docker daemon and boot; see `LeaseRow.identities`.
IdentityOf = Callable[[str], tuple[str | None, str | None]]
#: Returns the GPU memory of a lease that is moved if it is suspended for a request, MiB; None if it cannot be.
FindMovedMib = Callable[[LeaseRow, LeaseRow], int | None]


# -- effects ----------------------------------------------------------------------------------------------------------


def propagate(transaction: Transaction, step: int) -> int:
    """Apply the effects of all changes since a step, until nothing more changes; return the number of the next step."""
    while True:
        lease_ids, job_ids, step = transaction.changed_ids(step)
        if not lease_ids and not job_ids:
            return step
        job_ids_to_update = dict.fromkeys(job_ids)
        for lease_id in lease_ids:
            for tag in ("job of lease", "jobs of notebook"):
                job_ids_to_update.update(dict.fromkeys(sorted(transaction.index.find(tag, lease_id))))
        for job in [transaction.jobs[job_id] for job_id in job_ids]:
            if not job.is_open:
                chains.update_dependents(transaction, job)
            job_ids_to_update.update(dict.fromkeys(sorted(transaction.index.find("joining", job.owner, job.run_id))))
        for job_id in job_ids_to_update:
            if transaction.jobs[job_id].is_open:
                propagate_job(transaction, transaction.jobs[job_id])


def propagate_job(transaction: Transaction, job: JobRow) -> None:
    """Apply the effects on a job and on its lease.

    A job ends with its notebook, with the job that it joined, and with its lease; its lease ends with it. A preempted
    job is queued again as soon as nothing of it is left.
    """
    lease = transaction.leases[job.lease_id]
    job = chains.end_left_over(transaction, job)
    if job.notebook_lease is not None:
        notebook = transaction.leases.get(job.notebook_lease)
        if notebook is None or notebook.state in _OVER:
            job = job_states.stop(job, "the notebook that asked for it ended", transaction.now)
    if job.joins is not None and job_states.is_over(find_run(transaction, job.owner, job.joins)):
        job = job_states.stop(job, f"the run that it joined ended: {job.joins}", transaction.now)
    preemption = job_states.explain_preemption(job)
    if lease.state in _OVER and not (job.state is JobState.PREEMPTING and lease.reason == preemption):
        job = job_states.stop(job, lease.reason or "its lease ended", transaction.now)
    if lease.state in lease_states.LIVE and (idle_nodes := job_states.find_idle_nodes(job)):
        lease = transaction.put_lease(lease_states.shrink(lease, idle_nodes, transaction.now))
    if job.state is JobState.PREEMPTING and job_states.is_checkpoint_done(job, transaction.now):
        lease = transaction.put_lease(lease_states.release(lease, preemption, transaction.now))
    if job.state is JobState.STOPPING:
        lease = transaction.put_lease(lease_states.release(lease, job.reason or "stopped", transaction.now))
    if lease.state is LeaseState.RELEASED:
        job = _follow_release(transaction, job, lease)
    transaction.put_job(job)


def _follow_release(transaction: Transaction, job: JobRow, lease: LeaseRow) -> JobRow:
    """Queue a preempted or failed job again, of which nothing is left, let it sleep, or end it."""
    if job.state is JobState.PREEMPTING:
        # With its old age, so that the time already waited counts.
        lease_id = request_again(transaction, lease, created_at=lease.created_at)
        return job_states.requeue(job, lease_id, transaction.now)
    if job_states.can_retry(job):
        return job_states.retry(job, request_again(transaction, lease, created_at=transaction.now), transaction.now)
    if job_states.goes_to_sleep(job):
        lease_id = request_again(transaction, lease, created_at=transaction.now, is_held=True)
        return job_states.fall_asleep(job, lease_id, transaction.now)
    return job_states.end(job, transaction.now)


def request_again(transaction: Transaction, old: LeaseRow, *, created_at: float, **more: Any) -> str:
    """Add the same request under a new lease, with `more` of its fields; return its id."""
    lease_id = new_id("l")
    transaction.put_lease(
        LeaseRow(
            id=lease_id,
            seq=transaction.next_seq(),
            key=f"{old.purpose}:{lease_id}",
            owner=old.owner,
            groups=old.groups,
            purpose=old.purpose,
            subject=old.subject,
            profile=old.profile,
            resources=old.resources,
            created_at=created_at,
            since=transaction.now,
            time_limit_s=old.time_limit_s,
            **more,
        )
    )
    return lease_id


def find_run(transaction: Transaction, owner: str, run_id: str) -> JobRow | None:
    """Return the job of an owner's run; None if it has ended."""
    job_id = transaction.index.find_one("run", owner, run_id)
    return None if job_id is None else transaction.jobs[job_id]


def job_key(lease_id: str) -> str:
    """Return the idempotency key of a job's lease; it cannot be guessed, and clients identify jobs by run ids."""
    return f"job:{lease_id}"


# -- decisions --------------------------------------------------------------------------------------------------------


def apply_decision(
    transaction: Transaction,
    decision: SchedulingDecision,
    *,
    identity_of: IdentityOf,
    grace_s: float,
    find_moved_mib: FindMovedMib,
) -> None:
    """Apply the scheduler's decision to the rows. `grace_s` is the time for a checkpoint, seconds."""
    for lease_id, grant in decision.grants.items():
        _grant(transaction, transaction.leases[lease_id], grant, identity_of)
    for preemption in decision.preemptions:
        _preempt(transaction, preemption, grace_s, find_moved_mib)


def _grant(transaction: Transaction, lease: LeaseRow, grant: Grant, identity_of: IdentityOf) -> None:
    if suspension.is_without_gpu(lease):
        transaction.put_lease(suspension.regrant(lease, transaction.now))
        return
    lease = transaction.put_lease(
        lease_states.grant(
            lease,
            grant.node_allocations,
            transaction.now,
            note=grant.note,
            parts=_choose_parts(transaction, lease.resources, grant.node_allocations),
            identities={
                node_allocation.node: identity_of(node_allocation.node) for node_allocation in grant.node_allocations
            },
        )
    )
    job_id = transaction.index.find_one("job of lease", lease.id)
    if lease.purpose is Purpose.JOB and job_id is not None:
        # The intent is stored before the first worker is created, so that its containers are known after a crash.
        lease = transaction.put_lease(lease_states.activate(lease, None, transaction.now))
        transaction.put_job(job_states.start(transaction.jobs[job_id], lease, transaction.now))


def _choose_parts(
    transaction: Transaction, resources: ResourceRequest, node_allocations: Sequence[NodeAllocation]
) -> dict[str, int]:
    if resources.share == 1:
        return {}
    return {
        slot.uuid: transaction.index.find_free_part(slot.uuid)
        for node_allocation in node_allocations
        for slot in node_allocation.slots
    }


def _preempt(transaction: Transaction, preemption: Preemption, grace_s: float, find_moved_mib: FindMovedMib) -> None:
    lease_id = preemption.allocation_id.removesuffix(HOST_SUFFIX)
    job_id = transaction.index.find_one("job of lease", lease_id)
    if job_id is None:
        return
    job, lease = transaction.jobs[job_id], transaction.leases[lease_id]
    if job.state not in job_states.UNDER_WAY or lease.state not in lease_states.LIVE:
        return
    if lease.suspension is not None and not suspension.is_without_gpu(lease):
        # Its memory is being moved: the scheduler knows that it cannot be preempted now.
        return
    if preemption.is_whole:
        if suspension.can_suspend_job(lease, job):
            moved_mib = find_moved_mib(lease, transaction.leases[preemption.for_request])
            if moved_mib is not None:
                transaction.put_lease(suspension.begin_job(lease, moved_mib, transaction.now))
                return
        transaction.put_job(job_states.preempt(job, transaction.now + grace_s, transaction.now))
        return
    transaction.put_lease(lease_states.shrink(lease, preemption.nodes, transaction.now))
    transaction.put_job(job_states.shrink(job, preemption.nodes, transaction.now))
