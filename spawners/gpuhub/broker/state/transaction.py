"""A transaction: open leases and jobs while they change, with an index of their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from gpuhub.broker.db.writer import Changes
from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose
from gpuhub.domain.models import EventRow, JobRow, LeaseRow, LedgerSnapshot

#: Key of the index, such as `("owner", "ada")`.
Tag = tuple[str | int, ...]

_NOTHING: frozenset[str] = frozenset()


class RowIndex:
    """Ids of open leases and jobs by tag."""

    def __init__(self) -> None:
        self._ids: dict[Tag, set[str]] = {}

    def find(self, *tag: str | int) -> Set[str]:
        """Return the ids with a tag, such as `("owner", name)`; to be read before the next change."""
        return self._ids.get(tag, _NOTHING)

    def find_one(self, *tag: str | int) -> str | None:
        """Return the id with a tag that at most one row has."""
        return next(iter(self.find(*tag)), None)

    def replace_lease(self, before: LeaseRow | None, after: LeaseRow | None) -> None:
        """Update the tags of a lease that changed, is new (`before` None) or is removed (`after` None)."""
        row = after or before
        if row is not None:
            self._move(row.id, _lease_tags(before), _lease_tags(after))

    def replace_job(self, before: JobRow | None, after: JobRow | None) -> None:
        """Update the tags of a job, likewise."""
        row = after or before
        if row is not None:
            self._move(row.id, _job_tags(before), _job_tags(after))

    def find_free_part(self, uuid: str) -> int:
        """Return the lowest share of a GPU that no lease holds."""
        part = 0
        while self.find("part", uuid, part):
            part += 1
        return part

    def _move(self, row_id: str, before: Iterable[Tag], after: Iterable[Tag]) -> None:
        old, new = set(before), set(after)
        for tag in old - new:
            ids = self._ids[tag]
            ids.discard(row_id)
            if not ids:
                del self._ids[tag]
        for tag in new - old:
            self._ids.setdefault(tag, set()).add(row_id)


def _lease_tags(lease: LeaseRow | None) -> Iterator[Tag]:
    if lease is None or not lease.is_open:
        return
    yield ("owner", lease.owner)
    yield ("key", lease.owner, lease.key)
    for node in lease.nodes:
        yield ("node", node)
    for gpu in lease.held:
        yield ("part", gpu.uuid, gpu.part)
    if lease.purpose is Purpose.NOTEBOOK:
        yield ("server", lease.owner, lease.subject)
    else:
        yield ("jobs of", lease.owner)
        for group in lease.groups:
            yield ("jobs in", group)
    if lease.waits:
        yield ("waiting",)
    if lease.suspension is not None:
        yield ("suspended",)
    if lease.state is LeaseState.REQUESTED:
        yield ("waiting of", lease.owner)
        for group in lease.groups:
            yield ("waiting in", group)


def _job_tags(job: JobRow | None) -> Iterator[Tag]:
    if job is None or not job.is_open:
        return
    yield ("run", job.owner, job.run_id)
    yield ("job of lease", job.lease_id)
    yield ("jobs of owner", job.owner)
    if job.array is not None:
        yield ("array", job.owner, job.array)
    if job.after is not None:
        yield ("after", job.owner, job.after)
    if job.joins is not None:
        yield ("joining", job.owner, job.joins)
    if job.notebook_lease is not None:
        yield ("jobs of notebook", job.notebook_lease)
    if job.state is JobState.PREEMPTING:
        yield ("preempting",)


@dataclass(frozen=True, slots=True)
class Savepoint:
    """A point of a transaction to roll back to."""

    steps: int
    events: int
    after: int
    seq: int
    now: float


class Transaction:
    """Leases and jobs while they change. `now` is the time of the whole transaction; only a clock jump changes it."""

    def __init__(self, snapshot: LedgerSnapshot, index: RowIndex, now: float, seq: int) -> None:
        self._before = snapshot
        self._steps: list[tuple[LeaseRow | None, LeaseRow] | tuple[JobRow | None, JobRow]] = []
        self._seq = seq
        self.now = now
        self.index = index
        self.leases: dict[str, LeaseRow] = dict(snapshot.leases)
        self.jobs: dict[str, JobRow] = dict(snapshot.jobs)
        self.events: list[EventRow] = []
        #: Called in order, when the transaction is visible to readers.
        self.on_commit: list[Callable[[], None]] = []

    @property
    def seq(self) -> int:
        """The last number given."""
        return self._seq

    def next_seq(self) -> int:
        """Return the next number in the order of requests."""
        self._seq += 1
        return self._seq

    def put_lease(self, lease: LeaseRow) -> LeaseRow:
        """Add or replace a lease."""
        before = self.leases.get(lease.id)
        if before != lease:
            self._steps.append((before, lease))
            self.index.replace_lease(before, lease)
            self.leases[lease.id] = lease
        return lease

    def put_job(self, job: JobRow) -> JobRow:
        """Add or replace a job."""
        before = self.jobs.get(job.id)
        if before != job:
            self._steps.append((before, job))
            self.index.replace_job(before, job)
            self.jobs[job.id] = job
        return job

    def add_event(self, kind: str, text: str, *, owner: str | None = None, lease: str | None = None) -> None:
        """Add an event to the transaction."""
        self.events.append(EventRow(at=self.now, kind=kind, text=text, owner=owner, lease=lease))

    # -- rollback -------------------------------------------------------------------------------------------------

    def savepoint(self) -> Savepoint:
        return Savepoint(len(self._steps), len(self.events), len(self.on_commit), self._seq, self.now)

    def rollback_to(self, savepoint: Savepoint) -> None:
        """Restore the state at a savepoint."""
        while len(self._steps) > savepoint.steps:
            before, after = self._steps.pop()
            if isinstance(after, LeaseRow):
                self._restore_lease(before if isinstance(before, LeaseRow) else None, after)
            else:
                self._restore_job(before if isinstance(before, JobRow) else None, after)
        del self.events[savepoint.events :]
        del self.on_commit[savepoint.after :]
        self._seq = savepoint.seq
        self.now = savepoint.now

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

    # -- results --------------------------------------------------------------------------------------------------

    def changed_ids(self, since: int = 0) -> tuple[list[str], list[str], int]:
        """Return the ids of leases and jobs that changed since a step, in order, and the number of the next step."""
        leases: dict[str, None] = {}
        jobs: dict[str, None] = {}
        for _, row in self._steps[since:]:
            (leases if isinstance(row, LeaseRow) else jobs)[row.id] = None
        return list(leases), list(jobs), len(self._steps)

    def get_lease_before(self, lease_id: str) -> LeaseRow | None:
        """Return the lease as readers see it; None if it is new."""
        return self._before.leases.get(lease_id)

    def get_job_before(self, job_id: str) -> JobRow | None:
        """Return the job as readers see it; None if it is new."""
        return self._before.jobs.get(job_id)

    def assign_version(self, version: int) -> Changes:
        """Give every changed row the version, and return the changes."""
        lease_ids, job_ids, _ = self.changed_ids()
        changes = Changes(
            leases=[
                (self.get_lease_before(lease_id), self.leases[lease_id].evolve(version=version))
                for lease_id in lease_ids
                if self.get_lease_before(lease_id) != self.leases[lease_id]
            ],
            jobs=[
                (self.get_job_before(job_id), self.jobs[job_id].evolve(version=version))
                for job_id in job_ids
                if self.get_job_before(job_id) != self.jobs[job_id]
            ],
            events=tuple(self.events),
        )
        self.leases.update((row.id, row) for _, row in changes.leases)
        self.jobs.update((row.id, row) for _, row in changes.jobs)
        return changes

    def build_snapshot(self, changes: Changes) -> LedgerSnapshot:
        """Return the snapshot for readers, without ended rows; the transaction is not used any more."""
        for _, lease in changes.leases:
            if not lease.is_open:
                del self.leases[lease.id]
        for _, job in changes.jobs:
            if not job.is_open:
                del self.jobs[job.id]
        return LedgerSnapshot(leases=self.leases, jobs=self.jobs)
