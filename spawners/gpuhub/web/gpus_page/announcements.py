"""Sentences about what changed for a user, which screen readers announce: few, and about the user's own work alone."""

from __future__ import annotations

from collections.abc import Iterator

from gpuhub.broker_api.schemas import JobState, LeaseState, LeaseView, Purpose
from gpuhub.broker_api.schemas.live import JobSummaryView, OwnView
from gpuhub.web.text import describe_gpus

#: Maximum number of sentences about one change; a large array would say hundreds.
MAX_SENTENCES = 4
_LIVE = (LeaseState.GRANTED, LeaseState.ACTIVE)


def describe_changes(before: OwnView | None, after: OwnView | None) -> list[str]:
    """Return what happened between two views of a user, in a few sentences; nothing at the beginning of a stream."""
    if before is None or after is None or before is after:
        return []
    sentences = [*_describe_leases(before, after), *_describe_jobs(before, after)]
    shown = sentences[:MAX_SENTENCES]
    return [*shown, f"And {len(sentences) - len(shown)} more changes."] if len(sentences) > len(shown) else shown


def _describe_leases(before: OwnView, after: OwnView) -> Iterator[str]:
    old = {lease.id: lease for lease in before.leases}
    for lease in after.leases:
        if lease.purpose is Purpose.JOB:
            continue
        earlier = old.get(lease.id)
        if lease.state in _LIVE and (earlier is None or earlier.state not in _LIVE):
            yield f"{_name_notebook(lease)} got {describe_gpus(lease.gpus)} on {', '.join(lease.nodes)}."
        elif lease.position == 1 and earlier is not None and (earlier.position or 0) > 1:
            yield f"{_name_notebook(lease)} is first in the queue."
    ids = {lease.id for lease in after.leases}
    if not after.more_leases:
        for lease in before.leases:
            if lease.id not in ids and lease.purpose is Purpose.NOTEBOOK:
                yield f"{_name_notebook(lease)} has ended."


def _name_notebook(lease: LeaseView) -> str:
    return f"Your notebook {lease.subject}" if lease.subject else "Your notebook"


def _describe_jobs(before: OwnView, after: OwnView) -> Iterator[str]:
    old = {job.id: job for job in before.jobs}
    for job in after.jobs:
        earlier = old.get(job.id)
        if earlier is None or earlier.state is job.state:
            continue
        if job.state is JobState.RUNNING:
            yield f"{_name_job(job)} runs on {', '.join(job.nodes)}."
        elif job.state is JobState.ENDED:
            yield f"{_name_job(job)} has ended: {job.reason or 'finished'}."
        elif job.state is JobState.PREEMPTING:
            yield f"{_name_job(job)} is preempted."


def _name_job(job: JobSummaryView) -> str:
    return f"Your job {job.name or job.run_id}"
