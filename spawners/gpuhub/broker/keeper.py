"""The loops that keep the ledger and the nodes in agreement.

Decisions are made in `reconcile`, `due` and `health`; `looker` asks the nodes, `hands` acts on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpuhub.broker import edits, job_rules
from gpuhub.broker import leases as rules
from gpuhub.broker.clock import wait_event
from gpuhub.broker.core import Core
from gpuhub.broker.couriers import Couriers
from gpuhub.broker.drafts import Draft
from gpuhub.broker.due import due_leases, silent_jobs
from gpuhub.broker.filters import Filters, filter_news
from gpuhub.broker.found import Listing
from gpuhub.broker.hands import Hands
from gpuhub.broker.health import Conditions, Doubts, overdue_proofs
from gpuhub.broker.jobs import JobRunner, find_exit
from gpuhub.broker.looker import Looker
from gpuhub.broker.reconcile import (
    Action,
    Doubt,
    End,
    Gone,
    Remove,
    Renew,
    Signal,
    WorkerEnded,
    is_settled,
    reconcile_node,
    rests_on_absence,
)
from gpuhub.broker.rows import JobRow
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError
from gpuhub.gpus import Card
from gpuhub.nodes import health, liveness
from gpuhub.nodes.agent import DEVICES_LOST
from gpuhub.nodes.records import NodeRecord

log = logging.getLogger(__name__)

#: Between two looks at a node, seconds.
PERIOD_S = 2.0
#: The same after a look that failed on a node that is up, and while a GPU waits for a reading that shows it empty.
SOON_S = 1.0
#: Between two looks at a node at the least, whatever is due there, seconds.
LEAST_PERIOD_S = 0.02
#: Between two looks at the clock, seconds.
TICK_S = 1.0
#: When a list was made during which the clock was set: it proves nothing about any lease.
_NEVER = float("-inf")


class Keeper:
    """Watches nodes, jobs and the clock until cancelled."""

    def __init__(
        self,
        *,
        core: Core,
        daemons: Daemons,
        runner: JobRunner,
        couriers: Couriers,
        filters: Filters | None = None,
        has_daemons: bool = True,
    ) -> None:
        """Without `has_daemons` somebody else reads the nodes."""
        self._core = core
        self._daemons = daemons
        self._runner = runner
        self._nodes = tuple(core.inventory.nodes) if has_daemons else ()
        self._couriers = couriers
        self._filters = filters
        self._looker = Looker(daemons=daemons, clock=core.clock)
        self._hands = Hands(daemons=daemons, on_removed=self.kick)
        self._conditions = Conditions()
        self._started = core.clock.monotonic()
        #: Nodes to be looked at before their time.
        self._kicked: set[str] = set()
        #: Leases that were known to lack proof at each node's last look.
        self._judged: dict[str, frozenset[str]] = {}
        self._doubts = Doubts()

    async def run(self) -> None:
        """Run all loops."""
        try:
            async with asyncio.TaskGroup() as group:
                for node in self._nodes:
                    group.create_task(self._watch(node))
                group.create_task(self._follow_jobs())
                group.create_task(self._watch_clock())
        finally:
            await self._hands.close()
            await self._looker.close()
            if self._filters is not None:
                await self._filters.close()

    def kick(self, node: str) -> None:
        """Look at a node before its time."""
        self._kicked.add(node)
        self._core.ledger.wake_watchers(f"node:{node}")

    async def _watch(self, node: str) -> None:
        while True:
            began = self._core.clock.monotonic()
            self._kicked.discard(node)
            await _guarded(f"node {node}", partial(self.look, node, self._core.clock.now()))
            await asyncio.sleep(LEAST_PERIOD_S)
            await self._until_due(node, began + self._period(node))

    async def _until_due(self, node: str, deadline: float) -> None:
        """Until the deadline, or until something there is to be proven gone that the last look did not judge."""
        while (left := deadline - self._core.clock.monotonic()) > 0:
            changed = self._core.ledger.watch(f"node:{node}")
            if node in self._kicked or self._unproven(node) - self._judged.get(node, frozenset()):
                return
            await wait_event(changed, left)

    def _unproven(self, node: str) -> frozenset[str]:
        """Leases of which the node is to prove that they are gone."""
        leases = self._core.leases_on(node)
        return frozenset(lease.id for lease in leases if node in rules.unproven_nodes(lease))

    def _period(self, node: str) -> float:
        core = self._core
        record = core.inventory.nodes[node]
        is_doubtful = record.is_up and record.failures > 0
        scheduling = core.cluster.scheduling
        if is_doubtful or health.awaits_reading(record, guards=core.guards.by_uuid, scheduling=scheduling):
            return SOON_S
        return PERIOD_S

    async def look(self, node: str, listed_at: float) -> None:
        """Read one node and bring it and the ledger into agreement; `listed_at` is now."""
        core = self._core
        record = core.inventory.nodes[node]
        try:
            listed, listing, actions = await self._ask(record, listed_at)
            await _guarded(f"node {node}", partial(self._apply, listing, actions))
            for courier in self._couriers.unwanted(node, listed):
                self._hands.remove(node, courier)
            seen = _seen(record, listing, actions, core.clock.monotonic())
            seen = await self._looker.read_agent(seen, listed)
            if seen.gpu_trouble == DEVICES_LOST and record.gpu_trouble != DEVICES_LOST:
                await self._note_lost_devices(node, listed)
            if self._filters is not None:
                seen = await self._filters.judge(seen)
                for kind, text in filter_news(record, seen):
                    self._tell(kind, text, node)
        except GpuhubError as error:
            self._judged[node] = self._unproven(node)
            await self._observe(liveness.failed(record, str(error), core.clock.monotonic()))
            return
        if seen.gpu_trouble is None and _known(seen) != _known(record):
            await core.remember_gpus(seen)
        await self._observe(seen)

    async def _ask(
        self, record: NodeRecord, listed_at: float
    ) -> tuple[Sequence[Mapping[str, Any]], Listing, list[Action]]:
        """What the daemon lists, as it says and as it is understood, and what follows from it."""
        clock = self._core.clock
        began, follows = clock.monotonic(), clock.follows
        listed = await self._looker.list_containers(record.name)
        listing = Listing(
            node=record.name,
            identity=(await self._looker.daemon_id(record, listed), record.boot_id),
            containers=await self._looker.parse(record.name, listed),
            at=listed_at if clock.follows == follows else _NEVER,
        )
        actions = self._reconcile(listing, began)
        if rests_on_absence(actions):
            # Since the daemon was last asked who it is, another may have taken its place, and made the list.
            identity = await self._looker.ask_daemon_id(record.name), record.boot_id
            listing = replace(listing, identity=identity, at=listed_at if clock.follows == follows else _NEVER)
            actions = self._reconcile(listing, began)
        return listed, listing, actions

    def _reconcile(self, listing: Listing, began: float) -> list[Action]:
        # The ledger is read after the list, so that a container of a lease made meanwhile is not taken for foreign.
        core = self._core
        snapshot = core.ledger.snapshot
        on_node = core.leases_on(listing.node)
        self._hands.forget(listing.node, {container.id for container in listing.containers})
        # One that began to release during the list is not judged by it: it stays due.
        unproven = self._unproven(listing.node)
        self._judged[listing.node] = frozenset(
            lease.id for lease in on_node if lease.id in unproven and lease.since < listing.at
        )
        jobs = {lease.id: core.ledger.index.one("job of lease", lease.id) for lease in on_node}
        return reconcile_node(
            replace(listing, busy=self._runner.busy(began)),
            leases=snapshot.leases,
            on_node=on_node,
            job_of={lease: snapshot.jobs[job] for lease, job in jobs.items() if job and job in snapshot.jobs},
            preempt_grace=core.cluster.scheduling.preempt_grace,
        )

    async def _apply(self, listing: Listing, actions: list[Action]) -> None:
        node = listing.node
        renewed = [action.lease_id for action in actions if isinstance(action, Renew)]
        if renewed:
            await self._renew(listing, renewed)
        gone = [action.lease_id for action in actions if isinstance(action, Gone)]
        if gone:
            await self._core.prove_gone(gone, node)
        ends = {action.lease_id: action.reason for action in actions if isinstance(action, End)}
        if ends:
            log.info("node %s: leases end: %s", node, ends)
            await self._core.end_leases(ends)
        doubts = {action.lease_id: action.why for action in actions if isinstance(action, Doubt)}
        for lease in self._doubts.replace(node, doubts):
            self._tell("node.suspect", f"lease {lease} cannot be judged: {doubts[lease]}", node)
        for action in actions:
            if isinstance(action, Remove) and self._hands.remove(node, action.container_id):
                self._tell("container.removed", f"container {action.container_id[:12]} is removed: {action.why}", node)
            elif isinstance(action, Signal) and self._hands.signal(node, action.container_id):
                self._tell("worker.signalled", f"container {action.container_id[:12]} gets SIGTERM: {action.why}", node)
            elif isinstance(action, WorkerEnded):
                await self._note_exit(node, action)

    async def _renew(self, listing: Listing, lease_ids: list[str]) -> None:
        def edit(draft: Draft) -> None:
            for lease in filter(None, map(draft.leases.get, lease_ids)):
                draft.put_lease(rules.renew_identity(lease, listing.node, listing.identity))

        await self._core.ledger.change(edit)

    async def _note_lost_devices(self, node: str, listed: Sequence[Mapping[str, Any]]) -> None:
        """Owners are told; a new agent, which has its devices again, says whether new containers get theirs."""
        await self._core.ledger.change(edits.warn_of_lost_devices(node))
        for agent in self._looker.agents(listed):
            self._hands.remove(node, agent)

    async def _note_exit(self, node: str, action: WorkerEnded) -> None:
        limit = self._core.cluster.jobs.memory
        code, message = await find_exit(self._daemons, node, action.container_id, limit)
        edit = (action.job_id, lambda job, now: job_rules.worker_exited(job, action.index, code, message, now))
        await self._core.edit_jobs([edit])

    async def _observe(self, record: NodeRecord) -> None:
        core = self._core
        await core.observe(record)
        news = self._conditions.news(
            core.inventory,
            record.name,
            guards=core.guards.by_uuid,
            monotonic=core.clock.monotonic(),
            scheduling=core.cluster.scheduling,
        )
        for kind, text in news:
            self._tell(kind, text, record.name)

    def _tell(self, kind: str, text: str, node: str) -> None:
        log.info("node %s: %s", node, text)
        self._core.note_event(kind, text, node=node)

    async def _follow_jobs(self) -> None:
        while True:
            changed = self._core.ledger.changed
            self._runner.start_granted()
            await changed.wait()

    async def _watch_clock(self) -> None:
        while True:
            await _guarded("the clock", self.tick)
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """End what is due."""
        core = self._core
        snapshot = core.ledger.snapshot
        now = core.clock.now()
        ends = {**due_leases(snapshot, core.cluster, now), **self._checkpointed(now)}
        if ends:
            log.info("leases end: %s", ends)
            await core.end_leases(ends)
        silent = silent_jobs(snapshot, core.cluster, core.unrenewed_s)
        if silent:
            log.info("jobs end, their notebooks stopped reporting: %s", silent)
            await core.edit_jobs([(job_id, _silent) for job_id in silent])
        await self._quarantine()
        core.forget_ended()

    def _checkpointed(self, now: float) -> dict[str, str]:
        """Leases of preempted jobs whose workers have nothing more to write."""
        jobs = [self._core.ledger.snapshot.jobs.get(job) for job in self._core.ledger.index.find("preempting")]
        return {
            job.lease_id: job_rules.PREEMPTED for job in jobs if job is not None and job_rules.is_checkpointed(job, now)
        }

    async def _quarantine(self) -> None:
        core = self._core
        after = core.cluster.scheduling.quarantine_after
        # After a start of the broker every node gets as long to give its proof.
        if core.clock.monotonic() - self._started < after:
            return
        overdue = overdue_proofs(core.ledger.snapshot, core.inventory, self._doubts.why, core.clock.now(), after)
        if overdue:
            await core.quarantine(overdue)


def _silent(job: JobRow, now: float) -> JobRow:
    return job_rules.stop(job, "the notebook stopped reporting", now)


def _seen(record: NodeRecord, listing: Listing, actions: Sequence[Action], monotonic: float) -> NodeRecord:
    """The record of a node that answered."""
    return liveness.answered(record, monotonic).evolve(
        is_settled=is_settled(actions),
        is_suspect=any(isinstance(action, Doubt) for action in actions),
        daemon_id=listing.identity[0],
    )


def _known(record: NodeRecord) -> list[tuple[str, int, Card]]:
    return [(gpu.uuid, gpu.index, gpu.card) for gpu in record.gpus if gpu.is_listed]


async def _guarded(what: str, step: Callable[[], Awaitable[None]]) -> None:
    """Run one step of a loop; its failure is logged and the loop goes on."""
    try:
        await step()
    except GpuhubError as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s: unexpected failure", what)
