"""The loops that keep the ledger and the nodes in agreement. Decisions are made in `reconcile` and `due`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from gpuhub import names
from gpuhub.broker import job_rules
from gpuhub.broker import leases as rules
from gpuhub.broker.core import Core, wait_event
from gpuhub.broker.due import due_leases, silent_jobs
from gpuhub.broker.jobs import JobRunner, find_exit
from gpuhub.broker.reconcile import (
    Action,
    End,
    Gone,
    Remove,
    WorkerEnded,
    is_settled,
    parse_container,
    reconcile_node,
)
from gpuhub.broker.rows import JobRow
from gpuhub.broker.schemas import LeaseState
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError, NotFound
from gpuhub.nodes import inventory
from gpuhub.nodes.agent_container import ensure_agent, read_last_line
from gpuhub.nodes.inventory import NodeRecord

log = logging.getLogger(__name__)

#: Between two looks at a node, seconds.
PERIOD_S = 2.0
#: Between two looks at a node at the least, whatever is due there, seconds.
LEAST_PERIOD_S = 0.02
#: Between two looks at the clock, seconds.
TICK_S = 1.0
#: From SIGTERM to SIGKILL when a container is stopped, seconds.
STOP_S = 2


class Keeper:
    """Watches nodes, jobs and the clock until cancelled."""

    def __init__(self, *, core: Core, daemons: Daemons, runner: JobRunner) -> None:
        self._core = core
        self._daemons = daemons
        self._runner = runner
        self._removing: dict[tuple[str, str], asyncio.Task[None]] = {}
        #: Nodes where a removal ended since their last listing.
        self._kicked: set[str] = set()
        #: Leases that were known to be releasing at each node's last look.
        self._releasing: dict[str, frozenset[str]] = {}

    async def run(self) -> None:
        """Run all loops."""
        async with asyncio.TaskGroup() as group:
            for node in self._core.inventory.nodes:
                group.create_task(self._watch(node))
            group.create_task(self._follow_jobs())
            group.create_task(self._watch_clock())

    async def _watch(self, node: str) -> None:
        while True:
            listed_at = self._core.clock.now()
            await _guarded(f"node {node}", partial(self.look, node, listed_at))
            await self._until_due(node)

    async def look(self, node: str, listed_at: float) -> None:
        """Read one node and bring it and the ledger into agreement; `listed_at` is now."""
        self._kicked.discard(node)
        monotonic = self._core.clock.monotonic()
        record = self._core.inventory.nodes[node]
        label = f"{names.LABEL_INSTANCE}={self._daemons.instance}"
        try:
            listed = await self._daemons.call(node, "containers", all=True, filters={"label": [label]})
        except GpuhubError as error:
            self._releasing[node] = self._releasing_on(node)
            self._note_up(record, inventory.failed(record, str(error)))
            await self._core.observe(inventory.failed(record, str(error)))
            return
        # The ledger is read after the list, so that a container of a lease made meanwhile is not taken for foreign.
        snapshot = self._core.ledger.snapshot
        # One that began to release during the list is not judged by it: it stays due.
        self._releasing[node] = frozenset(
            lease for lease in self._releasing_on(node) if snapshot.leases[lease].since < listed_at
        )
        actions = reconcile_node(
            node=node,
            containers=[parse_container(raw) for raw in listed],
            leases=snapshot.leases,
            jobs=snapshot.jobs,
            listed_at=listed_at,
            busy=self._runner.busy(monotonic),
        )
        await self._apply(node, actions)
        up = inventory.answered(record).evolve(is_settled=is_settled(actions))
        self._note_up(record, up)
        await self._core.observe(await self._read_agent(up, listed))

    async def _read_agent(self, record: NodeRecord, listed: list[Mapping[str, Any]]) -> NodeRecord:
        kinds = [raw for raw in listed if (raw.get("Labels") or {}).get(names.LABEL_KIND) == names.KIND_AGENT]
        try:
            agent = await ensure_agent(self._daemons, record.name, kinds[0] if kinds else None)
            line = await read_last_line(self._daemons, record.name, agent)
        except GpuhubError as error:
            return inventory.agent_failed(record, str(error))
        reading = inventory.parse_agent_line(line)
        if reading is None:
            return record
        read = inventory.agent_read(record, reading, self._core.clock.monotonic())
        if reading.error is None and _known(read) != _known(record):
            await self._core.remember_gpus(read)
        return read

    async def _apply(self, node: str, actions: list[Action]) -> None:
        gone = [action.lease_id for action in actions if isinstance(action, Gone)]
        if gone:
            await self._core.prove_gone(gone, node)
        ends = {action.lease_id: action.reason for action in actions if isinstance(action, End)}
        if ends:
            log.info("node %s: leases end: %s", node, ends)
            await self._core.end_leases(ends)
        for action in actions:
            if isinstance(action, Remove):
                self._begin_removal(node, action)
            elif isinstance(action, WorkerEnded):
                await self._note_exit(node, action)

    def _begin_removal(self, node: str, action: Remove) -> None:
        key = (node, action.container_id)
        if key in self._removing:
            return
        log.info("node %s: container %s is removed: %s", node, action.container_id[:12], action.why)
        task = asyncio.ensure_future(self._remove(node, action.container_id))
        self._removing[key] = task
        task.add_done_callback(lambda _: self._removing.pop(key, None))

    async def _remove(self, node: str, container_id: str) -> None:
        try:
            await self._daemons.call(node, "stop", container_id, timeout=STOP_S)
            await self._daemons.call(node, "remove_container", container_id, force=True, v=True)
        except NotFound:
            log.info("node %s: container %s is gone already", node, container_id[:12])
        except GpuhubError as error:
            log.warning("node %s: container %s cannot be removed yet: %s", node, container_id[:12], error)
            return
        self._kicked.add(node)
        self._core.ledger.wake()

    async def _note_exit(self, node: str, action: WorkerEnded) -> None:
        limit = self._core.cluster.jobs.memory
        code, message = await find_exit(self._daemons, node, action.container_id, limit)

        def change(job: JobRow, now: float) -> JobRow:
            return job_rules.worker_exited(job, action.index, code, message, now)

        await self._core.edit_jobs([(action.job_id, change)])

    async def _until_due(self, node: str) -> None:
        """Until the next look: after the period, or at once when a lease there is to be released."""
        deadline = self._core.clock.monotonic() + PERIOD_S
        await asyncio.sleep(LEAST_PERIOD_S)
        while (left := deadline - self._core.clock.monotonic()) > 0:
            changed = self._core.ledger.changed
            if node in self._kicked or self._releasing_on(node) - self._releasing.get(node, frozenset()):
                return
            await wait_event(changed, left)

    def _releasing_on(self, node: str) -> frozenset[str]:
        return frozenset(
            lease.id
            for lease in self._core.ledger.snapshot.leases.values()
            if lease.state is LeaseState.RELEASING and node in rules.unproven_nodes(lease)
        )

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
        ends = due_leases(snapshot, core.cluster, core.clock.now())
        if ends:
            log.info("leases end: %s", ends)
            await core.end_leases(dict(ends))
        silent = silent_jobs(snapshot, core.cluster, core.unrenewed_s)
        if silent:
            log.info("jobs end, their notebooks stopped reporting: %s", silent)
            await core.edit_jobs([(job_id, _silent) for job_id in silent])
        core.forget_ended()

    def _note_up(self, before: NodeRecord, after: NodeRecord) -> None:
        if before.is_up != after.is_up:
            log.warning("node %s %s", after.name, "answers" if after.is_up else f"is unreachable: {after.trouble}")


def _silent(job: JobRow, now: float) -> JobRow:
    return job_rules.stop(job, "the notebook stopped reporting", now)


def _known(record: NodeRecord) -> list[tuple[str, int, str, int]]:
    return [(gpu.uuid, gpu.index, gpu.model, gpu.memory_mib) for gpu in record.gpus if gpu.is_listed]


async def _guarded(what: str, step: Callable[[], Awaitable[None]]) -> None:
    """Run one step of a loop; its failure is logged and the loop goes on."""
    try:
        await step()
    except GpuhubError as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s: unexpected failure", what)
