"""A job's life: the only place where its state changes. Pure; time is passed in.

waiting ──begin──▶ starting ──worker_running (all)──▶ running ──stop──▶ stopping ──end──▶ ended
A stop is possible from every state before `stopping`; a waiting job ends at once.
"""

from __future__ import annotations

from gpuhub.broker.rows import JobRow, LeaseRow, WorkerRow
from gpuhub.broker.schemas import JobState, WorkerState


def begin(job: JobRow, lease: LeaseRow, now: float) -> JobRow:
    """The gang is granted: one pending worker a node."""
    workers = tuple(WorkerRow(index=index, node=node) for index, node in enumerate(lease.nodes))
    return job.evolve(state=JobState.STARTING, since=now, workers=workers)


def worker_running(job: JobRow, index: int, container_id: str, now: float) -> JobRow:
    """A worker's container runs; when all do (or did), the job does."""
    job = _worker(job, index, state=WorkerState.RUNNING, container_id=container_id)
    if job.state is JobState.STARTING and all(w.state is not WorkerState.PENDING for w in job.workers):
        return job.evolve(state=JobState.RUNNING, since=now)
    return job


def worker_exited(job: JobRow, index: int, exit_code: int | None, message: str, now: float) -> JobRow:
    """A worker ended, or could not start (`exit_code` None); when it was the last, the job stops.

    A job whose gang never was complete stops with the first such worker: torchrun could not run.
    """
    incomplete = job.state is JobState.STARTING
    job = _worker(job, index, state=WorkerState.EXITED, exit_code=exit_code, message=message)
    if incomplete:
        return stop(job, _describe(job.workers[index]), now)
    if all(worker.state is WorkerState.EXITED for worker in job.workers):
        failed = next((w for w in job.workers if w.exit_code != 0), None)
        return stop(job, "all workers ended" if failed is None else _describe(failed), now)
    return job


def stop(job: JobRow, reason: str, now: float) -> JobRow:
    """The workers are to be removed. The first reason stays."""
    if job.state in {JobState.STOPPING, JobState.ENDED}:
        return job
    return job.evolve(state=JobState.STOPPING, since=now, reason=reason)


def end(job: JobRow, now: float) -> JobRow:
    """Nothing of the job is left."""
    workers = tuple(
        worker if worker.state is WorkerState.EXITED else worker.evolve(state=WorkerState.EXITED, message="stopped")
        for worker in job.workers
    )
    return job.evolve(state=JobState.ENDED, since=now, ended_at=now, workers=workers)


def _describe(worker: WorkerRow) -> str:
    return f"worker {worker.index} on {worker.node}: {worker.message}"


def _worker(job: JobRow, index: int, **changes: object) -> JobRow:
    return job.evolve(
        workers=tuple(w.evolve(**changes) if w.index == index else w for w in job.workers),
    )
