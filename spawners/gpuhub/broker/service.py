"""What the broker does for its callers: each operation is one change of the ledger, or a look at it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from gpuhub.broker import administration, extensions, job_rules, leases, slots, views
from gpuhub.broker import reservations as reservation_rules
from gpuhub.broker.auth import Identity
from gpuhub.broker.core import Core
from gpuhub.broker.desk import Desk
from gpuhub.broker.drafts import Draft
from gpuhub.broker.glances import Glances
from gpuhub.broker.looks import Looks
from gpuhub.broker.polling import Look, poll
from gpuhub.broker.rows import LeaseRow
from gpuhub.broker.schemas import (
    Activation,
    ArrayRequest,
    ClusterView,
    CordonRequest,
    Event,
    Extension,
    Job,
    JobRequest,
    JobState,
    Lease,
    LeaseRequest,
    LeaseState,
    NodeView,
    Purpose,
    Reservation,
    ReservationRequest,
    UsageView,
    Why,
)
from gpuhub.errors import Conflict

#: The most jobs that are told of, where those that ended are among them.
MOST_JOBS = 200


class Broker:
    """The owner of every lease."""

    def __init__(self, core: Core, *, refuse: Callable[[LeaseRow], None] | None = None) -> None:
        """`refuse` raises for what nobody could ever grant, besides what the engine and the settings say."""
        self._core = core
        self._desk = Desk(core, refuse)
        self._looks = Looks(core)
        self._glances = Glances(core)
        self._slots = slots.Slots()

    # -- leases ---------------------------------------------------------------------------------------------------

    async def request_lease(self, who: Identity, request: LeaseRequest) -> Lease:
        """Ask for a notebook's lease; one that its server has already is returned, and so is, ended or not, the one
        that was asked for with the same key.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, Conflict (the server runs with another profile, or the key
            was used for something else).
        """
        lease = await self._desk.request_lease(who, request)
        self._note_asked(who, lease)
        return await self.lease(who, lease.id)

    async def lease(self, who: Identity, lease_id: str) -> Lease:
        """A lease, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        lease = await self._looks.find_lease(who, lease_id)
        self._note_asked(who, lease)
        return self._looks.show_lease(lease)

    async def wait_lease(self, who: Identity, lease_id: str, version: int | None, wait_s: float) -> Lease:
        """The lease as soon as its version is another one, at the latest after `wait_s`.

        Raises:
            NotFound, TooManyStreams.
        """

        async def look() -> tuple[int, bool]:
            row = await self._looks.find_lease(who, lease_id)
            self._note_asked(who, row)
            return self._core.lease_version(row), row.state is LeaseState.REQUESTED

        await self._poll(who, lease_id, look, version, wait_s)
        return await self.lease(who, lease_id)

    def leases(self, who: Identity) -> list[Lease]:
        """Leases that have not ended: one's own, or all."""
        rows = self._core.ledger.snapshot.leases
        ids = rows if who.sees_all else self._core.ledger.index.find("owner", who.name)
        found = sorted((rows[one] for one in ids if one in rows), key=lambda row: row.seq)
        return [self._looks.show_lease(lease) for lease in found]

    async def activate(self, who: Identity, lease_id: str, activation: Activation) -> Lease:
        """The notebook's container exists; only then may it be started.

        Raises:
            NotFound, Conflict: the lease is not granted (any more).
        """
        lease = await self._looks.find_lease(who, lease_id)
        if lease.purpose is not Purpose.NOTEBOOK:
            raise Conflict("a job's lease is activated by the broker itself")

        def edit(draft: Draft) -> None:
            current = _open_lease(draft, lease_id)
            draft.put_lease(leases.activate(current, activation.container_id, draft.now))

        await self._core.ledger.change(edit)
        return await self.lease(who, lease_id)

    async def release(self, who: Identity, lease_id: str) -> Lease:
        """End a lease; said again, nothing changes. A job's lease ends with its job."""
        lease = await self._looks.find_lease(who, lease_id)
        reason = "stopped" if who.name == lease.owner or who.any_owner else f"ended by {who.name}"
        await self._core.end_leases({lease_id: reason})
        return await self.lease(who, lease_id)

    async def extend(self, who: Identity, lease_id: str, extension: Extension) -> Lease:
        """Let a lease end so many seconds from now.

        Raises:
            NotFound, InvalidRequest (beyond a limit), Conflict (it does not go on, or others wait for its GPUs).
        """
        await self._looks.find_lease(who, lease_id)
        await extensions.extend(self._core, lease_id, extension.time_limit_s)
        return await self.lease(who, lease_id)

    async def why(self, who: Identity, lease_id: str) -> Why:
        """Why a request waits.

        Raises:
            NotFound, Conflict: it does not wait.
        """
        lease = await self._looks.find_lease(who, lease_id)
        if lease.state is not LeaseState.REQUESTED:
            raise Conflict(f"lease {lease_id} is {lease.state}: it waits for nothing")
        try:
            why = self._core.engine.why(lease_id, self._core.clock.now(), in_full=True)
        except KeyError:
            raise Conflict(f"lease {lease_id} is being granted at this moment") from None
        return views.build_why(lease, why)

    async def force(self, who: Identity, lease_id: str) -> Lease:
        """Free the GPUs of an ending lease without proof.

        Raises:
            NotAllowed, NotFound, Conflict: it was not asked to end.
        """
        administration.refuse_others(who, "free GPUs without proof")
        await self._looks.find_lease(who, lease_id)
        await self._core.force(lease_id, who.name)
        return await self.lease(who, lease_id)

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def request_job(self, who: Identity, request: JobRequest) -> Job:
        """Ask for workers; a run that has a job already gets that job.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, TooManyJobs.
        """
        job = await self._desk.request_job(who, request)
        return await self.job(who, job.id)

    async def request_array(self, who: Identity, request: ArrayRequest) -> list[Job]:
        """Ask for many jobs of one GPU each, all or none; runs that have a job already keep it.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, TooManyJobs.
        """
        rows = await self._desk.request_array(who, request)
        return [await self.job(who, row.id) for row in rows]

    async def job(self, who: Identity, job_id: str) -> Job:
        """A job, ended or not.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        return await self._looks.show_job(await self._looks.find_job(who, job_id))

    async def wait_job(self, who: Identity, job_id: str, version: int | None, wait_s: float) -> Job:
        """The job as soon as its version is another one, at the latest after `wait_s`.

        Raises:
            NotFound, TooManyStreams.
        """

        async def look() -> tuple[int, bool]:
            job = await self.job(who, job_id)
            return job.version, job.state is JobState.WAITING

        await self._poll(who, job_id, look, version, wait_s)
        return await self.job(who, job_id)

    async def jobs(self, who: Identity, *, ended: bool = False) -> list[Job]:
        """Jobs that have not ended: one's own, or all. With `ended`, also those that ended lately: the `MOST_JOBS`
        that were asked for last, newest first.
        """
        rows = self._core.ledger.snapshot.jobs
        ids = rows if who.sees_all else self._core.ledger.index.find("jobs of owner", who.name)
        found = sorted((rows[one] for one in ids if one in rows), key=lambda row: (row.created_at, row.run_id))
        if not ended:
            return [await self.job(who, row.id) for row in found]
        shown = [await self.job(who, row.id) for row in reversed(found[-MOST_JOBS:])]
        over = await self._looks.ended_jobs(who, MOST_JOBS - len(shown))
        known = {job.id for job in shown}
        both = [*shown, *(job for job in over if job.id not in known)]
        return sorted(both, key=lambda job: (job.created_at, job.run_id), reverse=True)

    async def renew(self, who: Identity, job_id: str) -> None:
        """The job's owner is still there.

        Raises:
            NotFound, Conflict: the job ended, or is being stopped.
        """
        job = await self._looks.find_job(who, job_id)
        if job.ended_at is not None:
            raise Conflict(f"job {job_id} has ended: {job.reason}")
        self._core.note_renewed(job_id)

    async def stop_job(self, who: Identity, job_id: str) -> Job:
        """Stop a job; said again, nothing changes."""
        job = await self._looks.find_job(who, job_id)
        reason = "stopped" if who.name == job.owner else f"ended by {who.name}"

        def edit(draft: Draft) -> None:
            if job_id in draft.jobs:
                draft.put_job(job_rules.stop(draft.jobs[job_id], reason, draft.now))

        await self._core.ledger.change(edit)
        return await self.job(who, job_id)

    # -- the cluster ----------------------------------------------------------------------------------------------

    def cluster_view(self, who: Identity | None = None) -> ClusterView:
        """Everything as everybody sees it; what starts at once is told for who looks."""
        return administration.view_cluster(self._core, who)

    def cluster_json(self, who: Identity) -> bytes:
        """The same as JSON; at a large cluster some moments old."""
        return self._glances.look(who)

    async def usage(self, who: Identity, owner: str | None) -> list[UsageView]:
        """What owners have, had and may have: one's own, or all.

        Raises:
            NotAllowed: somebody else's.
        """
        return administration.view_usage(self._core, who, owner)

    async def events(self, who: Identity, after: int | None, limit: int) -> list[Event]:
        """What the broker did and found out: about one's own leases, or all; oldest first."""
        rows = await self._core.read_events(after, limit, None if who.sees_all else who.name)
        return [administration.view_event(row) for row in rows]

    def reservations(self) -> list[Reservation]:
        """Reservations that have not ended."""
        return [reservation_rules.for_wire(row) for row in self._core.reservations]

    # -- for administrators ---------------------------------------------------------------------------------------

    async def reserve(self, who: Identity, request: ReservationRequest) -> Reservation:
        """Keep GPUs for some users in a window.

        Raises:
            NotAllowed, InvalidRequest, Conflict (another reservation keeps some of them).
        """
        return await administration.reserve(self._core, who, request)

    async def cancel_reservation(self, who: Identity, reservation_id: str) -> None:
        """Keep them no longer.

        Raises:
            NotAllowed, NotFound.
        """
        await administration.cancel_reservation(self._core, who, reservation_id)

    async def cordon(self, who: Identity, node: str, request: CordonRequest) -> NodeView:
        """Let a node take no new work; what runs there goes on.

        Raises:
            NotAllowed, NotFound.
        """
        return await administration.cordon(self._core, who, node, request, is_drain=False)

    async def drain(self, who: Identity, node: str, request: CordonRequest) -> NodeView:
        """Let a node take no new work, and end what runs there after the grace.

        Raises:
            NotAllowed, NotFound.
        """
        return await administration.cordon(self._core, who, node, request, is_drain=True)

    async def undrain(self, who: Identity, node: str) -> NodeView:
        """Let a node take work again; what was to end for the drain and has not gets its time back.

        Raises:
            NotAllowed, NotFound.
        """
        return await administration.undrain(self._core, who, node)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _poll(self, who: Identity, what: str, look: Look, version: int | None, wait_s: float) -> None:
        core = self._core
        # The hub's spawner waits for everybody.
        place = nullcontext() if who.sees_all or not wait_s else self._slots.take(slots.POLLS, who.name)
        with place:
            await poll(ledger=core.ledger, clock=core.clock, what=what, look=look, version=version, wait_s=wait_s)

    def _note_asked(self, who: Identity, lease: LeaseRow) -> None:
        if who.any_owner and lease.is_open:
            self._core.note_asked(lease.id)


def _open_lease(draft: Draft, lease_id: str) -> LeaseRow:
    lease = draft.leases.get(lease_id)
    if lease is None:
        raise Conflict(f"lease {lease_id} has ended")
    return lease
