"""All open leases and jobs at one moment, and the one way to change them.

A change is made on a draft by a pure function; then the draft is settled (jobs follow their leases, the queue is
served), written in one transaction, and only then seen by others. Changes follow each other; readers never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gpuhub.broker.clock import Clock
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import LeaseState
from gpuhub.broker.store import Changes, Store
from gpuhub.engines.base import Wait

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A waiting lease's place: what of it is not stored."""

    position: int
    wait: Wait
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Open leases and jobs by id, and the places of the waiting."""

    leases: Mapping[str, LeaseRow] = field(default_factory=dict)
    jobs: Mapping[str, JobRow] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)

    def lease_version(self, lease: LeaseRow) -> int:
        """The version of a lease as its owner sees it."""
        place = self.places.get(lease.id)
        return lease.version if place is None else max(lease.version, place.version)

    def job_version(self, job: JobRow, lease: LeaseRow) -> int:
        """The version of a job as its owner sees it."""
        return max(job.version, self.lease_version(lease))


class Draft:
    """Leases and jobs while they change. `now` is the time of the whole change."""

    def __init__(self, snapshot: Snapshot, now: float, seq: int) -> None:
        self._before = snapshot
        self.now = now
        self.leases: dict[str, LeaseRow] = dict(snapshot.leases)
        self.jobs: dict[str, JobRow] = dict(snapshot.jobs)
        self._seq = seq

    def next_seq(self) -> int:
        """The next place in the order of requests."""
        self._seq += 1
        return self._seq

    @property
    def seq(self) -> int:
        """The last place given."""
        return self._seq

    def put_lease(self, lease: LeaseRow) -> LeaseRow:
        """Add or replace."""
        self.leases[lease.id] = lease
        return lease

    def put_job(self, job: JobRow) -> JobRow:
        """Add or replace."""
        self.jobs[job.id] = job
        return job

    def stamp(self, version: int) -> Changes:
        """Give every changed row the version; return what changed."""
        leases = [lease for lease in self.leases.values() if self._before.leases.get(lease.id) != lease]
        jobs = [job for job in self.jobs.values() if self._before.jobs.get(job.id) != job]
        return Changes(
            leases=[(self._before.leases.get(row.id), self.put_lease(row.evolve(version=version))) for row in leases],
            jobs=[(self._before.jobs.get(row.id), self.put_job(row.evolve(version=version))) for row in jobs],
        )


#: Makes a draft consistent and serves the queue; returns why each waiting lease waits.
Settle = Callable[[Draft], Mapping[str, Wait]]


class Ledger:
    """Holder of the current snapshot."""

    def __init__(self, store: Store, settle: Settle, clock: Clock) -> None:
        self._store = store
        self._settle = settle
        self._clock = clock
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        leases, jobs = store.load()
        self._seq, version = store.highest()
        # Places are not stored, so versions seen before a restart may be above the highest stored one.
        self._version = max(version, int(clock.now() * 1000))
        self.snapshot = Snapshot(leases={row.id: row for row in leases}, jobs={row.id: row for row in jobs})

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change. Take it before looking at the snapshot, so that no change is missed."""
        return self._changed

    def wake(self) -> None:
        """Let everybody who waits for a change look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change(self, edit: Callable[[Draft], T]) -> T:
        """Run `edit` on a draft, settle it, store it, show it. Nothing happened when this raises.

        A caller that is cancelled does not cancel the change: what is stored is always what is shown.
        """
        return await asyncio.shield(asyncio.ensure_future(self._change(edit)))

    async def _change(self, edit: Callable[[Draft], T]) -> T:
        async with self._lock:
            draft = Draft(self.snapshot, self._clock.now(), self._seq)
            result = edit(draft)
            waits = self._settle(draft)
            version = self._version + 1
            changes = draft.stamp(version)
            if changes:
                await asyncio.to_thread(self._store.save, changes)
            self._seq = draft.seq
            self._show(draft, waits, version, is_changed=bool(changes))
            return result

    def _show(self, draft: Draft, waits: Mapping[str, Wait], version: int, *, is_changed: bool) -> None:
        before = self.snapshot.places
        places = _places(draft, waits, before, version)
        if not is_changed and places == before:
            return
        self._version = version
        self.snapshot = Snapshot(
            leases={lease.id: lease for lease in draft.leases.values() if lease.is_open},
            jobs={job.id: job for job in draft.jobs.values() if job.is_open},
            places=places,
        )
        self.wake()


def _places(draft: Draft, waits: Mapping[str, Wait], before: Mapping[str, Place], version: int) -> dict[str, Place]:
    waiting = sorted(
        (lease for lease in draft.leases.values() if lease.state is LeaseState.WAITING), key=lambda lease: lease.seq
    )
    places: dict[str, Place] = {}
    for position, lease in enumerate(waiting, start=1):
        old = before.get(lease.id)
        wait = waits[lease.id]
        if old is not None and old.position == position and old.wait == wait:
            places[lease.id] = old
        else:
            places[lease.id] = Place(position=position, wait=wait, version=version)
    return places
