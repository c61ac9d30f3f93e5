"""Leases and jobs for those who may see them."""

from __future__ import annotations

import asyncio

from gpuhub.broker import audit, views
from gpuhub.broker.auth import Identity
from gpuhub.broker.core import Core
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import Job, Lease
from gpuhub.errors import NotFound


class Looks:
    """Finds rows, open in the ledger or ended in the store, and shows them."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def find_lease(self, who: Identity, lease_id: str) -> LeaseRow:
        """A lease, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        lease = self._core.ledger.snapshot.leases.get(lease_id)
        if lease is None:
            lease = await asyncio.to_thread(self._core.store.lease, lease_id)
        if lease is not None:
            audit.note_owner(lease.owner)
        if lease is None or not (who.sees_all or lease.owner == who.name):
            raise NotFound(f"there is no lease {lease_id!r} of yours")
        return lease

    async def find_job(self, who: Identity, job_id: str) -> JobRow:
        """A job, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        job = self._core.ledger.snapshot.jobs.get(job_id)
        if job is None:
            job = await asyncio.to_thread(self._core.store.job, job_id)
        if job is not None:
            audit.note_owner(job.owner)
        if job is None or not (who.sees_all or job.owner == who.name):
            raise NotFound(f"there is no job {job_id!r} of yours")
        return job

    def show_lease(self, lease: LeaseRow) -> Lease:
        """A lease as its owner sees it."""
        return views.build_lease(lease, self._core.lease_version(lease), self._core.places().get(lease.id))

    async def show_job(self, job: JobRow) -> Job:
        """A job as its owner sees it."""
        lease = self._core.ledger.snapshot.leases.get(job.lease_id)
        if lease is None or not job.is_open:
            lease = await asyncio.to_thread(self._core.store.lease, job.lease_id)
        if lease is None:
            raise NotFound(f"there is no job {job.id!r}")
        return self._build_job(job, lease)

    async def ended_jobs(self, who: Identity, limit: int) -> list[Job]:
        """Jobs that ended within `[jobs] remember`, one's own, or all; the newest first."""
        since = self._core.clock.now() - self._core.cluster.jobs.remember
        owner = None if who.sees_all else who.name
        found = await asyncio.to_thread(self._core.store.ended_jobs, owner, since, limit)
        return [self._build_job(job, lease) for job, lease in found]

    def _build_job(self, job: JobRow, lease: LeaseRow) -> Job:
        version = max(job.version, self._core.lease_version(lease))
        place = self._core.places().get(lease.id)
        return views.build_job(job, lease, version, place, float(self._core.cluster.jobs.renew_within))
