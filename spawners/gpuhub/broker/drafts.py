"""Open leases and jobs at one moment, and a draft of the next moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuhub.broker.index import Index
from gpuhub.broker.rows import EventRow, JobRow, LeaseRow
from gpuhub.broker.writing import Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Open leases and jobs by id."""

    leases: Mapping[str, LeaseRow] = field(default_factory=dict)
    jobs: Mapping[str, JobRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a draft to go back to."""

    steps: int
    events: int
    after: int
    seq: int


class Draft:
    """Leases and jobs while they change. `now` is the time of the whole change."""

    def __init__(self, snapshot: Snapshot, index: Index, now: float, seq: int) -> None:
        self._before = snapshot
        self._steps: list[tuple[LeaseRow | None, LeaseRow] | tuple[JobRow | None, JobRow]] = []
        self._seq = seq
        self.now = now
        self.index = index
        self.leases: dict[str, LeaseRow] = dict(snapshot.leases)
        self.jobs: dict[str, JobRow] = dict(snapshot.jobs)
        self.events: list[EventRow] = []
        #: Called, in order, once the draft is what everybody sees.
        self.after: list[Callable[[], None]] = []

    @property
    def seq(self) -> int:
        """The last place given."""
        return self._seq

    def next_seq(self) -> int:
        """The next place in the order of requests."""
        self._seq += 1
        return self._seq

    def put_lease(self, lease: LeaseRow) -> LeaseRow:
        """Add or replace."""
        before = self.leases.get(lease.id)
        if before != lease:
            self._steps.append((before, lease))
            self.index.replace_lease(before, lease)
            self.leases[lease.id] = lease
        return lease

    def put_job(self, job: JobRow) -> JobRow:
        """Add or replace."""
        before = self.jobs.get(job.id)
        if before != job:
            self._steps.append((before, job))
            self.index.replace_job(before, job)
            self.jobs[job.id] = job
        return job

    def note(self, kind: str, text: str, *, owner: str | None = None, lease: str | None = None) -> None:
        """Tell of something, in the same transaction."""
        self.events.append(EventRow(at=self.now, kind=kind, text=text, owner=owner, lease=lease))

    # -- going back -----------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """A point to go back to."""
        return Mark(len(self._steps), len(self.events), len(self.after), self._seq)

    def undo(self, mark: Mark) -> None:
        """Make everything as it was then."""
        while len(self._steps) > mark.steps:
            before, after = self._steps.pop()
            if isinstance(after, LeaseRow):
                self._restore_lease(before if isinstance(before, LeaseRow) else None, after)
            else:
                self._restore_job(before if isinstance(before, JobRow) else None, after)
        del self.events[mark.events :]
        del self.after[mark.after :]
        self._seq = mark.seq

    def _restore_lease(self, before: LeaseRow | None, after: LeaseRow) -> None:
        self.index.replace_lease(after, before)
        if before is None:
            del self.leases[after.id]
        else:
            self.leases[before.id] = before

    def _restore_job(self, before: JobRow | None, after: JobRow) -> None:
        self.index.replace_job(after, before)
        if before is None:
            del self.jobs[after.id]
        else:
            self.jobs[before.id] = before

    # -- what changed ---------------------------------------------------------------------------------------------

    def touched(self, since: int = 0) -> tuple[list[str], list[str], int]:
        """Ids of leases and jobs that changed since that step, in order, and the number of the next step."""
        leases: dict[str, None] = {}
        jobs: dict[str, None] = {}
        for _, row in self._steps[since:]:
            (leases if isinstance(row, LeaseRow) else jobs)[row.id] = None
        return list(leases), list(jobs), len(self._steps)

    def before(self, lease_id: str) -> LeaseRow | None:
        """The lease as everybody sees it; None when it is new."""
        return self._before.leases.get(lease_id)

    def job_before(self, job_id: str) -> JobRow | None:
        """The same for a job."""
        return self._before.jobs.get(job_id)

    def stamp(self, version: int) -> Changes:
        """Give every changed row the version; return what changed."""
        lease_ids, job_ids, _ = self.touched()
        changes = Changes(
            leases=[
                (self.before(lease_id), self.leases[lease_id].evolve(version=version))
                for lease_id in lease_ids
                if self.before(lease_id) != self.leases[lease_id]
            ],
            jobs=[
                (self.job_before(job_id), self.jobs[job_id].evolve(version=version))
                for job_id in job_ids
                if self.job_before(job_id) != self.jobs[job_id]
            ],
            events=tuple(self.events),
        )
        self.leases.update((row.id, row) for _, row in changes.leases)
        self.jobs.update((row.id, row) for _, row in changes.jobs)
        return changes

    def close(self, changes: Changes) -> Snapshot:
        """What everybody sees from now on: the draft without what ended. The draft is not used any more."""
        for _, lease in changes.leases:
            if not lease.is_open:
                del self.leases[lease.id]
        for _, job in changes.jobs:
            if not job.is_open:
                del self.jobs[job.id]
        return Snapshot(leases=self.leases, jobs=self.jobs)
