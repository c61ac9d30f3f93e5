"""What the broker does for its callers: each operation is one change of the ledger, or a look at it."""

from __future__ import annotations

import asyncio

from gpuhub.broker import intake, job_rules, leases, views
from gpuhub.broker.auth import Identity
from gpuhub.broker.core import Core
from gpuhub.broker.ledger import Draft
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import (
    Activation,
    ClusterView,
    Job,
    JobRequest,
    JobState,
    Lease,
    LeaseRequest,
    LeaseState,
    Purpose,
)
from gpuhub.errors import Conflict, InvalidRequest, NotAllowed, NotFound


class Broker:
    """The owner of every lease."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # -- leases ---------------------------------------------------------------------------------------------------

    async def request_lease(self, who: Identity, request: LeaseRequest) -> Lease:
        """Ask for a notebook's lease; one that its server has already is returned.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, Conflict (the server runs with another profile).
        """
        owner = self._owner(who, request.owner)
        lease = await self._core.ledger.change(lambda draft: self._add_notebook(draft, owner, request))
        self._note_asked(who, lease)
        return await self.lease(who, lease.id)

    async def lease(self, who: Identity, lease_id: str) -> Lease:
        """A lease, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        lease = await self._find_lease(who, lease_id)
        self._note_asked(who, lease)
        snapshot = self._core.ledger.snapshot
        return views.build_lease(lease, snapshot.lease_version(lease), snapshot.places.get(lease.id))

    async def wait_lease(self, who: Identity, lease_id: str, version: int | None, wait_s: float) -> Lease:
        """The lease as soon as its version is another one, at the latest after `wait_s`."""

        async def look() -> tuple[int, bool]:
            row = await self._find_lease(who, lease_id)
            self._note_asked(who, row)
            return self._core.ledger.snapshot.lease_version(row), row.state is LeaseState.WAITING

        await self._core.poll(look, version, wait_s)
        return await self.lease(who, lease_id)

    def leases(self, who: Identity) -> list[Lease]:
        """Leases that have not ended: one's own, or all."""
        snapshot = self._core.ledger.snapshot
        return [
            views.build_lease(lease, snapshot.lease_version(lease), snapshot.places.get(lease.id))
            for lease in sorted(snapshot.leases.values(), key=lambda row: row.seq)
            if who.sees_all or lease.owner == who.name
        ]

    async def activate(self, who: Identity, lease_id: str, activation: Activation) -> Lease:
        """The notebook's container exists; only then may it be started.

        Raises:
            NotFound, Conflict: the lease is not granted (any more).
        """
        lease = await self._find_lease(who, lease_id)
        if lease.purpose is not Purpose.NOTEBOOK:
            raise Conflict("a job's lease is activated by the broker itself")

        def edit(draft: Draft) -> None:
            current = _open_lease(draft, lease_id)
            draft.put_lease(leases.activate(current, activation.container_id, draft.now))

        await self._core.ledger.change(edit)
        return await self.lease(who, lease_id)

    async def release(self, who: Identity, lease_id: str) -> Lease:
        """End a lease; said again, nothing changes. A job's lease ends with its job."""
        lease = await self._find_lease(who, lease_id)
        reason = "stopped" if who.name == lease.owner or who.any_owner else f"ended by {who.name}"
        await self._core.end_leases({lease_id: reason})
        return await self.lease(who, lease_id)

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def request_job(self, who: Identity, request: JobRequest) -> Job:
        """Ask for workers; a run that has a job already gets that job.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting.
        """
        if not who.is_user:
            raise NotAllowed("a job is asked for by a user, not by a service")
        known = await asyncio.to_thread(self._core.store.job_of_run, who.name, request.run_id)
        if known is None:
            known = await self._core.ledger.change(lambda draft: self._add_job(draft, who.name, request))
        return await self.job(who, known.id)

    async def job(self, who: Identity, job_id: str) -> Job:
        """A job, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        job = await self._find_job(who, job_id)
        lease = self._core.ledger.snapshot.leases.get(job.lease_id)
        if lease is None or not job.is_open:
            lease = await asyncio.to_thread(self._core.store.lease, job.lease_id)
        if lease is None:
            raise NotFound(f"there is no job {job_id!r}")
        return views.build_job(job, lease, self._core.ledger.snapshot, float(self._core.cluster.jobs.renew_within))

    async def wait_job(self, who: Identity, job_id: str, version: int | None, wait_s: float) -> Job:
        """The job as soon as its version is another one, at the latest after `wait_s`."""

        async def look() -> tuple[int, bool]:
            job = await self.job(who, job_id)
            return job.version, job.state is JobState.WAITING

        await self._core.poll(look, version, wait_s)
        return await self.job(who, job_id)

    async def jobs(self, who: Identity) -> list[Job]:
        """Jobs that have not ended: one's own, or all."""
        rows = [row for row in self._core.ledger.snapshot.jobs.values() if who.sees_all or row.owner == who.name]
        return [await self.job(who, row.id) for row in sorted(rows, key=lambda row: row.created_at)]

    async def renew(self, who: Identity, job_id: str) -> None:
        """The job's owner is still there.

        Raises:
            NotFound, Conflict: the job ended, or is being stopped.
        """
        job = await self._find_job(who, job_id)
        if job.ended_at is not None:
            raise Conflict(f"job {job_id} has ended: {job.reason}")
        self._core.note_renewed(job_id)

    async def stop_job(self, who: Identity, job_id: str) -> Job:
        """Stop a job; said again, nothing changes."""
        job = await self._find_job(who, job_id)
        reason = "stopped" if who.name == job.owner else f"ended by {who.name}"

        def edit(draft: Draft) -> None:
            if job_id in draft.jobs:
                draft.put_job(job_rules.stop(draft.jobs[job_id], reason, draft.now))

        await self._core.ledger.change(edit)
        return await self.job(who, job_id)

    # -- the cluster ----------------------------------------------------------------------------------------------

    def cluster_view(self) -> ClusterView:
        """Everything as everybody sees it."""
        return views.build_cluster(
            cluster=self._core.cluster,
            snapshot=self._core.ledger.snapshot,
            inventory=self._core.inventory,
            engine=self._core.engine,
            now=self._core.clock.now(),
            monotonic=self._core.clock.monotonic(),
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _add_notebook(self, draft: Draft, owner: str, request: LeaseRequest) -> LeaseRow:
        known = intake.notebook_lease(draft, owner, request.server)
        if known is not None and known.profile == request.profile:
            return known
        if known is not None and known.state is LeaseState.ACTIVE:
            raise Conflict(
                f"this server of {owner} runs with profile {known.profile!r}: stop it before starting it with "
                f"{request.profile!r}"
            )
        lease = intake.build_notebook_lease(cluster=self._core.cluster, draft=draft, owner=owner, request=request)
        self._refuse_hopeless(lease, None)
        if known is not None:
            draft.put_lease(leases.release(known, f"{request.profile} was chosen instead", draft.now))
        intake.refuse_too_many(draft, owner, self._core.cluster.users.max_waiting)
        return draft.put_lease(lease)

    def _add_job(self, draft: Draft, owner: str, request: JobRequest) -> JobRow:
        known = next((j for j in draft.jobs.values() if (j.owner, j.run_id) == (owner, request.run_id)), None)
        if known is not None:
            return known
        notebook = intake.notebook_lease(draft, owner, request.server)
        job, lease = intake.build_job(
            cluster=self._core.cluster, draft=draft, owner=owner, request=request, notebook=notebook
        )
        self._refuse_hopeless(lease, notebook)
        intake.refuse_too_many(draft, owner, self._core.cluster.users.max_waiting)
        draft.put_lease(lease)
        return draft.put_job(job)

    def _refuse_hopeless(self, lease: LeaseRow, notebook: LeaseRow | None) -> None:
        intake.refuse_hopeless(
            lease=lease,
            notebook=notebook,
            cluster=self._core.cluster,
            inventory=self._core.inventory,
            engine=self._core.engine,
        )

    def _owner(self, who: Identity, named: str | None) -> str:
        if named is None and who.is_user:
            return who.name
        if named is None:
            raise InvalidRequest("owner: a service says for which user it asks")
        if named != who.name and not who.any_owner:
            raise NotAllowed(f"{who.name} may not ask for GPUs in the name of {named}")
        return named

    async def _find_lease(self, who: Identity, lease_id: str) -> LeaseRow:
        lease = self._core.ledger.snapshot.leases.get(lease_id)
        if lease is None:
            lease = await asyncio.to_thread(self._core.store.lease, lease_id)
        if lease is None or not (who.sees_all or lease.owner == who.name):
            raise NotFound(f"there is no lease {lease_id!r} of yours")
        return lease

    async def _find_job(self, who: Identity, job_id: str) -> JobRow:
        job = self._core.ledger.snapshot.jobs.get(job_id)
        if job is None:
            job = await asyncio.to_thread(self._core.store.job, job_id)
        if job is None or not (who.sees_all or job.owner == who.name):
            raise NotFound(f"there is no job {job_id!r} of yours")
        return job

    def _note_asked(self, who: Identity, lease: LeaseRow) -> None:
        if who.any_owner and lease.is_open:
            self._core.note_asked(lease.id)


def _open_lease(draft: Draft, lease_id: str) -> LeaseRow:
    lease = draft.leases.get(lease_id)
    if lease is None:
        raise Conflict(f"lease {lease_id} has ended")
    return lease
