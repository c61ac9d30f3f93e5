"""The node controller: polls every node and brings the ledger and the containers there into agreement.

A node is polled every `POLL_PERIOD_S`: `node_probe` queries it, `domain.reconcile` decides what follows from its list,
and containers are removed and signalled in the background, so that a slow container does not delay polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpuhub.broker.controllers.deadlines import UnprovenLeases
from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.controllers.nodes.condition_events import ConditionEvents
from gpuhub.broker.controllers.nodes.container_actions import ContainerActions, FetchFiles
from gpuhub.broker.controllers.nodes.node_probe import (
    FirewallChecker,
    NodeProbe,
    describe_firewall_change,
)
from gpuhub.broker.controllers.worker_launcher import WorkerLauncher, inspect_exit
from gpuhub.broker.files.couriers import CourierPool
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.transaction import Transaction
from gpuhub.common.errors import GpuhubError
from gpuhub.common.gpu import GpuSpec
from gpuhub.docker.client import DockerClients
from gpuhub.domain import job_states
from gpuhub.domain import lease_states as rules
from gpuhub.domain.clock import wait_event
from gpuhub.domain.reconcile import (
    Action,
    MarkUnproven,
    ObservedNode,
    ProveReleased,
    RecordWorkerExit,
    RefreshIdentity,
    ReleaseLease,
    RemoveContainer,
    SendSigterm,
    is_clean,
    reconcile_node,
    relies_on_absence,
)
from gpuhub.nodes import gpu_health, guest_readings, status
from gpuhub.nodes.agent import DEVICES_LOST
from gpuhub.nodes.power_status import PowerState
from gpuhub.nodes.status import MachineSize, NodeStatus

log = logging.getLogger(__name__)

#: Interval between two polls of a node, seconds.
POLL_PERIOD_S = 2.0
#: Interval after a failed poll of a node that is up, and while a GPU waits for a reading that shows it empty, seconds.
RETRY_POLL_PERIOD_S = 1.0
#: Interval between two polls of a node that sleeps, seconds.
ASLEEP_POLL_PERIOD_S = 5.0
#: Minimum interval between two polls of a node, also where a poll was requested, seconds.
MIN_POLL_PERIOD_S = 0.02
#: Time of an observation during which the clock was set: it proves nothing for any lease.
_NEVER = float("-inf")


class NodeController:
    """Polls all nodes and acts on what they report, until cancelled."""

    def __init__(
        self,
        *,
        core: BrokerState,
        daemons: DockerClients,
        launcher: WorkerLauncher,
        couriers: CourierPool,
        unproven: UnprovenLeases,
        firewall: FirewallChecker | None = None,
        read_head_free: Callable[[], int] | None = None,
        find_staging: Callable[[], frozenset[str]] = frozenset,
        fetch_files: FetchFiles | None = None,
    ) -> None:
        """Create the controller.

        Args:
            unproven: Collects why nodes give no proof for leases; the deadline controller reads it.
            read_head_free: Returns the free bytes on the disk with the broker's own data.
            find_staging: Returns the leases of notebooks for which datasets are copied to a node.
            fetch_files: Brings back what a job wrote on a guest, before its container is removed.
        """
        self._core = core
        self._daemons = daemons
        self._launcher = launcher
        self._nodes = tuple(core.capacity.inventory.nodes)
        self._couriers = couriers
        self._firewall = firewall
        self._read_head_free = read_head_free
        #: Why the head node's disk keeps all nodes from taking work, for users.
        self._head_error: str | None = None
        self._find_staging = find_staging
        self._probe = NodeProbe(daemons=daemons, clock=core.clock)
        self._actions = ContainerActions(daemons=daemons, on_removed=self.request_poll, before_removal=fetch_files)
        self._conditions = ConditionEvents(core)
        #: Nodes for which a poll was requested.
        self._requested: set[str] = set()
        #: Leases without proof that the last poll of each node has checked.
        self._checked: dict[str, frozenset[str]] = {}
        self._unproven_leases = unproven

    async def run(self) -> None:
        try:
            await self._probe.identify(self._nodes)
            async with asyncio.TaskGroup() as group:
                for node in self._nodes:
                    group.create_task(self._poll_repeatedly(node))
        finally:
            await self._actions.close()
            await self._probe.close()
            if self._firewall is not None:
                await self._firewall.close()

    def request_poll(self, node: str) -> None:
        """Poll a node before its interval has passed."""
        self._requested.add(node)
        self._core.ledger.notify_watchers(f"node:{node}")

    async def _poll_repeatedly(self, node: str) -> None:
        while True:
            began = self._core.clock.monotonic()
            self._requested.discard(node)
            await run_step(f"node {node}", partial(self.poll, node, self._core.clock.now()))
            await asyncio.sleep(MIN_POLL_PERIOD_S)
            await self._until_due(node, began + self._period(node))

    async def _until_due(self, node: str, deadline: float) -> None:
        """Wait until the deadline, a requested poll, or a lease that needs a proof and that no poll has checked."""
        while (left := deadline - self._core.clock.monotonic()) > 0:
            changed = self._core.ledger.watch(f"node:{node}")
            if node in self._requested or self._unproven(node) - self._checked.get(node, frozenset()):
                return
            await wait_event(changed, left)

    def _unproven(self, node: str) -> frozenset[str]:
        """Return leases for which the node must prove that their containers are gone."""
        leases = self._core.ledger.leases_on(node)
        return frozenset(lease.id for lease in leases if node in rules.list_unproven_nodes(lease))

    def _period(self, node: str) -> float:
        core = self._core
        record = core.capacity.inventory.nodes[node]
        if record.power is not None and record.power.state is PowerState.ASLEEP:
            return ASLEEP_POLL_PERIOD_S
        is_doubtful = record.is_up and record.failures > 0
        scheduling = core.cluster.scheduling
        if is_doubtful or gpu_health.is_awaiting_reading(
            record, lease_statuses=core.capacity.lease_flags.by_uuid, scheduling=scheduling
        ):
            return RETRY_POLL_PERIOD_S
        return POLL_PERIOD_S

    async def poll(self, node: str, listed_at: float) -> None:
        """Poll one node and reconcile it with the ledger; `listed_at` is the current time."""
        core = self._core
        record = core.capacity.inventory.nodes[node]
        self._check_head_disk()
        try:
            listed, observed_node, actions = await self._compare(record, listed_at)
            await run_step(f"node {node}", partial(self._apply, observed_node, actions))
            for courier in self._couriers.find_unwanted(node, listed):
                self._actions.remove(node, courier)
            machine = self._probe.find_machine(node)
            new_status = _build_record(record, observed_node, actions, machine, core.clock.monotonic())
            new_status = await self._probe.read_agent(new_status, listed)
            if core.cluster.node(node).guest:
                new_status = guest_readings.check_guest(new_status, core.capacity.inventory.list_foreign_uuids(node))
            new_status = status.record_disks(
                new_status, head_error=self._head_error, floor=core.cluster.scheduling.min_free_disk
            )
            if new_status.disk_error != record.disk_error:
                text = f"node {node}: {new_status.disk_error or 'there is enough free disk space again'}"
                self._record_event("node.disk", text, node)
            if new_status.gpu_error == DEVICES_LOST and record.gpu_error != DEVICES_LOST:
                await self._note_lost_devices(node, listed)
            if self._firewall is not None:
                new_status = await self._firewall.check(new_status)
                for kind, text in describe_firewall_change(record, new_status):
                    self._record_event(kind, text, node)
        except GpuhubError as error:
            self._checked[node] = self._unproven(node)
            await self._observe(status.record_failure(record, str(error), core.clock.monotonic()))
            return
        if new_status.gpu_error is None and _list_gpus(new_status) != _list_gpus(record):
            await core.capacity.save_seen_gpus(new_status)
        await self._observe(new_status)

    def _check_head_disk(self) -> None:
        if self._read_head_free is not None:
            self._head_error = status.find_disk_error(
                self._read_head_free(),
                "with gpuhub's data on the head node",
                floor=self._core.cluster.scheduling.min_free_disk,
                before=self._head_error,
            )

    async def _compare(
        self, record: NodeStatus, listed_at: float
    ) -> tuple[Sequence[Mapping[str, Any]], ObservedNode, list[Action]]:
        """Return the daemon's list of containers, raw and parsed, and the actions that follow from it."""
        clock = self._core.clock
        started_at, jumps_before = clock.monotonic(), clock.jump_count
        listed = await self._probe.list_containers(record.name)
        daemon_id = await self._probe.find_daemon_id(record, listed)
        self._probe.check_identity(record.name)
        observed_node = ObservedNode(
            node=record.name,
            identity=(daemon_id, record.boot_id),
            containers=await self._probe.inspect_containers(record.name, listed),
            observed_at=listed_at if clock.jump_count == jumps_before else _NEVER,
        )
        actions = self._reconcile(observed_node, started_at)
        if relies_on_absence(actions):
            # Since the last query of the daemon's id, another daemon may have replaced it and made the list.
            identity = await self._probe.find_daemon_id(record, listed, is_fresh=True), record.boot_id
            self._probe.check_identity(record.name)
            observed_node = replace(
                observed_node, identity=identity, observed_at=listed_at if clock.jump_count == jumps_before else _NEVER
            )
            actions = self._reconcile(observed_node, started_at)
        return listed, observed_node, actions

    def _reconcile(self, observed_node: ObservedNode, started_at: float) -> list[Action]:
        # The ledger is read after the list, so that the container of a lease made in the meantime is not treated as
        # foreign.
        core = self._core
        snapshot = core.ledger.snapshot
        on_node = core.ledger.leases_on(observed_node.node)
        self._actions.forget_absent(observed_node.node, {container.id for container in observed_node.containers})
        # The list proves nothing for a lease whose release began while it was made: that lease remains to be checked.
        unproven = self._unproven(observed_node.node)
        self._checked[observed_node.node] = frozenset(
            lease.id for lease in on_node if lease.id in unproven and lease.since < observed_node.observed_at
        )
        jobs = {lease.id: core.ledger.index.find_one("job of lease", lease.id) for lease in on_node}
        return reconcile_node(
            replace(observed_node, starting_leases=self._launcher.find_launching(started_at) | self._find_staging()),
            leases=snapshot.leases,
            on_node=on_node,
            job_of={lease: snapshot.jobs[job] for lease, job in jobs.items() if job and job in snapshot.jobs},
            preempt_grace=core.cluster.scheduling.preempt_grace,
        )

    async def _apply(self, observed_node: ObservedNode, actions: list[Action]) -> None:
        node = observed_node.node
        renewed = [action.lease_id for action in actions if isinstance(action, RefreshIdentity)]
        if renewed:
            await self._renew(observed_node, renewed)
        gone = [action.lease_id for action in actions if isinstance(action, ProveReleased)]
        if gone:
            await self._core.ledger.change(mutations.prove_released(gone, node))
        ends = {action.lease_id: action.reason for action in actions if isinstance(action, ReleaseLease)}
        if ends:
            log.info("node %s: leases end: %s", node, ends)
            lost = {action.lease_id for action in actions if isinstance(action, ReleaseLease) and action.is_loss}
            await self._core.ledger.change(mutations.end_leases(ends, lost=lost))
        unproven = {action.lease_id: action.reason for action in actions if isinstance(action, MarkUnproven)}
        for lease in self._unproven_leases.replace_node(node, unproven):
            self._record_event("node.suspect", f"lease {lease} is unproven: {unproven[lease]}", node)
        for action in actions:
            if isinstance(action, RemoveContainer) and self._actions.remove(node, action.container_id):
                self._record_event(
                    "container.removed", f"container {action.container_id[:12]} is removed: {action.reason}", node
                )
            elif isinstance(action, SendSigterm) and self._actions.signal(node, action.container_id):
                self._record_event(
                    "worker.signalled", f"container {action.container_id[:12]} gets SIGTERM: {action.reason}", node
                )
            elif isinstance(action, RecordWorkerExit):
                await self._note_exit(node, action)

    async def _renew(self, observed_node: ObservedNode, lease_ids: list[str]) -> None:
        def edit(transaction: Transaction) -> None:
            for lease in filter(None, map(transaction.leases.get, lease_ids)):
                transaction.put_lease(rules.refresh_identity(lease, observed_node.node, observed_node.identity))

        await self._core.ledger.change(edit)

    async def _note_lost_devices(self, node: str, listed: Sequence[Mapping[str, Any]]) -> None:
        """Warn the owners, and replace the agent: a new one reports whether new containers get their devices again."""
        await self._core.ledger.change(mutations.note_lost_devices(node))
        for agent in self._probe.find_agents(listed):
            self._actions.remove(node, agent)

    async def _note_exit(self, node: str, action: RecordWorkerExit) -> None:
        snapshot = self._core.ledger.snapshot
        limit = snapshot.leases[snapshot.jobs[action.job_id].lease_id].find_size(node).memory_mib * 1024**2
        code, message = await inspect_exit(self._daemons, node, action.container_id, limit)
        edit = (action.job_id, lambda job, now: job_states.record_worker_exit(job, action.index, code, message, now))
        await self._core.ledger.change(mutations.change_jobs([edit]))

    async def _observe(self, record: NodeStatus) -> None:
        await self._core.observe(record)
        self._conditions.report(record.name, self._head_error)

    def _record_event(self, kind: str, text: str, node: str) -> None:
        log.info("node %s: %s", node, text)
        self._core.add_event(kind, text, node=node)


def _build_record(
    record: NodeStatus,
    observed_node: ObservedNode,
    actions: Sequence[Action],
    machine: MachineSize | None,
    monotonic: float,
) -> NodeStatus:
    """Return the record of a node that answered."""
    return status.record_answer(record, monotonic).evolve(
        is_reconciled=is_clean(actions),
        is_suspect=any(isinstance(action, MarkUnproven) for action in actions),
        daemon_id=observed_node.identity[0],
        machine=machine or record.machine,
    )


def _list_gpus(record: NodeStatus) -> list[tuple[str, int, GpuSpec]]:
    return [(gpu.uuid, gpu.index, gpu.card) for gpu in record.gpus if gpu.is_listed]
