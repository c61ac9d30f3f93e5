"""Which job a person means: a run's id, the beginning of one, or a job's name. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_launch.errors import UsageError
from gpu_launch.wire import Job

_NAMED = 4


def find(text: str, jobs: Sequence[Job]) -> Job:
    """The one job. `jobs` are newest first. Raises UsageError for none, and for several runs that begin so."""
    for job in jobs:
        if text in (job.run_id, job.id):
            return job
    for job in jobs:
        if job.name == text:
            return job
    begun = [job for job in jobs if _begins(job.run_id, text)] if text else []
    if len(begun) == 1:
        return begun[0]
    if begun:
        named = ", ".join(job.run_id for job in begun[:_NAMED])
        more = f" and {len(begun) - _NAMED} more" if len(begun) > _NAMED else ""
        raise UsageError(f"{text} is the beginning of several runs: {named}{more}.")
    raise UsageError(f"There is no job {text}. gpu-launch ps -a lists them.")


def short(run_id: str) -> str:
    """What is enough to name a run, nearly always: its last part."""
    return run_id.rpartition("-")[2]


def _begins(run_id: str, text: str) -> bool:
    """`run-2026…`, `2026…`, or the last part alone: `3f2a`."""
    return any(part.startswith(text) for part in (run_id, run_id.removeprefix("run-"), short(run_id)))


def newest_first(jobs: Sequence[Job]) -> list[Job]:
    """By the time they were asked for; a run's id begins with it."""
    return sorted(
        jobs, key=lambda job: (job.created_at.timestamp() if job.created_at else 0.0, job.run_id), reverse=True
    )
