"""Jobs that wait for other jobs of their owner: after a run or an array, and for their turn in an array with a limit;
and those of a job group that end with the others.

Such a job has a held request, which the scheduler does not know. It is released, or the job ends, in the transaction
in which the last job that it waits for ends, so that a restart of the broker changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import JobState, LeaseState
from gpuhub.domain import job_states, lease_states
from gpuhub.domain.models import JobRow

#: Why an auxiliary job of a job group ends.
_PRIMARY_ENDED = "the tasks of its job group that it served have ended"


def update_dependents(transaction: Transaction, ended: JobRow) -> None:
    """Release or stop the jobs that wait for a job that has ended, and let the next job of its array wait for GPUs."""
    for run in dict.fromkeys(run for run in (ended.run_id, ended.array) if run is not None):
        for job in _sort_jobs(transaction, transaction.index.find("after", ended.owner, run)):
            _update_dependent(transaction, job, ended, run)
    if ended.array is not None:
        fill_array(transaction, ended.owner, ended.array)
        end_auxiliary(transaction, ended.owner, ended.array)


def fill_array(transaction: Transaction, owner: str, array: str) -> None:
    """Release as many held jobs of an array as its limit permits, in the order of their requests; not those asleep."""
    jobs = _sort_jobs(transaction, transaction.index.find("array", owner, array))
    held = [job for job in jobs if transaction.leases[job.lease_id].is_held]
    ready = [
        job for job in held if job.after is None and not job_states.is_asleep(job, transaction.leases[job.lease_id])
    ]
    if not ready:
        return
    limit = ready[0].array_limit
    count = len(ready) if limit is None else max(0, limit - (len(jobs) - len(held)))
    for job in ready[:count]:
        transaction.put_lease(transaction.leases[job.lease_id].evolve(is_held=False))


def end_auxiliary(transaction: Transaction, owner: str, group: str) -> None:
    """End the auxiliary jobs of a job group when all others have ended: those that run, after their delay."""
    if not _is_auxiliary_alone(transaction, owner, group):
        return
    for job in _sort_jobs(transaction, transaction.index.find("array", owner, group)):
        lease = transaction.leases[job.lease_id]
        delay_s = lease.resources.auxiliary_s
        if lease.state is LeaseState.REQUESTED or not delay_s:
            transaction.put_job(job_states.cancel(job, _PRIMARY_ENDED, transaction.now))
        else:
            transaction.put_lease(lease_states.shorten(lease, transaction.now + delay_s, _PRIMARY_ENDED))


def _is_auxiliary_alone(transaction: Transaction, owner: str, group: str) -> bool:
    """Return whether all jobs of a job group that have not ended are auxiliary."""
    jobs = [transaction.jobs[job_id] for job_id in transaction.index.find("array", owner, group)]
    return all(transaction.leases[job.lease_id].resources.auxiliary_s is not None for job in jobs)


def end_left_over(transaction: Transaction, job: JobRow) -> JobRow:
    """End an auxiliary job that waits again, or sleeps, when all others of its job group have ended."""
    is_auxiliary = transaction.leases[job.lease_id].resources.auxiliary_s is not None
    if not is_auxiliary or job.array is None or job.state is not JobState.WAITING:
        return job
    if not _is_auxiliary_alone(transaction, job.owner, job.array):
        return job
    return job_states.cancel(job, _PRIMARY_ENDED, transaction.now)


def _sort_jobs(transaction: Transaction, job_ids: Iterable[str]) -> list[JobRow]:
    """Return jobs in the order of their requests."""
    jobs = [transaction.jobs[job_id] for job_id in job_ids]
    return sorted(jobs, key=lambda job: transaction.leases[job.lease_id].seq)


def _update_dependent(transaction: Transaction, job: JobRow, ended: JobRow, run: str) -> None:
    if not job_states.has_succeeded(ended):
        reason = f"{ended.run_id}, after which it should start, did not succeed: {ended.reason or 'no reason is known'}"
        transaction.put_job(job_states.stop(job, reason, transaction.now))
    elif not transaction.index.find("array", job.owner, run):
        release_after(transaction, job)


def release_after(transaction: Transaction, job: JobRow) -> None:
    """Let a job wait for GPUs from this moment on: the run that it waited for has succeeded."""
    job = transaction.put_job(job.evolve(after=None))
    lease = transaction.leases[job.lease_id].evolve(created_at=transaction.now)
    transaction.put_lease(lease if job.array is not None else lease.evolve(is_held=False))
    if job.array is not None:
        fill_array(transaction, job.owner, job.array)
