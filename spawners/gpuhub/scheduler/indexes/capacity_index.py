"""An index of the nodes and of what is held there, with a log of changed nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler.demand import UNLIMITED, WHOLE
from gpuhub.scheduler.indexes.power_headroom import PowerHeadroom
from gpuhub.scheduler.interface import Allocation, GpuSlot, NodeCapacity
from gpuhub.scheduler.placement import FreeCapacity


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMask:
    """Resources of one node that some requests may not use."""

    slots: frozenset[str] = frozenset()
    #: The node may not be used at all.
    excludes_node: bool = False
    #: Limits of what may be used; None for no limit.
    cpu_milli: int | None = None
    memory_mib: int | None = None

    def combine(self, other: NodeMask) -> NodeMask:
        return NodeMask(
            slots=self.slots | other.slots,
            excludes_node=self.excludes_node or other.excludes_node,
            cpu_milli=_min_limit(self.cpu_milli, other.cpu_milli),
            memory_mib=_min_limit(self.memory_mib, other.memory_mib),
        )


def _min_limit(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


#: When something is free: now (or as soon as its holder, which was asked to end, has ended), or at no known time.
IMMEDIATELY = -math.inf
UNKNOWN_TIME = math.inf
#: Largest sizes of the log of changes and of the table of capacity classes.
_MAX_CHANGES = 65536
_MAX_CLASSES = 65536


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapacityClass:
    """Free capacity of a node, with equal GPUs sorted by what is free of them. Equal nodes share one instance."""

    #: Lists by position: card numbers, free thousandths, and the number of shares of each GPU (0: not divided).
    cards: tuple[int, ...]
    free: tuple[int, ...]
    share_counts: tuple[int, ...]
    cpu_milli: int
    memory_mib: int
    load: int
    models: tuple[GpuSpec, ...]

    def build_policy_input(self, free: tuple[int, ...]) -> FreeCapacity:
        """Return what a policy gets to see, with the given free thousandths."""
        return FreeCapacity(
            cards=self.models, free=free, cpu_milli=self.cpu_milli, memory_mib=self.memory_mib, load=self.load
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """Resources that one allocation takes of one node."""

    positions: tuple[int, ...]
    share: int
    cpu_milli: int
    memory_mib: int
    is_exclusive: bool
    #: `IMMEDIATELY` if asked to end, `UNKNOWN_TIME` without a time limit.
    ends_at: float


#: A capacity class, and the position in `IndexedNode.capacity.slots` of each of its GPUs.
ClassifiedCapacity = tuple[CapacityClass, tuple[int, ...]]


@dataclass(slots=True, kw_only=True, eq=False)
class IndexedNode:
    """One node with what is held there."""

    capacity: NodeCapacity
    #: The card number of each slot.
    cards: tuple[int, ...]
    uses: dict[str, NodeUse] = field(default_factory=dict)
    #: When each GPU is free as a whole; None for a GPU that is not available.
    free_at: tuple[float | None, ...] = ()
    #: For each divided GPU, by position: its number of shares, and when a share is free.
    share_free_at: dict[int, tuple[int, float]] = field(default_factory=dict)
    is_current: bool = False
    #: None if nothing may start there now.
    classified: ClassifiedCapacity | None = None
    positions: dict[str, int] = field(default_factory=dict)

    @property
    def has_exclusive_use(self) -> bool:
        return any(use.is_exclusive for use in self.uses.values())

    def free_cpu_milli(self) -> int:
        if self.capacity.cpu_milli is None:
            return UNLIMITED
        return max(0, self.capacity.cpu_milli - sum(use.cpu_milli for use in self.uses.values()))

    def free_memory_mib(self) -> int:
        if self.capacity.memory_mib is None:
            return UNLIMITED
        return max(0, self.capacity.memory_mib - sum(use.memory_mib for use in self.uses.values()))

    def count_unheld_milli(self) -> int:
        """Return what no allocation holds of its GPUs, thousandths of a GPU."""
        held = sum(len(use.positions) * (WHOLE // use.share) for use in self.uses.values())
        return max(0, len(self.cards) * WHOLE - held)

    def select_slots(self, slot_order: Sequence[int], gpus: Iterable[int]) -> tuple[GpuSlot, ...]:
        """Return the slots for positions in a capacity class, given the class's slot order."""
        return tuple(self.capacity.slots[position] for position in sorted(slot_order[gpu] for gpu in gpus))


class CapacityIndex:
    """All nodes and allocations, and which nodes changed since when."""

    def __init__(self) -> None:
        self.nodes: dict[str, IndexedNode] = {}
        self.allocations: dict[str, Allocation] = {}
        #: Numbers of the cards, in order of appearance; equal cards have one number.
        self.cards: dict[GpuSpec, int] = {}
        #: Increases when everything cached about capacity classes or demands is invalid.
        self.epoch = 0
        #: The groups that some node is restricted to.
        self.node_groups: frozenset[str] = frozenset()
        #: Nodes with cards of more than one kind.
        self.mixed_nodes: set[str] = set()
        #: The nodes of each enforced circuit, by its name.
        self.circuits: dict[str, set[str]] = {}
        #: What each of them can still supply, cached for a number of changes.
        self.headrooms: dict[str, PowerHeadroom] = {}
        self.headrooms_at = -1
        self._dropped = 0
        self._on_node: dict[str, dict[str, None]] = {}
        self._log: list[str] = []
        self._classes: dict[tuple[object, ...], CapacityClass] = {}

    @property
    def change_count(self) -> int:
        """The number of changes of nodes so far."""
        return self._dropped + len(self._log)

    def changed_since(self, change_count: int) -> Iterable[str]:
        """Return the nodes that changed after that count; all nodes if the log does not reach back that far."""
        if change_count < self._dropped:
            return self.nodes
        return dict.fromkeys(self._log[change_count - self._dropped :])

    def count_cards(self) -> Counter[GpuSpec]:
        """Return the number of GPUs of each card on all nodes."""
        return Counter(slot.card for node in self.nodes.values() for slot in node.capacity.slots)

    def put_node(self, capacity: NodeCapacity) -> None:
        """Add or replace a node, with the allocations that name it."""
        existing = self.nodes.get(capacity.name)
        if existing is not None and existing.capacity == capacity:
            return
        for slot in capacity.slots:
            if slot.card not in self.cards:
                self.cards[slot.card] = len(self.cards)
                self.epoch += 1
        if not capacity.groups <= self.node_groups:
            self.node_groups |= capacity.groups
            self.epoch += 1
        self._connect(existing, capacity)
        node = IndexedNode(capacity=capacity, cards=tuple(self.cards[slot.card] for slot in capacity.slots))
        node.positions = {slot.uuid: position for position, slot in enumerate(capacity.slots)}
        self.nodes[capacity.name] = node
        if len(set(node.cards)) > 1:
            self.mixed_nodes.add(capacity.name)
        else:
            self.mixed_nodes.discard(capacity.name)
        for allocation_id in self._on_node.get(capacity.name, ()):
            self._attach(node, self.allocations[allocation_id])
        self._log_change(node)

    def _connect(self, existing: IndexedNode | None, capacity: NodeCapacity) -> None:
        """Note which circuit supplies a node; one without nodes is forgotten."""
        before = None if existing is None else existing.capacity.circuit
        if before is not None:
            self.circuits[before.name].discard(capacity.name)
            if not self.circuits[before.name]:
                del self.circuits[before.name]
        if capacity.circuit is not None:
            self.circuits.setdefault(capacity.circuit.name, set()).add(capacity.name)

    def put_allocation(self, allocation: Allocation) -> None:
        self.remove_allocation(allocation.request.id)
        self.allocations[allocation.request.id] = allocation
        for node_allocation in allocation.node_allocations:
            self._on_node.setdefault(node_allocation.node, {})[allocation.request.id] = None
            node = self.nodes.get(node_allocation.node)
            if node is not None:
                self._attach(node, allocation)
                self._log_change(node)

    def remove_allocation(self, allocation_id: str) -> Allocation | None:
        """Remove an allocation and return it; None if there is none."""
        allocation = self.allocations.pop(allocation_id, None)
        if allocation is None:
            return None
        for name in {node_allocation.node for node_allocation in allocation.node_allocations}:
            self._on_node[name].pop(allocation_id, None)
            node = self.nodes.get(name)
            if node is not None:
                node.uses.pop(allocation_id, None)
                self._log_change(node)
        return allocation

    def expect_release(self, allocation_id: str, nodes: frozenset[str]) -> None:
        """Note that an allocation was asked to release nodes: what it has there counts as free at once, when it has
        gone.
        """
        allocation = self.allocations[allocation_id]
        is_whole = nodes >= {node_allocation.node for node_allocation in allocation.node_allocations}
        self.put_allocation(
            replace(allocation, is_ending=allocation.is_ending or is_whole, shrinking=allocation.shrinking | nodes)
        )

    def classify(self, node: IndexedNode) -> ClassifiedCapacity | None:
        """Return the free capacity of a node; None if nothing may start there now."""
        if not node.is_current:
            self._refresh(node)
        return node.classified

    def classify_masked(self, node: IndexedNode, mask: NodeMask) -> ClassifiedCapacity | None:
        """Return the free capacity of a node under a mask; None if nothing may start there now."""
        unmasked = self.classify(node)
        return None if unmasked is None or mask.excludes_node else self.restrict(node, unmasked, mask)

    def restrict(self, node: IndexedNode, classified: ClassifiedCapacity, mask: NodeMask) -> ClassifiedCapacity:
        """Return what a mask leaves of a node's free capacity."""
        capacity_class, slot_order = classified
        slots = node.capacity.slots
        free = [
            0 if slots[position].uuid in mask.slots else capacity_class.free[gpu]
            for gpu, position in enumerate(slot_order)
        ]
        cpu = capacity_class.cpu_milli if mask.cpu_milli is None else min(capacity_class.cpu_milli, mask.cpu_milli)
        memory = (
            capacity_class.memory_mib if mask.memory_mib is None else min(capacity_class.memory_mib, mask.memory_mib)
        )
        gpu_rows = [
            (capacity_class.cards[gpu], -free[gpu], capacity_class.share_counts[gpu], position)
            for gpu, position in enumerate(slot_order)
        ]
        return self._intern(gpu_rows, max(0, cpu), max(0, memory), capacity_class.load)

    def _attach(self, node: IndexedNode, allocation: Allocation) -> None:
        name, request = node.capacity.name, allocation.request
        parts = [part for part in allocation.node_allocations if part.node == name]
        uuids = [slot.uuid for part in parts for slot in part.slots]
        cpu = next((part.cpu_milli for part in parts if part.cpu_milli is not None), request.cpu_milli)
        memory = next((part.memory_mib for part in parts if part.memory_mib is not None), request.memory_mib)
        node.uses[request.id] = NodeUse(
            positions=tuple(node.positions[uuid] for uuid in uuids if uuid in node.positions),
            share=request.share,
            cpu_milli=cpu,
            memory_mib=memory,
            is_exclusive=request.exclusive,
            ends_at=_find_end(allocation, name),
        )

    def _log_change(self, node: IndexedNode) -> None:
        node.is_current = False
        self._log.append(node.capacity.name)
        if len(self._log) > _MAX_CHANGES:
            self._dropped += _MAX_CHANGES // 2
            del self._log[: _MAX_CHANGES // 2]
        if len(self._classes) > _MAX_CLASSES:
            self._classes.clear()

    def _refresh(self, node: IndexedNode) -> None:
        node.is_current = True
        slots = node.capacity.slots
        use_count, share_counts = [0] * len(slots), [0] * len(slots)
        free_at: list[float | None] = [IMMEDIATELY if slot.available else None for slot in slots]
        share_free_at: dict[int, float] = {}
        for use in node.uses.values():
            for gpu in use.positions:
                if not use_count[gpu]:
                    share_counts[gpu] = use.share if use.share > 1 else 0
                elif share_counts[gpu] != use.share:
                    share_counts[gpu] = 0
                use_count[gpu] += 1
                time = free_at[gpu]
                if time is not None:
                    free_at[gpu] = max(time, use.ends_at)
                    share_free_at[gpu] = min(share_free_at.get(gpu, UNKNOWN_TIME), use.ends_at)
        free = [_count_free(time, use_count[gpu], share_counts[gpu]) for gpu, time in enumerate(free_at)]
        node.free_at = tuple(free_at)
        node.share_free_at = {
            gpu: (share_counts[gpu], IMMEDIATELY if free[gpu] else share_free_at[gpu])
            for gpu, time in enumerate(free_at)
            if share_counts[gpu] and time is not None
        }
        if node.capacity.takes_work and not node.has_exclusive_use:
            gpu_rows = [(node.cards[gpu], -free[gpu], share_counts[gpu], gpu) for gpu in range(len(slots))]
            node.classified = self._intern(gpu_rows, node.free_cpu_milli(), node.free_memory_mib(), len(node.uses))
        else:
            node.classified = None

    def _intern(
        self, gpu_rows: list[tuple[int, int, int, int]], cpu_milli: int, memory_mib: int, load: int
    ) -> ClassifiedCapacity:
        gpu_rows.sort()
        key = (tuple([row[:3] for row in gpu_rows]), cpu_milli, memory_mib, load)
        capacity_class = self._classes.get(key)
        if capacity_class is None:
            by_number = list(self.cards)
            capacity_class = self._classes[key] = CapacityClass(
                cards=tuple(row[0] for row in gpu_rows),
                free=tuple(-row[1] for row in gpu_rows),
                share_counts=tuple(row[2] for row in gpu_rows),
                cpu_milli=cpu_milli,
                memory_mib=memory_mib,
                load=load,
                models=tuple(by_number[row[0]] for row in gpu_rows),
            )
        return capacity_class, tuple([row[3] for row in gpu_rows])


def _find_end(allocation: Allocation, node: str) -> float:
    if allocation.is_quarantined:
        return UNKNOWN_TIME
    if allocation.is_ending or node in allocation.shrinking:
        return IMMEDIATELY
    return UNKNOWN_TIME if allocation.ends_at is None else allocation.ends_at


def _count_free(free_at: float | None, use_count: int, share_count: int) -> int:
    if free_at is None:
        return 0
    if not use_count:
        return WHOLE
    return max(0, share_count - use_count) * (WHOLE // share_count) if share_count else 0
