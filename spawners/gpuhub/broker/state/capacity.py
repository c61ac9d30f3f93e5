"""The nodes as last read, with cordons and reservations, and their values for the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gpuhub.broker.db.gpu_records import SeenGpu
from gpuhub.broker.db.store import Store
from gpuhub.broker.state.gpu_records import GpuRecords
from gpuhub.broker_api.schemas.bench import NodeBenchView
from gpuhub.common.gpu import GpuSpec
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import reservations as reservations_module
from gpuhub.domain import suspension
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import LeasedGpu, LeaseRow, ReservationRow
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.node_capacity import build_awake_capacity, build_node_capacity
from gpuhub.nodes.power_status import PowerStatus
from gpuhub.nodes.status import Cordon, GpuLeaseStatus, NodeStatus, find_power_limits
from gpuhub.scheduler.interface import NodeCapacity, Reservation

_FREE = GpuLeaseStatus()


class GpuLeaseFlags:
    """Which GPUs are leased, and when each was last proven free, in monotonic seconds."""

    def __init__(self) -> None:
        self._holders: dict[str, set[str]] = {}
        self._awaited_by: dict[str, set[str]] = {}
        self._statuses: dict[str, GpuLeaseStatus] = {}

    @property
    def by_uuid(self) -> Mapping[str, GpuLeaseStatus]:
        """Every GPU that was leased in this run."""
        return self._statuses

    def get_status(self, uuid: str) -> GpuLeaseStatus:
        return self._statuses.get(uuid, _FREE)

    def mark_held(self, uuid: str, lease: str) -> None:
        """Mark a GPU, or a share of it, as held by a lease; repeated calls change nothing."""
        self._holders.setdefault(uuid, set()).add(lease)
        self._statuses[uuid] = replace(self.get_status(uuid), leased=True)

    def mark_freed(self, uuid: str, lease: str, monotonic: float) -> None:
        """Mark a GPU as proven free of a lease; repeated calls change nothing."""
        holders = self._holders.get(uuid, set())
        if lease not in holders:
            return
        holders.remove(lease)
        self._statuses[uuid] = replace(self.get_status(uuid), leased=bool(holders), freed_at=monotonic)

    def mark_awaited(self, uuid: str, lease: str, *, is_awaited: bool) -> bool:
        """Mark whether a suspended notebook can only continue with a GPU; return whether that has changed."""
        waiting = self._awaited_by.setdefault(uuid, set())
        before = bool(waiting)
        waiting.discard(lease)
        if is_awaited:
            waiting.add(lease)
        if bool(waiting) == before:
            return False
        self._statuses[uuid] = replace(self.get_status(uuid), is_awaited=bool(waiting))
        return True


class Capacity:
    """The inventory of nodes, with the administrators' cordons and reservations."""

    def __init__(
        self,
        *,
        cluster: ClusterSettings,
        store: Store,
        inventory: Inventory,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._clock = clock
        self.gpu_records = GpuRecords(store)
        self.inventory = inventory
        self.cordons: Mapping[str, Cordon] = {cordon.node: cordon for cordon in store.load_cordons()}
        self.reservations = tuple(store.load_reservations())
        self.power = _load_power(cluster, store)
        #: What `gpuhub bench` last found, by node.
        self.bench: Mapping[str, NodeBenchView] = {}
        #: Sleeping nodes that something else than the queue needs.
        self.wake_requests: set[str] = set()
        self.lease_flags = GpuLeaseFlags()
        #: GPUs of every node, reachable or not; None for a node that was never read. Replaced, not changed, when GPUs
        #: change.
        self.cards: dict[str, tuple[GpuSpec, ...] | None] = inventory.cards()
        for name in self.power:
            self.update_node(inventory.nodes[name])

    def update_node(self, record: NodeStatus) -> None:
        """Store what was read from a node."""
        before = self.inventory.nodes[record.name]
        record = record.evolve(faults=self.gpu_records.find_faults(record), power=self.power.get(record.name))
        if record == before:
            return
        self.inventory = self.inventory.with_node(record)
        cards = tuple(gpu.card for gpu in record.gpus) if record.has_readings else self.cards[record.name]
        has_circuit = self.inventory.configured_nodes[record.name].circuit is not None
        has_new_limits = has_circuit and find_power_limits(record.gpus) != find_power_limits(before.gpus)
        if cards != self.cards[record.name] or record.driver != before.driver or has_new_limits:
            self.cards = {**self.cards, record.name: cards}

    def build_node_capacity(self, name: str) -> NodeCapacity:
        """Return a node's capacity for the scheduler."""
        return self._build(build_node_capacity, name)

    def build_awake_capacity(self, name: str) -> NodeCapacity:
        """Return the capacity that a sleeping node has for the scheduler once it is awake."""
        return self._build(build_awake_capacity, name)

    def _build(self, build: Callable[..., NodeCapacity], name: str) -> NodeCapacity:
        return build(
            self.inventory,
            name,
            cordon=self.cordons.get(name),
            lease_statuses=self.lease_flags.by_uuid,
            monotonic=self._clock.monotonic(),
            scheduling=self._cluster.scheduling,
        )

    def build_reservations(self) -> list[Reservation]:
        return [reservations_module.build_scheduler_reservation(row, self.inventory) for row in self.reservations]

    def get_identity(self, node: str) -> tuple[str | None, str | None]:
        """Return the ids of daemon and boot with which a lease on the node begins."""
        return self.inventory.nodes[node].identity

    # -- held GPUs ---------------------------------------------------------------------------------------------------

    def mark_held(self, rows: Iterable[LeaseRow]) -> None:
        """Mark the GPUs of these leases as held."""
        for lease in rows:
            for gpu in lease.held:
                self.lease_flags.mark_held(gpu.uuid, lease.id)
            self.mark_awaited(lease)

    def mark_awaited(self, lease: LeaseRow) -> set[str]:
        """Mark whether a lease needs its GPU back; return the nodes in the settings for which that has changed."""
        is_awaited = lease.is_open and suspension.is_without_gpu(lease)
        return {
            gpu.node
            for gpu in (lease.gpus if is_awaited or lease.suspension is not None or lease.held_from else ())
            if self.lease_flags.mark_awaited(gpu.uuid, lease.id, is_awaited=is_awaited)
            and gpu.node in self.inventory.nodes
        }

    def mark_freed(self, lease: LeaseRow) -> set[str]:
        """Mark the released GPUs of a lease as free, and return their nodes as far as these are in the settings."""
        freed = [gpu for gpu in lease.gpus if gpu.released_at is not None]
        for gpu in freed:
            self.lease_flags.mark_freed(gpu.uuid, lease.id, self._clock.monotonic())
        return {gpu.node for gpu in freed if gpu.node in self.inventory.nodes}

    def find_used_mib(self, gpu: LeasedGpu) -> int:
        """Return the memory in use on a leased GPU by its last reading, MiB; all of it where that is not known."""
        node = self.inventory.nodes.get(gpu.node)
        readings = () if node is None else node.gpus
        used = next((reading.memory_used_mib for reading in readings if reading.uuid == gpu.uuid), None)
        return gpu.memory_mib if used is None else used

    async def save_seen_gpus(self, record: NodeStatus) -> None:
        """Store which GPUs a node has, for times when it cannot be read."""
        seen = build_seen_gpus(record, self._clock.now())
        await asyncio.to_thread(self._store.save_seen_gpus, record.name, seen)

    # -- cordons and reservations ------------------------------------------------------------------------------------

    async def set_cordon(self, node: str, cordon: Cordon | None) -> None:
        """Store and apply a node's cordon; None removes it."""
        await asyncio.to_thread(self._store.save_cordon, node, cordon)
        others = {name: other for name, other in self.cordons.items() if name != node}
        self.cordons = others if cordon is None else {**others, node: cordon}

    async def set_power(self, power: PowerStatus) -> None:
        """Store and apply a node's power."""
        await asyncio.to_thread(self._store.power.save, power)
        self.power = {**self.power, power.node: power}
        self.update_node(self.inventory.nodes[power.node])

    @property
    def current_reservations(self) -> Sequence[ReservationRow]:
        """The reservations that have not ended, the earliest first."""
        now = self._clock.now()
        return [row for row in self.reservations if row.ends_at > now]

    async def add_reservation(self, row: ReservationRow) -> None:
        await asyncio.to_thread(self._store.save_reservation, row)
        self.reservations = tuple(sorted((*self.reservations, row), key=lambda row: (row.starts_at, row.id)))

    async def remove_reservations(self, ids: Sequence[str]) -> None:
        await asyncio.to_thread(self._store.delete_reservations, ids)
        self.reservations = tuple(row for row in self.reservations if row.id not in ids)

    async def remove_ended_reservations(self) -> bool:
        """Remove reservations that have ended; return whether there were any."""
        ended = [row.id for row in self.reservations if row.ends_at <= self._clock.now()]
        if ended:
            await self.remove_reservations(ended)
        return bool(ended)


def _load_power(cluster: ClusterSettings, store: Store) -> Mapping[str, PowerStatus]:
    """Return the power of the nodes that may sleep; a node for which that is new is on."""
    stored = store.power.load()
    return {node.name: stored.get(node.name, PowerStatus(node=node.name)) for node in cluster.power_nodes}


def build_seen_gpus(record: NodeStatus, now: float) -> list[SeenGpu]:
    """Return the stored values of a node's GPUs."""
    return [
        SeenGpu(
            uuid=gpu.uuid,
            node=record.name,
            index=gpu.index,
            model=gpu.model,
            memory_mib=gpu.memory_mib,
            capability=gpu.capability,
            is_mig=gpu.is_mig,
            seen_at=now,
        )
        for gpu in record.gpus
        if gpu.is_listed
    ]
