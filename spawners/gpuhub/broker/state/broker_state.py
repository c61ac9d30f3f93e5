"""The broker's state in memory: the ledger, the capacity, the queue positions and what keeps them up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker.state import mutations
from gpuhub.broker.state.capacity import Capacity
from gpuhub.broker.state.cost_meters import CostMeters
from gpuhub.broker.state.events import EventLog
from gpuhub.broker.state.idle_notebooks import IdleNotebooks
from gpuhub.broker.state.ledger import Ledger
from gpuhub.broker.state.output_shares import OutputShares
from gpuhub.broker.state.queue_positions import QueuePositions
from gpuhub.broker.state.scheduler_sync import SchedulerSync, find_usage_start
from gpuhub.broker.state.transaction import Transaction
from gpuhub.common.errors import GpuhubError
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import EventRow, JobRow, LeaseRow, LedgerSnapshot, NotificationRow, ReservationRow
from gpuhub.nodes import gpu_health
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.power_status import PowerStatus
from gpuhub.nodes.status import Cordon, GpuReading, NodeStatus
from gpuhub.scheduler.interface import Scheduler

log = logging.getLogger(__name__)

#: Interval of the housekeeping (clock, ended reservations), seconds.
HOUSEKEEPING_S = 1.0
#: Interval at which jobs and leases that ended long ago, and old events, are removed, seconds.
FORGET_S = 3600.0
#: Time that ended leases are kept at least, seconds, since weekly limits count their GPU-hours exactly.
LEASES_KEPT_S = 8 * 86400.0
#: Time that events are kept, seconds.
EVENTS_KEPT_S = 90 * 86400.0
NOTIFICATIONS_KEPT_S = 30 * 86400.0


class Heartbeats:
    """When each waiting lease was last polled and each job last renewed, in this run of the broker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._seen: dict[str, float] = {}

    def record(self, row_id: str) -> None:
        """Record a poll of a lease, or a renewal of a job."""
        self._seen[row_id] = self._clock.monotonic()

    def seconds_since_poll(self, lease: LeaseRow) -> float:
        """Return the seconds since a spawner polled the lease, counted from the broker's start at most."""
        return self._seconds_since(lease.id, lease.created_at)

    def seconds_since_renewal(self, job: JobRow) -> float:
        """Return the seconds since the job was renewed, counted from the broker's start at most."""
        return self._seconds_since(job.id, job.created_at)

    def forget_ended(self, snapshot: LedgerSnapshot) -> None:
        """Drop leases and jobs that have ended."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in snapshot.leases or key in snapshot.jobs}

    def _seconds_since(self, row_id: str, created_at: float) -> float:
        since_seen = self._clock.monotonic() - self._seen.get(row_id, self._started)
        return min(since_seen, self._clock.now() - created_at)


class BrokerState:
    """The parts of the broker's state, and the changes that concern several of them."""

    def __init__(
        self,
        *,
        cluster: ClusterSettings,
        store: Store,
        scheduler: Scheduler,
        inventory: Inventory,
        clock: Clock | None = None,
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.scheduler = scheduler
        self.clock = clock or Clock()
        self.capacity = Capacity(cluster=cluster, store=store, inventory=inventory, clock=self.clock)
        self.scheduler_sync = SchedulerSync(
            cluster=cluster,
            store=store,
            scheduler=scheduler,
            capacity=self.capacity,
            clock=self.clock,
            wake=self.request_scheduling,
        )
        self.ledger = Ledger(store, self.scheduler_sync, self.clock)
        self.queue_positions = QueuePositions(self.ledger, scheduler, self.clock)
        self.heartbeats = Heartbeats(self.clock)
        self.idle = IdleNotebooks(cluster=cluster, ledger=self.ledger, capacity=self.capacity, clock=self.clock)
        self.costs = CostMeters(
            cluster=cluster, store=store, ledger=self.ledger, capacity=self.capacity, clock=self.clock
        )
        self.shares = OutputShares(store.shares, self.clock)
        self._events = EventLog(store.save_events)
        self._housekeeping: list[asyncio.Task[None]] = []
        self._scheduling: asyncio.Task[None] | None = None
        self._needs_scheduling = False

    # -- start and end --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Continue where an earlier run ended, before any request is served.

        Leases on a node that is no longer in the settings are released. If the node returns, containers that still
        run there belong to no lease and are removed before the node gets work.
        """
        await self.costs.start()
        await self.ledger.change(mutations.clamp_future_timestamps)
        await self.ledger.change(mutations.release_removed_nodes(self.capacity.inventory.nodes))
        await self.capacity.gpu_records.remove_other_nodes(self.capacity.inventory.nodes)
        await asyncio.to_thread(self.store.power.delete_others, self.capacity.power)
        for node in self.capacity.cordons.keys() - self.capacity.inventory.nodes.keys():
            # The node was drained to be removed from the settings: if it is added again, it should take work.
            await self.capacity.set_cordon(node, None)
        self._housekeeping = [
            asyncio.ensure_future(self._run_housekeeping()),
            asyncio.ensure_future(self._run_forgetting()),
        ]

    async def close(self) -> None:
        """Stop all tasks, and write the events that are still in memory."""
        tasks = [task for task in (*self._housekeeping, self._scheduling) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.scheduler_sync.close()
        await self.ledger.close()
        try:
            await self.costs.close()
        except GpuhubError as error:
            log.warning("The last readings of costs are lost: %s", error)
        await self._events.close()

    async def _run_housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            try:
                await self.apply_clock_jump()
                if await self.capacity.remove_ended_reservations():
                    self.scheduler_sync.update_reservations()
            except GpuhubError as error:
                log.warning("Housekeeping is tried again: %s", error)
            except Exception:
                log.exception("Housekeeping failed unexpectedly")

    async def _run_forgetting(self) -> None:
        while True:
            await asyncio.sleep(FORGET_S)
            try:
                await self.forget_ended()
            except GpuhubError as error:
                log.warning("What ended long ago is removed later: %s", error)
            except Exception:
                log.exception("Removal of what ended long ago failed unexpectedly")

    async def forget_ended(self) -> None:
        """Remove jobs and leases that ended longer ago than `[jobs] remember`, and old events."""
        now, store = self.clock.now(), self.store
        self.ledger.ended_leases.clear()
        self.ledger.ended_jobs.clear()
        remembered_s = self.cluster.jobs.remember
        # Jobs first, since their leases are removed with the last of them.
        for what, delete, kept_s in (
            ("jobs", store.delete_ended_jobs, remembered_s),
            ("leases", store.delete_released_leases, max(remembered_s, LEASES_KEPT_S)),
            ("records of costs", store.costs.delete_ended, max(remembered_s, LEASES_KEPT_S)),
            ("events", store.delete_old_events, EVENTS_KEPT_S),
            ("notifications", store.outbox.delete_old, NOTIFICATIONS_KEPT_S),
        ):
            count = 0
            # In batches, between which the ledger can be written.
            while deleted := await asyncio.to_thread(delete, now - kept_s):
                count += deleted
            if count:
                log.info("%s %s from long ago are removed", count, what)
        await asyncio.to_thread(store.delete_old_usage, find_usage_start(self.cluster.scheduling, now))
        await asyncio.to_thread(store.costs.delete_days, int((now - self.cluster.costs.keep) // 86400))

    async def apply_clock_jump(self) -> None:
        """Move all times of open leases and jobs by a jump of the machine's clock, so that none of them ends by it."""
        jump = self.clock.measure_jump()
        if not jump:
            return

        def edit(transaction: Transaction) -> None:
            mutations.apply_clock_jump(transaction, jump)
            transaction.on_commit.append(lambda: self.clock.apply_jump(jump))
            transaction.on_commit.append(self.scheduler_sync.rollback)

        await self.ledger.change(edit)
        log.warning("The head node's clock was set by %+.0f s", jump)

    # -- changes --------------------------------------------------------------------------------------------------

    def request_scheduling(self) -> None:
        """Run a scheduling cycle soon, although nothing in the ledger has changed."""
        # A cycle that runs now may have decided already, and may only be storing its decision.
        self._needs_scheduling = True
        if self._scheduling is None or self._scheduling.done():
            self._scheduling = asyncio.ensure_future(self._run_scheduling())

    async def _run_scheduling(self) -> None:
        while self._needs_scheduling:
            self._needs_scheduling = False
            try:
                await self.ledger.change(lambda _: None)
            except GpuhubError as error:
                log.warning("The queue is served later: %s", error)

    async def cordon(self, node: str, cordon: Cordon | None) -> None:
        """Cordon a node; None removes the cordon."""
        await self.capacity.set_cordon(node, cordon)
        self.scheduler_sync.update_node(node)
        self.request_scheduling()

    async def set_power(self, power: PowerStatus) -> None:
        """Change whether a node is expected to be on; one that sleeps takes no work from now on."""
        await self.capacity.set_power(power)
        self.scheduler_sync.update_node(power.node)
        self.request_scheduling()

    async def add_reservation(self, row: ReservationRow) -> None:
        await self.capacity.add_reservation(row)
        self.scheduler_sync.update_reservations()
        self.request_scheduling()

    async def remove_reservation(self, reservation_id: str) -> None:
        await self.capacity.remove_reservations([reservation_id])
        self.scheduler_sync.update_reservations()
        self.request_scheduling()

    async def observe(self, record: NodeStatus) -> None:
        """Store what a probe read from a node, and serve waiting requests if that changes the capacity."""
        duplicates = self.capacity.inventory.duplicate_uuids
        began = await self.capacity.gpu_records.update(record, duplicates, self.clock.now())
        before = self.capacity.inventory.nodes[record.name]
        self.capacity.update_node(record)
        self.costs.observe_node(record)
        # The scheduler comes first, since every change of the ledger has it grant what it believes to be free.
        has_changed = self.scheduler_sync.update_node(record.name)
        problems = gpu_health.find_new_problems(before, self.capacity.inventory.nodes[record.name], began)
        if problems:
            await self.ledger.change(mutations.report_gpu_problems(record.name, problems))
        elif has_changed and self.ledger.index.find("waiting"):
            await self.ledger.change(lambda _: None)

    async def accept_gpu(self, node: str, gpu: GpuReading, by: str) -> bool:
        """Grant a GPU with faults again, which an administrator has accepted; return whether it had some."""
        if not await self.capacity.gpu_records.accept(gpu, by):
            return False
        self.capacity.update_node(self.capacity.inventory.nodes[node])
        self.scheduler_sync.update_node(node)
        self.request_scheduling()
        return True

    # -- events ---------------------------------------------------------------------------------------------------

    def add_event(
        self,
        kind: str,
        text: str,
        *,
        owner: str | None = None,
        lease: str | None = None,
        job: str | None = None,
        node: str | None = None,
        notifications: Sequence[NotificationRow] = (),
    ) -> None:
        """Add an event that belongs to no change of a lease or job; it is written a little later."""
        event = EventRow(
            at=self.clock.now(),
            kind=kind,
            text=text,
            owner=owner,
            lease=lease,
            job=job,
            node=node,
            notifications=tuple(notifications),
        )
        self._events.add(event)
        self.ledger.notify_observers(Changes(events=(event,)))

    async def read_events(self, after: int | None, limit: int, owner: str | None) -> list[EventRow]:
        """Return events of one owner, or of all; see `Store.events`."""
        await self._events.flush()
        return await asyncio.to_thread(self.store.list_events, after=after, limit=limit, owner=owner)
