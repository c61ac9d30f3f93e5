"""Feeds changes of the ledger and of the nodes to the scheduler, and its decisions to the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from gpuhub.broker.db.store import Store
from gpuhub.broker.state import effects, events, suspension_room
from gpuhub.broker.state.capacity import Capacity
from gpuhub.broker.state.transaction import Transaction
from gpuhub.config.settings import ClusterSettings, SchedulingSettings
from gpuhub.domain import owner_limits, scheduler_input
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import EventRow, LeaseRow, LedgerSnapshot
from gpuhub.domain.owner_limits import OwnLimits
from gpuhub.scheduler.interface import (
    Allocation,
    GpuSlot,
    NodeCapacity,
    Quota,
    Scheduler,
    SchedulerSnapshot,
    SchedulingRequest,
    UsageRecord,
)

#: Time after a failure until the queue is served again, seconds.
RETRY_S = 1.0
#: Maximum time between decisions while requests wait, seconds: fair share changes their order though nothing happens.
ORDER_PERIOD_S = 30.0
#: Shortest time between decisions that nothing but time causes, seconds.
MIN_SLEEP_S = 0.05
#: Number of half-lives after which a thousandth of the usage is left.
HALF_LIVES = 10
_WEEK_S = 7 * 86400.0


def find_usage_start(scheduling: SchedulingSettings, now: float) -> float:
    """Return the time from which ended usage still counts, for fair share or for weekly limits."""
    return now - max(HALF_LIVES * scheduling.half_life, _WEEK_S)


def list_released_usage(before: Allocation, after: Allocation, now: float) -> Iterator[UsageRecord]:
    """Yield the usage that a live allocation is no longer charged for: of released GPUs, or all in quarantine."""
    if before.is_quarantined:
        return
    kept_slots = (
        {}
        if after.is_quarantined
        else {slot.uuid: slot for node_allocation in after.node_allocations for slot in node_allocation.slots}
    )
    for node_allocation in before.node_allocations:
        for slot in node_allocation.slots:
            if slot.uuid not in kept_slots:
                yield _build_usage_record(before, slot, now)


def _build_usage_record(allocation: Allocation, slot: GpuSlot, now: float) -> UsageRecord:
    return UsageRecord(
        owner=allocation.request.owner,
        groups=allocation.request.groups,
        card=slot.card,
        share=allocation.request.share,
        started_at=allocation.granted_at,
        ended_at=max(now, allocation.granted_at),
    )


class SchedulerSync:
    """Keeps the scheduler in sync with the ledger, as the ledger's `TransactionHook`."""

    def __init__(
        self,
        *,
        cluster: ClusterSettings,
        store: Store,
        scheduler: Scheduler,
        capacity: Capacity,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """`wake` starts a transaction without edits, so that the queue is served."""
        self._cluster = cluster
        self._store = store
        self._scheduler = scheduler
        self._capacity = capacity
        self._clock = clock
        self._wake = wake
        #: True while the scheduler has the state of the ledger.
        self._is_in_sync = False
        self._timer: asyncio.TimerHandle | None = None
        #: The last values sent to the scheduler, by lease and by node.
        self._sent: dict[str, SchedulingRequest | Allocation] = {}
        self._nodes: dict[str, NodeCapacity] = {}
        self._groups: dict[str, frozenset[str]] = {}
        #: Limits that administrators set for single users, by user.
        self.own_limits: Mapping[str, OwnLimits] = store.limits.load()
        self._quotas: dict[str, Quota] = {}

    def close(self) -> None:
        """Cancel the next wake-up."""
        if self._timer is not None:
            self._timer.cancel()

    # -- owners ---------------------------------------------------------------------------------------------------

    def get_quota(self, owner: str) -> Quota:
        """Return an owner's quota, by the groups that were last reported."""
        if owner not in self._quotas:
            groups = self._groups.get(owner, frozenset())
            own = self.own_limits.get(owner)
            self._quotas[owner] = owner_limits.build_quota(self._cluster, owner, groups, own)
        return self._quotas[owner]

    def set_groups(self, owner: str, hub_groups: frozenset[str]) -> None:
        """Set an owner's groups in the hub."""
        if self._groups.get(owner) == hub_groups and owner in self._quotas:
            return
        self._groups[owner] = hub_groups
        self._renew_quota(owner)

    async def set_own_limits(self, owner: str, limits: OwnLimits | None) -> None:
        """Store and apply a user's own limits; None removes them. What the user has already stays."""
        await asyncio.to_thread(self._store.limits.save, owner, limits)
        others = {name: other for name, other in self.own_limits.items() if name != owner}
        self.own_limits = others if limits is None else {**others, owner: limits}
        self._renew_quota(owner)
        self._wake()

    def _renew_quota(self, owner: str) -> None:
        self._quotas.pop(owner, None)
        self._scheduler.put_quota(owner, self.get_quota(owner))

    # -- nodes and reservations -----------------------------------------------------------------------------------

    def update_node(self, name: str) -> bool:
        """Send a node's capacity to the scheduler; return whether it may have changed."""
        before = self._nodes.get(name)
        node = self._capacity.build_node_capacity(name)
        if not self._is_in_sync or node == before:
            return not self._is_in_sync
        self._nodes[name] = node
        self._scheduler.put_node(node)
        if before is None or _uuids(before) != _uuids(node):
            self.update_reservations()
        return True

    def update_reservations(self) -> None:
        """Send the reservations to the scheduler, after a change of them or of the GPUs they name."""
        if self._is_in_sync:
            self._scheduler.set_reservations(self._capacity.build_reservations())

    # -- transaction hook -----------------------------------------------------------------------------------------

    async def before(self, snapshot: LedgerSnapshot) -> None:
        """Rebuild the scheduler's state if it is not in sync."""
        if self._is_in_sync:
            return
        since = find_usage_start(self._cluster.scheduling, self._clock.now())
        usage_records = await asyncio.to_thread(self._store.load_usage, since)
        self._capacity.mark_held(snapshot.leases.values())
        self._scheduler.rebuild(self._build_snapshot(snapshot, usage_records))
        self._is_in_sync = True

    def rollback(self) -> None:
        """Mark the scheduler as out of sync: it has values that will not be stored, or times before a jump of the
        clock.
        """
        self._is_in_sync = False
        self._wake_in(RETRY_S)

    def commit(self, transaction: Transaction) -> None:
        """Apply effects, run the scheduler, and add the events."""
        step = effects.propagate(transaction, 0)
        sent_step = self._send_changes(transaction, 0)
        decision = self._scheduler.decide(transaction.now)
        effects.apply_decision(
            transaction,
            decision,
            identity_of=self._capacity.get_identity,
            grace_s=self._cluster.scheduling.preempt_grace,
            find_moved_mib=self._find_moved_mib,
        )
        effects.propagate(transaction, step)
        self._send_changes(transaction, sent_step)
        transaction.events += _list_events(transaction)
        self._plan_next(transaction, decision.decide_again_at)
        held = [transaction.leases[lease_id] for lease_id in decision.grants]
        transaction.on_commit.append(lambda: self._capacity.mark_held(held))

    def _find_moved_mib(self, lease: LeaseRow, request: LeaseRow) -> int | None:
        """Return the GPU memory that is moved if a lease is suspended for a request, MiB; None if it cannot be."""
        if not self._cluster.scheduling.suspend_scavengers:
            return None
        moved_mib = self._capacity.find_used_mib(lease.gpus[0])
        return moved_mib if suspension_room.has_room_beside(self._scheduler, lease, request, moved_mib) else None

    def _plan_next(self, transaction: Transaction, decide_again_at: float | None) -> None:
        """Serve the queue again at a time, and now and then while requests wait: their order changes with usage."""
        times = [] if decide_again_at is None else [decide_again_at]
        if transaction.index.find("waiting"):
            times.append(transaction.now + ORDER_PERIOD_S)
        if times:
            self._wake_in(min(times) - transaction.now)

    def _send_changes(self, transaction: Transaction, step: int) -> int:
        """Send all changes since a step to the scheduler; return the number of the next step."""
        lease_ids, job_ids, step = transaction.changed_ids(step)
        all_ids = dict.fromkeys([*lease_ids, *(transaction.jobs[job_id].lease_id for job_id in job_ids)])
        freed: set[str] = set()
        for lease_id in all_ids:
            lease = transaction.leases.get(lease_id)
            if lease is not None:
                freed |= self._send_lease(transaction, lease)
        for node in sorted(freed):
            self.update_node(node)
        return step

    def _send_lease(self, transaction: Transaction, lease: LeaseRow) -> set[str]:
        """Send a lease to the scheduler; return the nodes on which GPUs were freed."""
        job_id = transaction.index.find_one("job of lease", lease.id)
        job = None if job_id is None else transaction.jobs[job_id]
        values = {_get_id(value): value for value in scheduler_input.list_values(lease, job)}
        has_changed = False
        for value_id in (lease.id, f"{lease.id}{scheduler_input.HOST_SUFFIX}"):
            value, before = values.get(value_id), self._sent.get(value_id)
            if value != before:
                self._send_value(value_id, before, value, transaction.now)
                has_changed = True
            if isinstance(value, SchedulingRequest):
                self._ensure_owner(lease.owner, lease.groups)
        return self._capacity.mark_freed(lease) | self._capacity.mark_awaited(lease) if has_changed else set()

    def _send_value(
        self,
        value_id: str,
        before: SchedulingRequest | Allocation | None,
        value: SchedulingRequest | Allocation | None,
        now: float,
    ) -> None:
        if value is None:
            self._sent.pop(value_id)
            self._scheduler.remove(value_id, now)
            return
        self._sent[value_id] = value
        if isinstance(value, SchedulingRequest):
            if isinstance(before, Allocation):
                # A suspended notebook that is wanted at once.
                self._scheduler.remove(value_id, now)
            self._scheduler.put_request(value)
            return
        self._scheduler.put_allocation(value)
        if isinstance(before, Allocation):
            for record in list_released_usage(before, value, now):
                self._scheduler.record_usage(record)

    def _ensure_owner(self, owner: str, groups: Iterable[str]) -> None:
        if owner not in self._quotas:
            self.set_groups(owner, frozenset(groups))

    def _build_snapshot(self, snapshot: LedgerSnapshot, usage_records: list[UsageRecord]) -> SchedulerSnapshot:
        for lease in sorted(snapshot.leases.values(), key=lambda row: -row.seq):
            self._groups.setdefault(lease.owner, frozenset(lease.groups))
        for record in reversed(usage_records):
            self._groups.setdefault(record.owner, record.groups)
        job_of = {job.lease_id: job for job in snapshot.jobs.values()}
        values = [
            value
            for lease in snapshot.leases.values()
            for value in scheduler_input.list_values(lease, job_of.get(lease.id))
        ]
        requests = [value for value in values if isinstance(value, SchedulingRequest)]
        allocations = [value for value in values if isinstance(value, Allocation)]
        self._sent = {_get_id(value): value for value in values}
        self._nodes = {name: self._capacity.build_node_capacity(name) for name in self._capacity.inventory.nodes}
        return SchedulerSnapshot(
            nodes=list(self._nodes.values()),
            requests=requests,
            allocations=allocations,
            reservations=self._capacity.build_reservations(),
            usage_records=usage_records,
            quotas={owner: self.get_quota(owner) for owner in self._groups},
        )

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(MIN_SLEEP_S, seconds), self._wake)


def _get_id(value: SchedulingRequest | Allocation) -> str:
    return value.id if isinstance(value, SchedulingRequest) else value.request.id


def _uuids(node: NodeCapacity) -> set[str]:
    return {slot.uuid for slot in node.slots}


def _list_events(transaction: Transaction) -> list[EventRow]:
    lease_ids, job_ids, _ = transaction.changed_ids()
    events_found: list[EventRow] = []
    for lease_id in lease_ids:
        owned_by = transaction.index.find_one("job of lease", lease_id)
        events_found += events.list_lease_events(
            transaction.get_lease_before(lease_id),
            transaction.leases[lease_id],
            transaction.now,
            None if owned_by is None else transaction.jobs[owned_by],
        )
    for job_id in job_ids:
        events_found += events.list_job_events(
            transaction.get_job_before(job_id), transaction.jobs[job_id], transaction.now
        )
    return events_found
