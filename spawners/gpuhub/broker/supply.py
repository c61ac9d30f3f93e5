"""What there is to give: the nodes as they were last seen, with cordons and reservations, as the engine has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from gpuhub.broker import reservations as reservation_rules
from gpuhub.broker.clock import Clock
from gpuhub.broker.cordons import Cordon
from gpuhub.broker.health import Guards
from gpuhub.broker.rows import LeaseRow, ReservationRow
from gpuhub.broker.store import SeenGpu, Store
from gpuhub.engines.base import NodeSupply, Reservation
from gpuhub.gpus import Card
from gpuhub.nodes.health import build_node_supply
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.records import NodeRecord
from gpuhub.settings import Cluster


class Supply:
    """Holder of the inventory and of what administrators said about it."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        inventory: Inventory,
        clock: Clock,
        cordons: dict[str, Cordon],
        reservations: Sequence[ReservationRow],
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self.inventory = inventory
        self.cordons = cordons
        self.reservations = tuple(reservations)
        self.guards = Guards()
        #: What there is, reachable or not, None where nobody knows yet; another dict whenever that changed.
        self.cards: dict[str, tuple[Card, ...] | None] = inventory.cards()

    def observe(self, record: NodeRecord) -> None:
        """A node was read."""
        before = self.inventory.nodes[record.name]
        if record == before:
            return
        self.inventory = self.inventory.with_node(record)
        cards = tuple(gpu.card for gpu in record.gpus) if record.is_known else self.cards[record.name]
        if cards != self.cards[record.name] or record.driver != before.driver:
            self.cards = {**self.cards, record.name: cards}

    def build_node(self, name: str) -> NodeSupply:
        """A node as the engine sees it."""
        return build_node_supply(
            self.inventory,
            name,
            cordon=self.cordons.get(name),
            guards=self.guards.by_uuid,
            monotonic=self._clock.monotonic(),
            scheduling=self._cluster.scheduling,
        )

    def build_reservations(self) -> list[Reservation]:
        """All reservations as the engine sees them."""
        return [reservation_rules.for_engine(row, self.inventory) for row in self.reservations]

    def identity_of(self, node: str) -> tuple[str | None, str | None]:
        """Which daemon and which start of the machine a lease begins with."""
        return self.inventory.nodes[node].identity

    # -- who holds what -------------------------------------------------------------------------------------------

    def note_held(self, rows: Iterable[LeaseRow]) -> None:
        """These leases hold what they hold."""
        for lease in rows:
            for gpu in lease.held:
                self.guards.note_held(gpu.uuid, lease.id)

    def note_freed(self, lease: LeaseRow) -> set[str]:
        """What a lease does not hold (any more); returns the nodes of these GPUs that are in the settings."""
        freed = [gpu for gpu in lease.gpus if gpu.released_at is not None]
        for gpu in freed:
            self.guards.note_freed(gpu.uuid, lease.id, self._clock.monotonic())
        return {gpu.node for gpu in freed if gpu.node in self.inventory.nodes}

    # -- what administrators say ----------------------------------------------------------------------------------

    async def set_cordon(self, store: Store, node: str, cordon: Cordon | None) -> None:
        """Store and apply a node's cordon; None takes it away."""
        await asyncio.to_thread(store.save_cordon, node, cordon)
        others = {name: other for name, other in self.cordons.items() if name != node}
        self.cordons = others if cordon is None else {**others, node: cordon}

    async def add_reservation(self, store: Store, row: ReservationRow) -> None:
        """Store and apply a reservation."""
        await asyncio.to_thread(store.save_reservation, row)
        self.reservations = tuple(sorted((*self.reservations, row), key=lambda one: (one.starts_at, one.id)))

    async def drop_reservations(self, store: Store, ids: Sequence[str]) -> None:
        """Take reservations away."""
        await asyncio.to_thread(store.drop_reservations, ids)
        self.reservations = tuple(row for row in self.reservations if row.id not in ids)

    async def forget_reservations(self, store: Store) -> bool:
        """Take away those that ended; whether there were any."""
        ended = [row.id for row in self.reservations if row.ends_at <= self._clock.now()]
        if ended:
            await self.drop_reservations(store, ended)
        return bool(ended)


def build_seen(record: NodeRecord, now: float) -> list[SeenGpu]:
    """What of a node's GPUs is kept for times when it does not answer."""
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
