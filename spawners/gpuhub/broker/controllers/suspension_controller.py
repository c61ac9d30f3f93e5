"""The controller of suspended notebooks and jobs: it chooses idle notebooks for those who wait, and moves GPU memory.

Every step of a suspension is stored before the node is called, and every call may be repeated: after a restart the
controller continues where the last one stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.controllers.loop import stop as stop_tasks
from gpuhub.broker.operations.idle import begin_suspension
from gpuhub.broker.state import suspension_room
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import LeaseState, SuspensionState
from gpuhub.common.errors import GpuhubError
from gpuhub.docker.client import DockerClients
from gpuhub.domain import job_states, lease_states, scheduler_input, suspension
from gpuhub.domain.models import LeaseRow
from gpuhub.domain.suspension import IdleHolder, WaitingDemand
from gpuhub.nodes import suspension_container
from gpuhub.nodes.suspension_container import SuspensionOutcome, SuspensionResult

log = logging.getLogger(__name__)

#: Interval in which notebooks are chosen, and in which a call that failed is repeated, seconds.
CHECK_PERIOD_S = 2.0
#: Waiting requests for which notebooks are chosen, the first ones of the queue.
MAX_DEMANDS = 32
#: Memory that a container gets beyond what its GPU's memory takes, for CUDA's own copies, MiB.
MARGIN_MIB = 512


class SuspensionController:
    """Suspends and resumes notebooks and jobs, until cancelled."""

    def __init__(self, core: BrokerState, daemons: DockerClients) -> None:
        self._core = core
        self._daemons = daemons
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Nodes on which an earlier broker may have left a container that moved memory.
        self._unswept = {node.name for node in daemons.nodes}

    async def run(self) -> None:
        try:
            while True:
                changed = self._core.ledger.changed
                await run_step("suspended notebooks", self.update)
                try:
                    async with asyncio.timeout(CHECK_PERIOD_S):
                        await changed.wait()
                except TimeoutError:
                    continue
                # Many changes at once cause one check.
                await asyncio.sleep(0.1)
        finally:
            if self._tasks:
                await stop_tasks(list(self._tasks.values()))

    async def update(self) -> None:
        """Choose notebooks to suspend, and work on each one whose memory has to be moved."""
        await self._sweep()
        for lease_id in self._choose():
            await begin_suspension(self._core, lease_id)
        for lease in self._core.ledger.find_leases("suspended"):
            if lease.state not in lease_states.LIVE or lease.id in self._tasks:
                continue
            if suspension.find_state(lease) in (SuspensionState.SUSPENDING, SuspensionState.RESTORING):
                task = asyncio.ensure_future(self._work(lease.id))
                self._tasks[lease.id] = task
                task.add_done_callback(partial(self._forget, lease.id))

    async def _sweep(self) -> None:
        """Remove containers that earlier brokers left and that have ended."""
        for node in [name for name in self._unswept if self._core.capacity.inventory.nodes[name].is_up]:
            try:
                if not await suspension_container.remove_ended(self._daemons, node):
                    self._unswept.discard(node)
            except GpuhubError as error:
                log.warning("node %s: containers that moved GPU memory are removed later: %s", node, error)

    def _forget(self, lease_id: str, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(lease_id, None)

    # -- choice ---------------------------------------------------------------------------------------------------

    def _choose(self) -> list[str]:
        core = self._core
        waiting = core.ledger.find_leases("waiting")
        holders = core.idle.list_suspendable() if waiting else []
        if not holders:
            return []
        held = {gpu.uuid for lease in core.ledger.snapshot.leases.values() for gpu in lease.held}
        free = set(self._list_usable()) - held
        free -= frozenset().union(*(usage.unsupplied for usage in core.scheduler.report_circuits().values()))
        free |= set(self._list_leaving())
        by_id = {lease.id: lease for lease in waiting}
        order = [by_id[lease_id] for lease_id in core.scheduler.order_requests(core.clock.now()) if lease_id in by_id]
        demands = [self._build_demand(lease, holders) for lease in order[:MAX_DEMANDS]]
        return suspension.choose(demands, holders, free)

    def _list_usable(self) -> Iterator[str]:
        """Yield the GPUs that can be granted while they are free; also where their node has to be woken, or a reading
        has to show first that they are empty.
        """
        capacity = self._core.capacity
        for name, node in capacity.inventory.nodes.items():
            build = capacity.build_awake_capacity if node.is_put_to_sleep else capacity.build_node_capacity
            of_node = build(name)
            for slot in of_node.slots if of_node.takes_work else ():
                freed_at = capacity.lease_flags.get_status(slot.uuid).freed_at
                if slot.available or (freed_at is not None and not node.is_read_after(freed_at)):
                    yield slot.uuid

    def _list_leaving(self) -> Iterator[str]:
        """Yield the GPUs that are about to be free: of leases that end, and of notebooks that are being suspended."""
        for lease in self._core.ledger.snapshot.leases.values():
            is_suspending = suspension.find_state(lease) is SuspensionState.SUSPENDING
            if lease.state is LeaseState.RELEASING or is_suspending:
                yield from (gpu.uuid for gpu in lease.held)

    def _build_demand(self, lease: LeaseRow, holders: Sequence[IdleHolder]) -> WaitingDemand:
        core, is_resuming = self._core, lease.suspension is not None
        build = scheduler_input.build_resume_request if is_resuming else scheduler_input.build_request
        request = build(lease)
        # What its owner holds counts in the owner's quota until it makes way.
        leases = core.ledger.snapshot.leases
        own = {holder.uuid for holder in holders if leases[holder.lease].owner == lease.owner}
        candidates = core.scheduler.find_grantable(request, core.clock.now())
        candidates |= core.scheduler.find_candidates(request) & own
        if is_resuming:
            return WaitingDemand(gpus=1, candidates=candidates)
        useful = [holder for holder in holders if holder.uuid in candidates]
        without_room = {holder.uuid for holder in useful if not self._has_room_beside(holder, lease)}
        return WaitingDemand(gpus=request.least_size, candidates=candidates - without_room)

    def _has_room_beside(self, holder: IdleHolder, request: LeaseRow) -> bool:
        lease = self._core.ledger.snapshot.leases[holder.lease]
        moved_mib = self._core.capacity.find_used_mib(lease.gpus[0])
        return suspension_room.has_room_beside(self._core.scheduler, lease, request, moved_mib)

    # -- moving ---------------------------------------------------------------------------------------------------

    async def _work(self, lease_id: str) -> None:
        lease = self._core.ledger.snapshot.leases.get(lease_id)
        if lease is None or lease.suspension is None or lease.state not in lease_states.LIVE:
            return
        is_suspending = lease.suspension.state is SuspensionState.SUSPENDING
        try:
            await (self._move_out(lease) if is_suspending else self._move_back(lease))
        except GpuhubError as error:
            # Whether the node has done it is not known: the next call finds out.
            log.warning("lease %s: its GPU memory could not be moved: %s", lease_id, error)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def _move_out(self, lease: LeaseRow) -> None:
        gpu, container = lease.gpus[0], self._find_container(lease)
        size_mib = lease.find_size(gpu.node).memory_mib + MARGIN_MIB
        # The last reading of what it uses may be from before its last cell.
        await self._set_limit(lease, size_mib + gpu.memory_mib)
        result = await suspension_container.move_out(
            self._daemons, gpu.node, container=container, gpu=gpu.uuid, max_mib=gpu.memory_mib
        )
        if result.outcome is SuspensionOutcome.DONE:
            # What an interrupted attempt has moved is not in the result.
            moved_mib = max(result.moved_mib, 0 if lease.suspension is None else lease.suspension.moved_mib)
            await self._change(lease, lambda row, now: suspension.prove(row, moved_mib, now))
            await self._set_limit(lease, size_mib + moved_mib)
        elif result.outcome is SuspensionOutcome.REFUSED:
            self._core.idle.note_refusal(lease.id)
            await self._change(lease, lambda row, _: suspension.abandon(row), is_refused=True)
            text = f"{lease.owner}'s {lease.purpose} on {gpu.node} could not be suspended: {result.text}"
            self._core.add_event("lease.not-suspended", text, owner=lease.owner, lease=lease.id)
            await self._set_limit(lease, size_mib - MARGIN_MIB)
        else:
            await self._give_up(lease, result)

    async def _move_back(self, lease: LeaseRow) -> None:
        gpu, container = lease.gpus[0], self._find_container(lease)
        result = await suspension_container.move_back(self._daemons, gpu.node, container=container, gpu=gpu.uuid)
        if result.outcome is SuspensionOutcome.DONE:
            await self._change(lease, lambda row, _: suspension.finish(row))
            await self._set_limit(lease, lease.find_size(gpu.node).memory_mib)
        elif result.outcome is SuspensionOutcome.FAILED:
            await self._give_up(lease, result)
        else:
            # Nothing may be restored onto a GPU that is not empty: that would be the end of the notebook.
            log.warning("lease %s waits for an empty GPU: %s", lease.id, result.text)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def _set_limit(self, lease: LeaseRow, memory_mib: int) -> None:
        container, node = self._find_container(lease), lease.gpus[0].node
        await suspension_container.set_memory_limit(self._daemons, node, container, memory_mib)

    async def _give_up(self, lease: LeaseRow, result: SuspensionResult) -> None:
        reason = f"it was suspended and cannot continue: {result.text}. Its files are kept"
        await self._change(lease, lambda row, now: lease_states.release(row, reason, now))

    def _find_container(self, lease: LeaseRow) -> str:
        """Return the container of a notebook, or that of a job's only worker; empty if it has none any more."""
        job_id = self._core.ledger.index.find_one("job of lease", lease.id)
        workers = () if job_id is None else self._core.ledger.snapshot.jobs[job_id].workers
        return lease.container_id or next((worker.container_id or "" for worker in workers), "")

    async def _change(
        self, lease: LeaseRow, edit: Callable[[LeaseRow, float], LeaseRow], *, is_refused: bool = False
    ) -> None:
        """Change a lease that is suspended; a job whose suspension the node refused (`is_refused`) is preempted."""
        grace_s = self._core.cluster.scheduling.preempt_grace

        def apply(transaction: Transaction) -> None:
            current = transaction.leases.get(lease.id)
            # It may have been asked to end meanwhile; then its container is removed, whatever its memory is.
            if current is not None and current.state in lease_states.LIVE and current.suspension is not None:
                transaction.put_lease(edit(current, transaction.now))
                job_id = transaction.index.find_one("job of lease", lease.id)
                if is_refused and job_id is not None:
                    until = transaction.now + grace_s
                    transaction.put_job(job_states.preempt(transaction.jobs[job_id], until, transaction.now))

        await self._core.ledger.change(apply)
