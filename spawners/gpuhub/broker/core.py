"""The broker's inside: the ledger with what is known beside it, as the keeper's loops and the service use it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from gpuhub.broker import leases, schedule
from gpuhub.broker.clock import Clock
from gpuhub.broker.ledger import Draft, Ledger
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import LeaseState
from gpuhub.broker.store import SeenGpu, Store
from gpuhub.engines.base import Engine, Wait
from gpuhub.nodes.inventory import Inventory, NodeRecord
from gpuhub.settings import Cluster

#: A long poll answers a mere change of place in the queue no sooner than this after it began, seconds.
PLACE_NEWS_S = 2.0


class Core:
    """One ledger, one inventory, one engine."""

    def __init__(
        self, *, cluster: Cluster, store: Store, engine: Engine, inventory: Inventory, clock: Clock | None = None
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.engine = engine
        self.inventory = inventory
        self.clock = clock or Clock()
        self.ledger = Ledger(store, self._settle, self.clock)
        self._started = self.clock.monotonic()
        #: When a spawner last asked for a notebook's lease, and a client last renewed a job; monotonic.
        self._asked: dict[str, float] = {}
        self._renewed: dict[str, float] = {}

    async def take_up(self) -> None:
        """Begin where an earlier run ended, before anybody asks: places in the queue are not in the store.

        A node that the administrator took out of the settings gives its leases back. Should it return, whatever
        still runs there belongs to no lease and is removed before the node gets work.
        """

        def edit(draft: Draft) -> None:
            for lease in list(draft.leases.values()):
                for node in set(lease.nodes) - set(self.inventory.nodes):
                    _give_up_node(draft, lease.id, node)

        await self.ledger.change(edit)

    async def observe(self, record: NodeRecord) -> None:
        """A node was read: whoever waits may be served."""
        self.inventory = self.inventory.with_node(record)
        if any(lease.state is LeaseState.WAITING for lease in self.ledger.snapshot.leases.values()):
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
        await asyncio.to_thread(self.store.save_seen, record.name, seen)

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

    def note_asked(self, lease_id: str) -> None:
        """A spawner asks for a lease."""
        self._asked[lease_id] = self.clock.monotonic()

    def note_renewed(self, job_id: str) -> None:
        """A job's owner is still there."""
        self._renewed[job_id] = self.clock.monotonic()

    async def poll(self, look: Callable[[], Awaitable[tuple[int, bool]]], version: int | None, wait_s: float) -> None:
        """Return when `look` gives another version than `version`, at the latest after `wait_s`.

        `look` also tells whether the thing still waits in the queue: then the news is about its place, and is held
        back a little, or each grant would make everybody in a long queue ask anew at once.
        """
        began = self.clock.monotonic()
        while version is not None:
            changed = self.ledger.changed
            found, is_waiting = await look()
            if found != version and not is_waiting:
                return
            end = began + (wait_s if found == version else min(wait_s, PLACE_NEWS_S))
            left = end - self.clock.monotonic()
            if left <= 0:
                return
            await wait_event(changed, left)

    def _settle(self, draft: Draft) -> dict[str, Wait]:
        return dict(
            schedule.settle(
                draft,
                engine=self.engine,
                inventory=self.inventory,
                max_gpus=self.cluster.users.max_gpus,
                monotonic=self.clock.monotonic(),
            )
        )


def _give_up_node(draft: Draft, lease_id: str, node: str) -> None:
    reason = f"node {node} is no longer in cluster.toml"
    lease = draft.put_lease(leases.release(draft.leases[lease_id], reason, draft.now))
    if node in leases.unproven_nodes(lease):
        draft.put_lease(leases.prove_gone(lease, node, draft.now))


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, at most so long."""
    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
