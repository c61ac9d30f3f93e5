"""A job's life: the only place where its state changes. Pure; time is passed in.

waiting ──begin──▶ starting ──worker_running (all)──▶ running ──stop──▶ stopping ──end──▶ ended
   ▲                   └───────preempt───────▶ preempting ◀──preempt──┘
   └──────────────────requeue──────────────────────┘
A stop is possible from every state before `stopping`; a waiting job ends at once. A preempted job waits again, under a
new lease, when everything of the old one is gone.
"""

from __future__ import annotations

from collections.abc import Collection

from gpuhub.broker.rows import JobRow, LeaseRow, WorkerRow
from gpuhub.broker.schemas import JobState, WorkerState

#: Why the lease of a preempted job ended; any other reason ends the job as well.
PREEMPTED = "preempted: others needed its GPUs"
#: Its workers run, or are being started.
UNDER_WAY = frozenset({JobState.STARTING, JobState.RUNNING})


def begin(job: JobRow, lease: LeaseRow, now: float) -> JobRow:
    """The gang is granted: one pending worker a node."""
    workers = tuple(WorkerRow(index=index, node=node) for index, node in enumerate(lease.nodes))
    return job.evolve(state=JobState.STARTING, since=now, workers=workers)


def worker_running(job: JobRow, index: int, container_id: str, now: float) -> JobRow:
    """A worker's container runs; when all do (or did), the job does."""
    job = _worker(job, index, state=WorkerState.RUNNING, container_id=container_id)
    if job.state is JobState.STARTING and all(w.state is not WorkerState.PENDING for w in job.workers):
        return _run(job, now)
    return job


def worker_exited(job: JobRow, index: int, exit_code: int | None, message: str, now: float) -> JobRow:
    """A worker ended, or could not start (`exit_code` None); when it was the last, the job stops.

    A job whose gang never was complete stops with the first such worker: torchrun could not run. Workers of a job that
    is being preempted are meant to end, with whatever code, and one that was given back is no worker any more. A
    detached job ends with worker 0, which leads the others.
    """
    job = _worker(job, index, state=WorkerState.EXITED, exit_code=exit_code, message=message)
    ended = next((worker for worker in job.workers if worker.index == index), None)
    if ended is None or job.state is JobState.PREEMPTING:
        return job
    if job.detached and index == 0:
        return _stop_led(job, ended, now)
    if job.state is JobState.STARTING:
        return stop(job, _describe(ended), now)
    if all(worker.state is WorkerState.EXITED for worker in job.workers):
        failed = next((w for w in job.workers if w.exit_code != 0), None)
        return stop(job, "all workers ended" if failed is None else _describe(failed), now)
    return job


def leader_exited(job: JobRow, now: float, *, exit_code: int) -> JobRow:
    """What worker 0 of a detached job runs has ended by itself, and the job with it, though nobody saw it run."""
    message = f"ended with exit code {exit_code}"
    if job.workers:
        return worker_exited(job, 0, exit_code, message, now)
    return stop(job, "done" if exit_code == 0 else f"worker 0: {message}", now).evolve(exit_code=exit_code)


def shrink(job: JobRow, nodes: Collection[str], now: float) -> JobRow:
    """An elastic job under way goes on without its workers on these nodes; the others keep their numbers."""
    if job.state not in UNDER_WAY:
        return job
    job = job.evolve(workers=tuple(worker for worker in job.workers if worker.node not in nodes))
    if job.state is JobState.STARTING and all(w.state is WorkerState.RUNNING for w in job.workers):
        return _run(job, now)
    return job


def given_up(job: JobRow) -> frozenset[str]:
    """Nodes whose worker of an elastic job has ended while enough others go on: their GPUs go back."""
    going_on = [worker for worker in job.workers if worker.state is not WorkerState.EXITED]
    if job.state is not JobState.RUNNING or job.min_nnodes >= job.nnodes or len(going_on) < job.min_nnodes:
        return frozenset()
    return frozenset(worker.node for worker in job.workers if worker.state is WorkerState.EXITED)


def preempt(job: JobRow, until: float, now: float) -> JobRow:
    """A job under way gives everything back; its workers may write a checkpoint until then."""
    if job.state not in UNDER_WAY:
        return job
    return job.evolve(state=JobState.PREEMPTING, since=now, checkpoint_until=until)


def is_checkpointed(job: JobRow, now: float) -> bool:
    """Whether a job that is being preempted has nothing more to wait for."""
    is_over = job.checkpoint_until is not None and job.checkpoint_until <= now
    return is_over or all(worker.state is WorkerState.EXITED for worker in job.workers)


def is_over(job: JobRow | None) -> bool:
    """Whether jobs that joined this one (None: it has ended) have nobody left to work with."""
    return job is None or job.state in {JobState.STOPPING, JobState.ENDED}


def requeue(job: JobRow, lease_id: str, now: float) -> JobRow:
    """A preempted job of which nothing is left waits again, under a new lease."""
    return job.evolve(
        state=JobState.WAITING,
        since=now,
        lease_id=lease_id,
        workers=(),
        started_at=None,
        checkpoint_until=None,
        preemptions=job.preemptions + 1,
    )


def stop(job: JobRow, reason: str, now: float) -> JobRow:
    """The workers are to be removed. The first reason stays."""
    if job.state in {JobState.STOPPING, JobState.ENDED}:
        return job
    return job.evolve(state=JobState.STOPPING, since=now, reason=reason, checkpoint_until=None)


def end(job: JobRow, now: float) -> JobRow:
    """Nothing of the job is left."""
    workers = tuple(
        worker if worker.state is WorkerState.EXITED else worker.evolve(state=WorkerState.EXITED, message="stopped")
        for worker in job.workers
    )
    return job.evolve(state=JobState.ENDED, since=now, ended_at=now, workers=workers)


def shift(job: JobRow, seconds: float) -> JobRow:
    """The machine's clock was set by so much: moments from before are told by the new clock."""
    until, started = job.checkpoint_until, job.started_at
    return job.evolve(
        created_at=job.created_at + seconds,
        since=job.since + seconds,
        started_at=None if started is None else started + seconds,
        checkpoint_until=None if until is None else until + seconds,
    )


def _run(job: JobRow, now: float) -> JobRow:
    return job.evolve(state=JobState.RUNNING, since=now, started_at=now)


def _stop_led(job: JobRow, leader: WorkerRow, now: float) -> JobRow:
    """Worker 0 of a detached job ended, and with it the job: its exit code is the job's."""
    if job.state in {JobState.STOPPING, JobState.ENDED}:
        return job
    reason = "done" if leader.exit_code == 0 else _describe(leader)
    return stop(job, reason, now).evolve(exit_code=leader.exit_code)


def _describe(worker: WorkerRow) -> str:
    return f"worker {worker.index} on {worker.node}: {worker.message}"


def _worker(job: JobRow, index: int, **changes: object) -> JobRow:
    return job.evolve(
        workers=tuple(w.evolve(**changes) if w.index == index else w for w in job.workers),
    )
