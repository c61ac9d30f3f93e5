"""Keeps the engine in step with the ledger and the nodes, and makes rows of its decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gpuhub.broker import allowances, events, schedule
from gpuhub.broker.clock import Clock
from gpuhub.broker.drafts import Draft, Snapshot
from gpuhub.broker.rows import EventRow, LeaseRow
from gpuhub.broker.schemas import LeaseState
from gpuhub.broker.store import Store
from gpuhub.broker.supply import Supply
from gpuhub.broker.usage_history import counts_since, given_back
from gpuhub.engines.base import Engine, Holding, NodeSupply, Request, Rights, Spent, World
from gpuhub.settings import Cluster

#: After a failure the queue is served again so much later, seconds.
RETRY_S = 1.0
#: The engine is not asked again sooner than this because of time alone, seconds.
LEAST_SLEEP_S = 0.05


class Dispatcher:
    """What follows from the ledger's changes, see `ledger.Consequences`."""

    def __init__(
        self, *, cluster: Cluster, store: Store, engine: Engine, supply: Supply, clock: Clock, wake: Callable[[], None]
    ) -> None:
        """`wake` begins a change in which nothing is changed, so that the queue is served."""
        self._cluster = cluster
        self._store = store
        self._engine = engine
        self._supply = supply
        self._clock = clock
        self._wake = wake
        #: The engine knows what the ledger shows.
        self._is_in_step = False
        self._timer: asyncio.TimerHandle | None = None
        #: What the engine was told, by lease and by node.
        self._told: dict[str, Request | Holding] = {}
        self._nodes: dict[str, NodeSupply] = {}
        self._groups: dict[str, frozenset[str]] = {}
        self._rights: dict[str, Rights] = {}

    def close(self) -> None:
        """Do not wake any more."""
        if self._timer is not None:
            self._timer.cancel()

    # -- owners ---------------------------------------------------------------------------------------------------

    def rights(self, owner: str) -> Rights:
        """What an owner may have, by the groups that were last heard of."""
        if owner not in self._rights:
            groups = self._groups.get(owner, frozenset())
            self._rights[owner] = allowances.rights_of(self._cluster, owner, groups)
        return self._rights[owner]

    def note_groups(self, owner: str, hub_groups: frozenset[str]) -> None:
        """An owner's groups in the hub."""
        if self._groups.get(owner) == hub_groups and owner in self._rights:
            return
        self._groups[owner] = hub_groups
        self._rights.pop(owner, None)
        self._engine.put_rights(owner, self.rights(owner))

    # -- nodes and reservations -----------------------------------------------------------------------------------

    def tell_node(self, name: str) -> bool:
        """A node may have changed; whether there is something new for the engine."""
        before = self._nodes.get(name)
        node = self._supply.build_node(name)
        if not self._is_in_step or node == before:
            return not self._is_in_step
        self._nodes[name] = node
        self._engine.put_node(node)
        if before is None or _uuids(before) != _uuids(node):
            self.tell_reservations()
        return True

    def tell_reservations(self) -> None:
        """Reservations, or the GPUs they mean, changed."""
        if self._is_in_step:
            self._engine.put_reservations(self._supply.build_reservations())

    # -- the ledger's consequences --------------------------------------------------------------------------------

    async def prepare(self, snapshot: Snapshot) -> None:
        """Build the engine anew when it is not in step; see `ledger.Consequences`."""
        if self._is_in_step:
            return
        since = counts_since(self._cluster.scheduling, self._clock.now())
        spent = await asyncio.to_thread(self._store.spent, since)
        self._supply.note_held(snapshot.leases.values())
        self._engine.rebuild(self._build_world(snapshot, spent))
        self._is_in_step = True

    def abandon(self) -> None:
        """The engine was told of what will not be, or of moments that a set clock changed: it is built anew."""
        self._is_in_step = False
        self._wake_in(RETRY_S)

    def settle(self, draft: Draft) -> None:
        """Let jobs follow, serve the queue, and tell of it; see `ledger.Consequences`."""
        step = schedule.follow(draft, 0)
        told = self._tell(draft, 0)
        decision = self._engine.decide(draft.now)
        schedule.apply(
            draft,
            decision,
            identity_of=self._supply.identity_of,
            grace_s=self._cluster.scheduling.preempt_grace,
        )
        schedule.follow(draft, step)
        self._tell(draft, told)
        draft.events += _news(draft)
        if decision.look_again_at is not None:
            self._wake_in(decision.look_again_at - draft.now)
        held = [draft.leases[lease_id] for lease_id in decision.grants]
        draft.after.append(lambda: self._supply.note_held(held))

    def _tell(self, draft: Draft, step: int) -> int:
        """Tell the engine of what changed since that step; returns the number of the next step."""
        lease_ids, job_ids, step = draft.touched(step)
        todo = dict.fromkeys([*lease_ids, *(draft.jobs[job_id].lease_id for job_id in job_ids)])
        freed: set[str] = set()
        for lease_id in todo:
            lease = draft.leases.get(lease_id)
            if lease is not None:
                freed |= self._tell_lease(draft, lease)
        for node in sorted(freed):
            self.tell_node(node)
        return step

    def _tell_lease(self, draft: Draft, lease: LeaseRow) -> set[str]:
        """Returns nodes where GPUs were freed."""
        before = self._told.get(lease.id)
        value = _engine_value(draft.index.one("job of lease", lease.id), draft, lease)
        if value == before:
            return set()
        if value is None:
            self._told.pop(lease.id)
            self._engine.drop(lease.id, draft.now)
        elif isinstance(value, Request):
            self._told[lease.id] = value
            self._know(lease.owner, lease.groups)
            self._engine.put_request(value)
        else:
            self._told[lease.id] = value
            self._engine.put_holding(value)
            if isinstance(before, Holding):
                for spent in given_back(before, value, draft.now):
                    self._engine.put_spent(spent)
        return self._supply.note_freed(lease)

    def _know(self, owner: str, groups: Iterable[str]) -> None:
        if owner not in self._rights:
            self.note_groups(owner, frozenset(groups))

    def _build_world(self, snapshot: Snapshot, spent: list[Spent]) -> World:
        for lease in sorted(snapshot.leases.values(), key=lambda row: -row.seq):
            self._groups.setdefault(lease.owner, frozenset(lease.groups))
        for one in reversed(spent):
            self._groups.setdefault(one.owner, one.groups)
        job_of = {job.lease_id: job for job in snapshot.jobs.values()}
        requests = [
            schedule.build_request(lease) for lease in snapshot.leases.values() if lease.state is LeaseState.REQUESTED
        ]
        holdings = [
            schedule.build_holding(lease, job_of.get(lease.id))
            for lease in snapshot.leases.values()
            if lease.state is not LeaseState.REQUESTED
        ]
        self._told = {**{one.id: one for one in requests}, **{one.request.id: one for one in holdings}}
        self._nodes = {name: self._supply.build_node(name) for name in self._supply.inventory.nodes}
        return World(
            nodes=list(self._nodes.values()),
            requests=requests,
            holdings=holdings,
            reservations=self._supply.build_reservations(),
            spent=spent,
            rights={owner: self.rights(owner) for owner in self._groups},
        )

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(LEAST_SLEEP_S, seconds), self._wake)


def _engine_value(job_id: str | None, draft: Draft, lease: LeaseRow) -> Request | Holding | None:
    if not lease.is_open:
        return None
    if lease.state is LeaseState.REQUESTED:
        return schedule.build_request(lease)
    return schedule.build_holding(lease, None if job_id is None else draft.jobs[job_id])


def _uuids(node: NodeSupply) -> set[str]:
    return {slot.uuid for slot in node.slots}


def _news(draft: Draft) -> list[EventRow]:
    lease_ids, job_ids, _ = draft.touched()
    found: list[EventRow] = []
    for lease_id in lease_ids:
        found += events.of_lease(draft.before(lease_id), draft.leases[lease_id], draft.now)
    for job_id in job_ids:
        found += events.of_job(draft.job_before(job_id), draft.jobs[job_id], draft.now)
    return found
