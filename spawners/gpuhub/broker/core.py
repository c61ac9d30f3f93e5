"""The broker's inside: the ledger with what is known beside it, as the keeper's loops and the service use it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpuhub.broker import edits
from gpuhub.broker.clock import Clock, wait_event
from gpuhub.broker.cordons import Cordon
from gpuhub.broker.dispatcher import Dispatcher
from gpuhub.broker.events import EventLog
from gpuhub.broker.health import Guards
from gpuhub.broker.ledger import Draft, Ledger
from gpuhub.broker.places import Place, Places
from gpuhub.broker.presence import Presence
from gpuhub.broker.rows import EventRow, JobRow, LeaseRow, ReservationRow
from gpuhub.broker.store import Store
from gpuhub.broker.supply import Supply, build_seen
from gpuhub.engines.base import Engine, Rights, Usage
from gpuhub.errors import GpuhubError
from gpuhub.gpus import Card
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.records import NodeRecord
from gpuhub.settings import Cluster

__all__ = ["Core", "wait_event"]

log = logging.getLogger(__name__)

#: Between two looks at what only time brings about here, seconds.
HOUSEKEEPING_S = 1.0
#: Between two looks for jobs that ended too long ago to be told of, seconds.
FORGET_S = 3600.0


class Core:
    """One ledger, one inventory, one engine."""

    def __init__(
        self, *, cluster: Cluster, store: Store, engine: Engine, inventory: Inventory, clock: Clock | None = None
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.engine = engine
        self.clock = clock or Clock()
        self.supply = Supply(
            cluster=cluster,
            inventory=inventory,
            clock=self.clock,
            cordons={cordon.node: cordon for cordon in store.cordons()},
            reservations=store.reservations(),
        )
        self._dispatcher = Dispatcher(
            cluster=cluster, store=store, engine=engine, supply=self.supply, clock=self.clock, wake=self.decide_soon
        )
        self.ledger = Ledger(store, self._dispatcher, self.clock)
        self._places = Places(self.ledger, engine, self.clock)
        self._events = EventLog(store.save_events)
        self._presence = Presence(self.clock)
        self._housekeeping: asyncio.Task[None] | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._is_undecided = False

    # -- what is known --------------------------------------------------------------------------------------------

    @property
    def inventory(self) -> Inventory:
        """What is known of the nodes."""
        return self.supply.inventory

    @property
    def guards(self) -> Guards:
        """What is known of GPUs' leases in this run."""
        return self.supply.guards

    @property
    def cordons(self) -> Mapping[str, Cordon]:
        """Cordoned and draining nodes."""
        return self.supply.cordons

    @property
    def reservations(self) -> Sequence[ReservationRow]:
        """Reservations that have not ended, the earliest first."""
        now = self.clock.now()
        return [row for row in self.supply.reservations if row.ends_at > now]

    def places(self) -> Mapping[str, Place]:
        """Where waiting requests stand; each is worked out when it is looked at."""
        return self._places.refresh()

    def cards(self) -> Mapping[str, tuple[Card, ...] | None]:
        """The cards of every node, reachable or not; None where nobody knows yet. Another value when they changed."""
        return self.supply.cards

    def rights(self, owner: str) -> Rights:
        """What an owner may have, by the groups that were last heard of."""
        return self._dispatcher.rights(owner)

    def note_groups(self, owner: str, hub_groups: frozenset[str]) -> None:
        """An owner's groups in the hub, as somebody who knows says."""
        self._dispatcher.note_groups(owner, hub_groups)

    def usage(self) -> Mapping[str, Usage]:
        """What owners have and had."""
        return self.engine.usage(self.clock.now())

    def lease_version(self, lease: LeaseRow) -> int:
        """The version of a lease as its owner sees it."""
        place = self.places().get(lease.id)
        return lease.version if place is None else max(lease.version, place.version)

    def leases_on(self, node: str) -> list[LeaseRow]:
        """Open leases that have, or are to have, containers on a node."""
        rows = self.ledger.snapshot.leases
        return [rows[lease] for lease in sorted(self.ledger.index.find("node", node)) if lease in rows]

    # -- beginning and end ----------------------------------------------------------------------------------------

    async def take_up(self) -> None:
        """Begin where an earlier run ended, before anybody asks.

        A node that the administrator took out of the settings gives its leases back. Should it return, whatever
        still runs there belongs to no lease and is removed before the node gets work.
        """
        await self.ledger.change(edits.leave_the_future)
        await self.ledger.change(edits.give_up_nodes(self.inventory.nodes))
        for node in self.cordons.keys() - self.inventory.nodes.keys():
            # It was drained to be taken out: should it be added again, it is to take work.
            await self.supply.set_cordon(self.store, node, None)
        self._housekeeping = asyncio.ensure_future(self._keep_house())

    async def close(self) -> None:
        """Stop what runs here, and write what was told."""
        tasks = [task for task in (self._housekeeping, self._deciding) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._dispatcher.close()
        await self.ledger.close()
        await self._events.close()

    async def _keep_house(self) -> None:
        forget_at = self.clock.monotonic() + FORGET_S
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            try:
                await self.follow_clock()
                if self.clock.monotonic() >= forget_at:
                    forget_at += FORGET_S
                    await self.forget_jobs()
                if await self.supply.forget_reservations(self.store):
                    self._dispatcher.tell_reservations()
            except GpuhubError as error:
                log.warning("housekeeping is tried again: %s", error)
            except Exception:
                log.exception("housekeeping failed unexpectedly")

    async def forget_jobs(self) -> None:
        """Drop jobs that ended too long ago to be told of."""
        before = self.clock.now() - self.cluster.jobs.remember
        if count := await asyncio.to_thread(self.store.forget_jobs, before):
            log.info("%s jobs that ended long ago are forgotten", count)

    async def follow_clock(self) -> None:
        """When the machine's clock was set, move all moments of what is open by as much, so that nothing ends by it."""
        jump = self.clock.jump()
        if not jump:
            return

        def edit(draft: Draft) -> None:
            edits.follow_clock(draft, jump)
            draft.after.append(lambda: self.clock.follow(jump))
            draft.after.append(self._dispatcher.abandon)

        await self.ledger.change(edit)
        log.warning("the head node's clock was set by %+.0f s", jump)

    # -- changes --------------------------------------------------------------------------------------------------

    def decide_soon(self) -> None:
        """Serve the queue again, though nothing of it changed."""
        # One that is under way may have decided already, and only be storing that.
        self._is_undecided = True
        if self._deciding is None or self._deciding.done():
            self._deciding = asyncio.ensure_future(self._decide())

    async def _decide(self) -> None:
        while self._is_undecided:
            self._is_undecided = False
            try:
                await self.ledger.change(lambda _: None)
            except GpuhubError as error:
                log.warning("the queue is served later: %s", error)

    async def cordon(self, node: str, cordon: Cordon | None) -> None:
        """Let a node take no new work; None takes the cordon away."""
        await self.supply.set_cordon(self.store, node, cordon)
        self._dispatcher.tell_node(node)
        self.decide_soon()

    async def add_reservation(self, row: ReservationRow) -> None:
        """Keep GPUs from now on."""
        await self.supply.add_reservation(self.store, row)
        self._dispatcher.tell_reservations()
        self.decide_soon()

    async def drop_reservation(self, reservation_id: str) -> None:
        """Keep them no longer."""
        await self.supply.drop_reservations(self.store, [reservation_id])
        self._dispatcher.tell_reservations()
        self.decide_soon()

    async def observe(self, record: NodeRecord) -> None:
        """A node was read: whoever waits may be served."""
        self.supply.observe(record)
        if self._dispatcher.tell_node(record.name) and self.ledger.index.find("waiting"):
            await self.ledger.change(lambda _: None)

    async def remember_gpus(self, record: NodeRecord) -> None:
        """Keep what GPUs a node has, for times when it does not answer."""
        seen = build_seen(record, self.clock.now())
        await asyncio.to_thread(self.store.save_seen, record.name, seen)

    async def end_leases(self, reasons: Mapping[str, str]) -> None:
        """Let leases end, each for its reason; those that have ended are left alone."""
        await self.ledger.change(edits.end(reasons))

    async def edit_jobs(self, changes: Iterable[tuple[str, Callable[[JobRow, float], JobRow]]]) -> None:
        """Change jobs in one transaction; those that have ended are left alone."""
        await self.ledger.change(edits.change_jobs(list(changes)))

    async def prove_gone(self, lease_ids: Iterable[str], node: str) -> None:
        """The node's daemon shows no container of these leases, or none of what they are to give back there."""
        await self.ledger.change(edits.prove_gone(list(lease_ids), node))

    async def quarantine(self, reasons: Mapping[str, str]) -> None:
        """Releasing leases that lack proof for too long, each with why; others are left alone."""
        await self.ledger.change(edits.quarantine(reasons))

    async def force(self, lease_id: str, by: str) -> None:
        """An administrator frees the GPUs of an ending lease without proof.

        Raises:
            Conflict: it was not asked to end.
        """
        await self.ledger.change(edits.force(lease_id, by))

    # -- telling --------------------------------------------------------------------------------------------------

    def note_event(
        self,
        kind: str,
        text: str,
        *,
        owner: str | None = None,
        lease: str | None = None,
        job: str | None = None,
        node: str | None = None,
    ) -> None:
        """Tell of something that is no change of a lease or job; written a little later."""
        self._events.note(
            EventRow(at=self.clock.now(), kind=kind, text=text, owner=owner, lease=lease, job=job, node=node)
        )

    async def read_events(self, after: int | None, limit: int, owner: str | None) -> list[EventRow]:
        """Events of one owner, or all; see `Store.events`."""
        await self._events.flush()
        return await asyncio.to_thread(self.store.events, after=after, limit=limit, owner=owner)

    # -- who is still there ---------------------------------------------------------------------------------------

    def unasked_s(self, lease: LeaseRow) -> float:
        """For how long no spawner has asked for a lease, seconds; a restart of the broker begins anew."""
        return self._presence.silent_s(lease.id, lease.created_at)

    def unrenewed_s(self, job: JobRow) -> float:
        """For how long a job was not renewed, seconds; a restart of the broker begins anew."""
        return self._presence.silent_s(job.id, job.created_at)

    def forget_ended(self) -> None:
        """Drop what is remembered of leases and jobs that have ended."""
        self._presence.forget(self.ledger.snapshot)

    def note_asked(self, lease_id: str) -> None:
        """A spawner asks for a lease."""
        self._presence.note(lease_id)

    def note_renewed(self, job_id: str) -> None:
        """A job's owner is still there."""
        self._presence.note(job_id)
