"""What the broker does for its callers: each operation is one change of the ledger, or a look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gpuhub.broker import intake, job_rules, leases, schedule, views
from gpuhub.broker.auth import Identity
from gpuhub.broker.clock import Clock
from gpuhub.broker.ledger import Draft, Ledger
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import (
    Activation,
    ClusterView,
    Job,
    JobRequest,
    Lease,
    LeaseRequest,
    LeaseState,
    Purpose,
)
from gpuhub.broker.store import SeenGpu, Store
from gpuhub.engines.base import Engine, Wait
from gpuhub.errors import Conflict, InvalidRequest, NotAllowed, NotFound
from gpuhub.nodes.inventory import Inventory, NodeRecord
from gpuhub.settings import Cluster


class Broker:
    """The owner of every lease."""

    def __init__(
        self, *, cluster: Cluster, store: Store, engine: Engine, inventory: Inventory, clock: Clock | None = None
    ) -> None:
        self.cluster = cluster
        self.clock = clock or Clock()
        self.inventory = inventory
        self._engine = engine
        self._store = store
        self.ledger = Ledger(store, self._settle, self.clock)
        self._started = self.clock.monotonic()
        #: When a spawner last asked for a notebook's lease, and a client last renewed a job; monotonic.
        self._asked: dict[str, float] = {}
        self._renewed: dict[str, float] = {}

    # -- leases ---------------------------------------------------------------------------------------------------

    async def request_lease(self, who: Identity, request: LeaseRequest) -> Lease:
        """Ask for a notebook's lease; one that its server has already is returned.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, Conflict (the server runs with another profile).
        """
        owner = self._owner(who, request.owner)
        lease = await self.ledger.change(lambda draft: self._add_notebook(draft, owner, request))
        self._note_asked(who, lease)
        return await self.lease(who, lease.id)

    async def lease(self, who: Identity, lease_id: str) -> Lease:
        """A lease, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        lease = await self._find_lease(who, lease_id)
        self._note_asked(who, lease)
        snapshot = self.ledger.snapshot
        return views.build_lease(lease, snapshot.lease_version(lease), snapshot.places.get(lease.id))

    async def wait_lease(self, who: Identity, lease_id: str, version: int | None, wait_s: float) -> Lease:
        """The lease as soon as its version is another one, at the latest after `wait_s`."""
        deadline = self.clock.monotonic() + wait_s
        while True:
            changed = self.ledger.changed
            lease = await self.lease(who, lease_id)
            if not await self._wait(changed, deadline, is_news=version is None or lease.version != version):
                return lease

    def leases(self, who: Identity) -> list[Lease]:
        """Leases that have not ended: one's own, or all."""
        snapshot = self.ledger.snapshot
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

        await self.ledger.change(edit)
        return await self.lease(who, lease_id)

    async def release(self, who: Identity, lease_id: str) -> Lease:
        """End a lease; said again, nothing changes. A job's lease ends with its job."""
        lease = await self._find_lease(who, lease_id)
        reason = "stopped" if who.name == lease.owner or who.any_owner else f"ended by {who.name}"
        await self.end_leases({lease_id: reason})
        return await self.lease(who, lease_id)

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def request_job(self, who: Identity, request: JobRequest) -> Job:
        """Ask for workers; a run that has a job already gets that job.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting.
        """
        if not who.is_user:
            raise NotAllowed("a job is asked for by a user, not by a service")
        known = await asyncio.to_thread(self._store.job_of_run, who.name, request.run_id)
        if known is None:
            known = await self.ledger.change(lambda draft: self._add_job(draft, who.name, request))
        return await self.job(who, known.id)

    async def job(self, who: Identity, job_id: str) -> Job:
        """A job, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        job = await self._find_job(who, job_id)
        lease = self.ledger.snapshot.leases.get(job.lease_id)
        if lease is None or not job.is_open:
            lease = await asyncio.to_thread(self._store.lease, job.lease_id)
        if lease is None:
            raise NotFound(f"there is no job {job_id!r}")
        return views.build_job(job, lease, self.ledger.snapshot, float(self.cluster.jobs.renew_within))

    async def wait_job(self, who: Identity, job_id: str, version: int | None, wait_s: float) -> Job:
        """The job as soon as its version is another one, at the latest after `wait_s`."""
        deadline = self.clock.monotonic() + wait_s
        while True:
            changed = self.ledger.changed
            job = await self.job(who, job_id)
            if not await self._wait(changed, deadline, is_news=version is None or job.version != version):
                return job

    async def jobs(self, who: Identity) -> list[Job]:
        """Jobs that have not ended: one's own, or all."""
        rows = [row for row in self.ledger.snapshot.jobs.values() if who.sees_all or row.owner == who.name]
        return [await self.job(who, row.id) for row in sorted(rows, key=lambda row: row.created_at)]

    async def renew(self, who: Identity, job_id: str) -> None:
        """The job's owner is still there.

        Raises:
            NotFound, Conflict: the job ended, or is being stopped.
        """
        job = await self._find_job(who, job_id)
        if job.ended_at is not None:
            raise Conflict(f"job {job_id} has ended: {job.reason}")
        self._renewed[job_id] = self.clock.monotonic()

    async def stop_job(self, who: Identity, job_id: str) -> Job:
        """Stop a job; said again, nothing changes."""
        job = await self._find_job(who, job_id)
        reason = "stopped" if who.name == job.owner else f"ended by {who.name}"

        def edit(draft: Draft) -> None:
            if job_id in draft.jobs:
                draft.put_job(job_rules.stop(draft.jobs[job_id], reason, draft.now))

        await self.ledger.change(edit)
        return await self.job(who, job_id)

    # -- the cluster ----------------------------------------------------------------------------------------------

    def cluster_view(self) -> ClusterView:
        """Everything as everybody sees it."""
        return views.build_cluster(
            cluster=self.cluster,
            snapshot=self.ledger.snapshot,
            inventory=self.inventory,
            engine=self._engine,
            now=self.clock.now(),
            monotonic=self.clock.monotonic(),
        )

    async def observe(self, record: NodeRecord) -> None:
        """A node was read: whoever waits may be served."""
        self.inventory = self.inventory.with_node(record)
        if self.ledger.snapshot.places:
            await self.ledger.change(lambda _: None)

    async def remember_gpus(self, record: NodeRecord) -> None:
        """Keep what GPUs a node has, for times when it does not answer."""
        now = self.clock.now()
        seen = [
            SeenGpu(
                uuid=gpu.uuid,
                node=record.name,
                index=gpu.index,
                model=gpu.model,
                memory_mib=gpu.memory_mib,
                seen_at=now,
            )
            for gpu in record.gpus
            if gpu.is_listed
        ]
        await asyncio.to_thread(self._store.save_seen, record.name, seen)

    async def end_leases(self, reasons: dict[str, str]) -> None:
        """Let leases end, each for its reason; those that have ended are left alone."""

        def edit(draft: Draft) -> None:
            for lease_id, reason in reasons.items():
                if lease_id in draft.leases:
                    draft.put_lease(leases.release(draft.leases[lease_id], reason, draft.now))

        await self.ledger.change(edit)

    async def edit_jobs(self, edits: Iterable[tuple[str, Callable[[JobRow, float], JobRow]]]) -> None:
        """Change jobs in one transaction; those that have ended are left alone."""
        todo = list(edits)

        def edit(draft: Draft) -> None:
            for job_id, change in todo:
                if job_id in draft.jobs:
                    draft.put_job(change(draft.jobs[job_id], draft.now))

        await self.ledger.change(edit)

    async def prove_gone(self, lease_ids: Iterable[str], node: str) -> None:
        """The node's daemon shows no container of these leases."""
        todo = list(lease_ids)

        def edit(draft: Draft) -> None:
            for lease_id in todo:
                lease = draft.leases.get(lease_id)
                if lease is not None and lease.state is LeaseState.RELEASING:
                    draft.put_lease(leases.prove_gone(lease, node, draft.now))

        await self.ledger.change(edit)

    def unasked_s(self, lease: LeaseRow) -> float:
        """For how long no spawner has asked for a lease, seconds; a restart of the broker begins anew."""
        since_asked = self.clock.monotonic() - self._asked.get(lease.id, self._started)
        return min(since_asked, self.clock.now() - lease.created_at)

    def unrenewed_s(self, job: JobRow) -> float:
        """For how long a job was not renewed, seconds; a restart of the broker begins anew."""
        since_renewed = self.clock.monotonic() - self._renewed.get(job.id, self._started)
        return min(since_renewed, self.clock.now() - job.created_at)

    def forget_ended(self) -> None:
        """Drop what is remembered of leases and jobs that have ended."""
        snapshot = self.ledger.snapshot
        self._asked = {key: value for key, value in self._asked.items() if key in snapshot.leases}
        self._renewed = {key: value for key, value in self._renewed.items() if key in snapshot.jobs}

    # -- inside ---------------------------------------------------------------------------------------------------

    def _settle(self, draft: Draft) -> dict[str, Wait]:
        return dict(
            schedule.settle(
                draft,
                engine=self._engine,
                inventory=self.inventory,
                max_gpus=self.cluster.users.max_gpus,
                monotonic=self.clock.monotonic(),
            )
        )

    def _add_notebook(self, draft: Draft, owner: str, request: LeaseRequest) -> LeaseRow:
        known = intake.notebook_lease(draft, owner, request.server)
        if known is not None and known.profile == request.profile:
            return known
        if known is not None and known.state is LeaseState.ACTIVE:
            raise Conflict(
                f"this server of {owner} runs with profile {known.profile!r}: stop it before starting it with "
                f"{request.profile!r}"
            )
        lease = intake.build_notebook_lease(cluster=self.cluster, draft=draft, owner=owner, request=request)
        intake.refuse_hopeless(
            lease=lease, notebook=None, cluster=self.cluster, inventory=self.inventory, engine=self._engine
        )
        if known is not None:
            draft.put_lease(leases.release(known, f"{request.profile} was chosen instead", draft.now))
        intake.refuse_too_many(draft, owner, self.cluster.users.max_waiting)
        return draft.put_lease(lease)

    def _add_job(self, draft: Draft, owner: str, request: JobRequest) -> JobRow:
        known = next((j for j in draft.jobs.values() if (j.owner, j.run_id) == (owner, request.run_id)), None)
        if known is not None:
            return known
        notebook = intake.notebook_lease(draft, owner, request.server)
        job, lease = intake.build_job(
            cluster=self.cluster, draft=draft, owner=owner, request=request, notebook=notebook
        )
        intake.refuse_hopeless(
            lease=lease, notebook=notebook, cluster=self.cluster, inventory=self.inventory, engine=self._engine
        )
        intake.refuse_too_many(draft, owner, self.cluster.users.max_waiting)
        draft.put_lease(lease)
        return draft.put_job(job)

    def _owner(self, who: Identity, named: str | None) -> str:
        if named is None and who.is_user:
            return who.name
        if named is None:
            raise InvalidRequest("owner: a service says for which user it asks")
        if named != who.name and not who.any_owner:
            raise NotAllowed(f"{who.name} may not ask for GPUs in the name of {named}")
        return named

    async def _find_lease(self, who: Identity, lease_id: str) -> LeaseRow:
        lease = self.ledger.snapshot.leases.get(lease_id)
        if lease is None:
            lease = await asyncio.to_thread(self._store.lease, lease_id)
        if lease is None or not (who.sees_all or lease.owner == who.name):
            raise NotFound(f"there is no lease {lease_id!r} of yours")
        return lease

    async def _find_job(self, who: Identity, job_id: str) -> JobRow:
        job = self.ledger.snapshot.jobs.get(job_id)
        if job is None:
            job = await asyncio.to_thread(self._store.job, job_id)
        if job is None or not (who.sees_all or job.owner == who.name):
            raise NotFound(f"there is no job {job_id!r} of yours")
        return job

    def _note_asked(self, who: Identity, lease: LeaseRow) -> None:
        if who.any_owner and lease.is_open:
            self._asked[lease.id] = self.clock.monotonic()

    async def _wait(self, changed: asyncio.Event, deadline: float, *, is_news: bool) -> bool:
        """Wait for a change; False when there is nothing (more) to wait for."""
        left = deadline - self.clock.monotonic()
        if is_news or left <= 0:
            return False
        try:
            await asyncio.wait_for(changed.wait(), left)
        except TimeoutError:
            # One more look, so that a long poll answers what is true at its end.
            return True
        return True


def _open_lease(draft: Draft, lease_id: str) -> LeaseRow:
    lease = draft.leases.get(lease_id)
    if lease is None:
        raise Conflict(f"lease {lease_id} has ended")
    return lease
