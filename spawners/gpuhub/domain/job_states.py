"""The states of a job; only these functions change them.

waiting ──start──▶ starting ──record_worker_start (all)──▶ running ──stop──▶ stopping ──end──▶ ended
   ▲                   └───────────preempt──────────▶ preempting ◀──preempt──┘   │
   ├──requeue_unstarted (from starting)                 │                        │
   ├──────────────────────requeue───────────────────────┘                        │
   └──────────────────────retry, fall_asleep─────────────────────────────────────┘
A job can be stopped in every state before `stopping`; a waiting job ends at once. A preempted job waits
again, under a new lease, when everything of the old one is gone; so does a failed one that may be tried again. A job
of which no container was started, because its node does not answer, waits again at once. A job that sleeps has a held
request meanwhile, until a request to its port.
"""

from __future__ import annotations

from collections.abc import Collection

from gpuhub.broker_api.schemas import JobState, WorkerState
from gpuhub.domain.models import JobRow, LeaseRow, WorkerRow

#: Why most jobs are preempted.
PREEMPTED = "preempted: others needed its GPUs"
#: States of a job whose workers run or are being started.
UNDER_WAY = frozenset({JobState.STARTING, JobState.RUNNING})


def start(job: JobRow, lease: LeaseRow, now: float) -> JobRow:
    """Start a job whose gang is granted, with one pending worker on each node."""
    workers = tuple(WorkerRow(index=index, node=node) for index, node in enumerate(lease.nodes))
    return job.evolve(state=JobState.STARTING, since=now, workers=workers, reason=None)


def record_worker_start(job: JobRow, index: int, container_id: str, now: float) -> JobRow:
    """Record that a worker's container runs; when all workers have started, the job runs."""
    job = _update_worker(job, index, state=WorkerState.RUNNING, container_id=container_id)
    if job.state is JobState.STARTING and all(w.state is not WorkerState.PENDING for w in job.workers):
        return _enter_running(job, now)
    return job


def record_worker_exit(job: JobRow, index: int, exit_code: int | None, message: str, now: float) -> JobRow:
    """Record that a worker ended or could not start (`exit_code` None); after the last worker the job stops.

    A job whose gang never was complete stops with the first such worker, since torchrun could not run. Workers of a job
    that is being preempted should end, with any exit code, and the worker of a released node is ignored. A detached job
    ends with worker 0, which leads the others.
    """
    job = _update_worker(job, index, state=WorkerState.EXITED, exit_code=exit_code, message=message)
    ended = next((worker for worker in job.workers if worker.index == index), None)
    if ended is None or job.state is JobState.PREEMPTING:
        return job
    if job.detached and index == 0:
        return _stop_after_leader(job, ended, now)
    if job.state is JobState.STARTING:
        return stop(job, _describe(ended), now)
    if all(worker.state is WorkerState.EXITED for worker in job.workers):
        failed = next((w for w in job.workers if w.exit_code != 0), None)
        return stop(job, "all workers ended" if failed is None else _describe(failed), now)
    return job


def record_leader_exit(job: JobRow, now: float, *, exit_code: int) -> JobRow:
    """Record that worker 0 of a detached job has ended, and end the job, even if the broker never saw it run."""
    message = f"ended with exit code {exit_code}"
    if job.workers:
        return record_worker_exit(job, 0, exit_code, message, now)
    reason = "done" if exit_code == 0 else f"worker 0: {message}"
    return stop(job, reason, now).evolve(exit_code=exit_code, has_failed=exit_code != 0)


def shrink(job: JobRow, nodes: Collection[str], now: float) -> JobRow:
    """Continue an elastic job without its workers on these nodes; the other workers keep their numbers."""
    if job.state not in UNDER_WAY:
        return job
    job = job.evolve(workers=tuple(worker for worker in job.workers if worker.node not in nodes))
    if job.state is JobState.STARTING and all(w.state is WorkerState.RUNNING for w in job.workers):
        return _enter_running(job, now)
    return job


def find_idle_nodes(job: JobRow) -> frozenset[str]:
    """Return the nodes of an elastic job whose worker has ended while enough others run: their GPUs can be released."""
    remaining = [worker for worker in job.workers if worker.state is not WorkerState.EXITED]
    if job.state is not JobState.RUNNING or job.min_nnodes >= job.nnodes or len(remaining) < job.min_nnodes:
        return frozenset()
    return frozenset(worker.node for worker in job.workers if worker.state is WorkerState.EXITED)


def preempt(job: JobRow, until: float, now: float, *, reason: str | None = None) -> JobRow:
    """Preempt a job under way, because others need its GPUs or for another reason; its workers may write a checkpoint
    until `until`.
    """
    if job.state not in UNDER_WAY:
        return job
    return job.evolve(state=JobState.PREEMPTING, since=now, checkpoint_until=until, reason=reason)


def explain_preemption(job: JobRow) -> str:
    """Return the reason of a preempted job's lease; any other reason ends the job as well."""
    return job.reason or PREEMPTED


def is_checkpoint_done(job: JobRow, now: float) -> bool:
    """Return whether the checkpoint time of a preempted job is over, or all of its workers have ended."""
    is_over = job.checkpoint_until is not None and job.checkpoint_until <= now
    return is_over or all(worker.state is WorkerState.EXITED for worker in job.workers)


def is_over(job: JobRow | None) -> bool:
    """Return whether a job that others joined is over; None stands for a job that has ended."""
    return job is None or job.state in {JobState.STOPPING, JobState.ENDED}


def requeue(job: JobRow, lease_id: str, now: float) -> JobRow:
    """Let a preempted job of which nothing is left wait again, under a new lease."""
    return _wait_again(job, lease_id, now).evolve(checkpoint_until=None, reason=None, preemptions=job.preemptions + 1)


def requeue_unstarted(job: JobRow, lease_id: str, reason: str, now: float) -> JobRow:
    """Let a job of which no container was started wait again, under a new lease; the reason is kept until it starts."""
    return _wait_again(job, lease_id, now).evolve(reason=reason)


def can_retry(job: JobRow) -> bool:
    """Return whether a job of which nothing is left starts again because it failed."""
    return job.state is JobState.STOPPING and job.has_failed and job.retries < job.max_retries


def retry(job: JobRow, lease_id: str, now: float) -> JobRow:
    """Let a failed job wait again, under a new lease."""
    return _wait_again(job, lease_id, now).evolve(
        exit_code=None, reason=None, has_failed=False, retries=job.retries + 1
    )


def goes_to_sleep(job: JobRow) -> bool:
    """Return whether a job of which nothing is left sleeps, because it ended by itself and well."""
    return job.state is JobState.STOPPING and job.sleeps and job.exit_code == 0


def fall_asleep(job: JobRow, lease_id: str, now: float) -> JobRow:
    """Let a job that has ended well wait for a request to its port, with a held request under a new lease."""
    return _wait_again(job, lease_id, now).evolve(exit_code=None, reason=None, times_asleep=job.times_asleep + 1)


def is_asleep(job: JobRow, lease: LeaseRow) -> bool:
    """Return whether a job waits for a request to its port."""
    return job.times_asleep > 0 and job.state is JobState.WAITING and lease.is_held


def has_succeeded(job: JobRow) -> bool:
    """Return whether an ended job ended well by itself, as only detached jobs show."""
    return job.exit_code == 0


def cancel(job: JobRow, reason: str, now: float) -> JobRow:
    """Stop a job for good: one that is ending does not start again."""
    return stop(job, reason, now).evolve(has_failed=False, sleeps=False)


def fail(job: JobRow, reason: str, now: float) -> JobRow:
    """Stop a job under way that failed, so that it may be tried again."""
    return stop(job, reason, now).evolve(has_failed=True) if job.state in UNDER_WAY else job


def stop(job: JobRow, reason: str, now: float) -> JobRow:
    """Stop a job, so that its workers are removed; the first reason is kept."""
    if job.state in {JobState.STOPPING, JobState.ENDED}:
        return job
    return job.evolve(state=JobState.STOPPING, since=now, reason=reason, checkpoint_until=None)


def end(job: JobRow, now: float) -> JobRow:
    """End a job of which nothing is left."""
    workers = tuple(
        worker if worker.state is WorkerState.EXITED else worker.evolve(state=WorkerState.EXITED, message="stopped")
        for worker in job.workers
    )
    return job.evolve(state=JobState.ENDED, since=now, ended_at=now, workers=workers)


def shift_times(job: JobRow, seconds: float) -> JobRow:
    """Move all times of a job by a jump of the machine's clock."""
    until, started = job.checkpoint_until, job.started_at
    return job.evolve(
        created_at=job.created_at + seconds,
        since=job.since + seconds,
        started_at=None if started is None else started + seconds,
        checkpoint_until=None if until is None else until + seconds,
    )


def _wait_again(job: JobRow, lease_id: str, now: float) -> JobRow:
    return job.evolve(state=JobState.WAITING, since=now, lease_id=lease_id, workers=(), started_at=None)


def _enter_running(job: JobRow, now: float) -> JobRow:
    return job.evolve(state=JobState.RUNNING, since=now, started_at=now)


def _stop_after_leader(job: JobRow, leader: WorkerRow, now: float) -> JobRow:
    """Stop a detached job after worker 0, whose exit code becomes the job's."""
    if job.state in {JobState.STOPPING, JobState.ENDED}:
        return job
    reason = "done" if leader.exit_code == 0 else _describe(leader)
    return stop(job, reason, now).evolve(exit_code=leader.exit_code, has_failed=leader.exit_code != 0)


def _describe(worker: WorkerRow) -> str:
    return f"worker {worker.index} on {worker.node}: {worker.message}"


def _update_worker(job: JobRow, index: int, **changes: object) -> JobRow:
    return job.evolve(
        workers=tuple(w.evolve(**changes) if w.index == index else w for w in job.workers),
    )
