"""An index of the nodes on which a demand fits now, updated from the capacity index's log."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpuhub.scheduler.demand import WHOLE, DemandVariant, NodeDemand
from gpuhub.scheduler.indexes.capacity_index import (
    CapacityClass,
    CapacityIndex,
    ClassifiedCapacity,
    IndexedNode,
    NodeMask,
)
from gpuhub.scheduler.indexes.power_headroom import PowerHeadroom
from gpuhub.scheduler.interface import GpuSlot
from gpuhub.scheduler.placement import PlacementChoice, PlacementPolicy

#: Cached results are dropped beyond this number.
_MAX_CACHED = 8192


class NodeOption(NamedTuple):
    """A node on which the demand fits, with its free capacity under a mask."""

    node: IndexedNode
    classified: ClassifiedCapacity
    #: GPUs that the demand could get there.
    gpu_count: int


class CapacityMask:
    """Masks of nodes, and the free capacity that remains there."""

    def __init__(
        self, capacity: CapacityIndex, by_node: Mapping[str, NodeMask], headrooms: Mapping[str, Sequence[PowerHeadroom]]
    ) -> None:
        self.by_node = by_node
        #: What enforced circuits must still be able to supply later, by name.
        self.headrooms = headrooms
        self._capacity = capacity
        self._classified: dict[str, tuple[ClassifiedCapacity | None, ClassifiedCapacity | None]] = {}

    def classify(self, name: str) -> ClassifiedCapacity | None:
        """Return the rest of a node's free capacity; None if nothing may be used."""
        node = self._capacity.nodes[name]
        current = self._capacity.classify(node)
        cached = self._classified.get(name)
        if cached is None or cached[0] is not current:
            cached = self._classified[name] = current, self._capacity.classify_masked(node, self.by_node[name])
        return cached[1]


class FitIndex:
    """The nodes on which one demand variant fits."""

    def __init__(self, variant: DemandVariant, capacity: CapacityIndex, policy: PlacementPolicy) -> None:
        self.variant = variant
        self._capacity = capacity
        self._policy = policy
        self._reset()

    def _reset(self) -> None:
        self._epoch, self._seen_changes = self._capacity.epoch, -1
        self.accepted = frozenset(number for card, number in self._capacity.cards.items() if self.variant.accepts(card))
        self.ranked_cards = self.variant.rank_cards(self._capacity.cards)
        self.ranked_card_numbers = [self._capacity.cards[card] for card in self.ranked_cards]
        self._gpu_counts: dict[CapacityClass, int] = {}
        self._fitting: dict[str, ClassifiedCapacity] = {}
        self._total = 0
        self._reset_choices(self._policy)

    def _reset_choices(self, policy: PlacementPolicy) -> None:
        self._policy = policy
        self._choices: dict[tuple[CapacityClass, int, int], PlacementChoice | None] = {}
        self._heap: list[tuple[tuple[float, ...], str]] = []
        self._ranked: dict[str, tuple[float, ...]] = {}
        self._unranked = dict.fromkeys(self._fitting)

    @property
    def capacity(self) -> CapacityIndex:
        return self._capacity

    @property
    def is_mixed(self) -> bool:
        """True if some node has different cards."""
        return bool(self._capacity.mixed_nodes)

    def set_policy(self, policy: PlacementPolicy) -> None:
        """Use another policy from now on."""
        if policy is not self._policy:
            self._reset_choices(policy)

    def count_gpus(self, capacity_class: CapacityClass) -> int:
        """Return the GPUs (1 for a demand without GPU) available in this class; 0 if the demand does not fit."""
        count = self._gpu_counts.get(capacity_class)
        if count is None:
            if len(self._gpu_counts) > _MAX_CACHED:
                self._gpu_counts.clear()
            count = self._gpu_counts[capacity_class] = self._count_gpus(capacity_class)
        return count

    def count(self, mask: CapacityMask | None) -> int:
        """Return the number of nodes on which the demand fits, or of GPUs for a spread demand."""
        self._update()
        total = self._total
        for name in self._masked_names(mask):
            total -= self._count_of(self._fitting[name])
            total += sum(
                option.gpu_count if self.variant.is_spread else 1 for option in self._masked_options(mask, [name])
            )
        return total

    def find_best(self, mask: CapacityMask | None) -> tuple[NodeOption, PlacementChoice] | None:
        """Return the best node for a demand of one node."""
        self._update()
        masked_names = self._masked_names(mask)
        set_aside = []
        best_entry: tuple[tuple[float, ...], str] | None = None
        self._rank_all()
        while self._heap:
            rank, name = self._heap[0]
            if self._ranked.get(name) != rank:
                heapq.heappop(self._heap)
            elif name in masked_names:
                set_aside.append(heapq.heappop(self._heap))
            else:
                best_entry = rank, name
                break
        for entry in set_aside:
            heapq.heappush(self._heap, entry)
        best = self._build_option(best_entry[1], self._fitting[best_entry[1]]) if best_entry else None
        for option in self._masked_options(mask, masked_names):
            choice = self.choose(option, self.variant.gpus)
            masked_entry = (choice.rank, option.node.capacity.name) if choice else None
            if masked_entry is not None and (best_entry is None or masked_entry < best_entry):
                best_entry, best = masked_entry, option
        choice = self.choose(best, self.variant.gpus) if best else None
        return (best, choice) if best and choice else None

    def list_options(self, mask: CapacityMask | None) -> list[NodeOption]:
        """Return all nodes on which the demand fits, by name."""
        self._update()
        masked_names = self._masked_names(mask)
        options = [
            self._build_option(name, classified)
            for name, classified in self._fitting.items()
            if name not in masked_names
        ]
        options += self._masked_options(mask, masked_names)
        return sorted(options, key=lambda option: option.node.capacity.name)

    def list_open_slots(self, option: NodeOption) -> list[GpuSlot]:
        """Return the GPUs of a node that the demand could get, one by one."""
        capacity_class, slot_order = option.classified
        gpus = zip(capacity_class.cards, capacity_class.free, capacity_class.share_counts, slot_order, strict=True)
        return [
            option.node.capacity.slots[position]
            for number, free, share_count, position in gpus
            if number in self.accepted
            and (free > 0 and share_count == self.variant.share if self.variant.joins_shared_gpu else free == WHOLE)
        ]

    def restrict(self, option: NodeOption, slots: frozenset[str]) -> NodeOption | None:
        """Return the option without these GPUs; None if the demand does not fit then."""
        classified = self._capacity.restrict(option.node, option.classified, NodeMask(slots=slots))
        gpu_count = self.count_gpus(classified[0])
        return option._replace(classified=classified, gpu_count=gpu_count) if gpu_count else None

    def choose(self, option: NodeOption, gpus: int, card: int = -1) -> PlacementChoice | None:
        """Return the policy's choice of this many GPUs on a node, all of one card if `card` is not -1."""
        capacity_class = option.classified[0]
        key = capacity_class, gpus, card
        if key not in self._choices:
            if len(self._choices) > _MAX_CACHED:
                self._choices.clear()
            self._choices[key] = self._choose(capacity_class, gpus, card)
        return self._choices[key]

    def build_demand(self, gpus: int) -> NodeDemand:
        """Return the demand for the policy."""
        return NodeDemand(
            gpus=gpus,
            cards=None
            if len(self.ranked_cards) == len(self._capacity.cards) and not self.variant.requirement.models
            else self.ranked_cards,
            has_preference=bool(self.variant.requirement.models),
            milli=self.variant.milli,
            cpu_milli=self.variant.cpu_milli,
            memory_mib=self.variant.memory_mib,
            exclusive=self.variant.is_exclusive,
        )

    def _choose(self, capacity_class: CapacityClass, gpus: int, card: int) -> PlacementChoice | None:
        if not gpus:
            return PlacementChoice(rank=(capacity_class.load,), gpus=())
        free_gpus = tuple(
            free if card in (-1, number) and self._is_open(free, share_count) else 0
            for number, free, share_count in zip(
                capacity_class.cards, capacity_class.free, capacity_class.share_counts, strict=True
            )
        )
        return self._policy.choose(capacity_class.build_policy_input(free_gpus), self.build_demand(gpus))

    def _is_open(self, free: int, share_count: int) -> bool:
        if self.variant.joins_shared_gpu:
            return share_count == self.variant.share and free > 0
        return free == WHOLE or (self.variant.share == 1 and free > 0)

    def _count_gpus(self, capacity_class: CapacityClass) -> int:
        variant = self.variant
        if (
            capacity_class.cpu_milli < variant.cpu_milli
            or capacity_class.memory_mib < variant.memory_mib
            or (variant.is_exclusive and capacity_class.load)
        ):
            return 0
        if not variant.gpus:
            return 1
        count = 0
        for number, free, share_count in zip(
            capacity_class.cards, capacity_class.free, capacity_class.share_counts, strict=True
        ):
            if (
                free
                and number in self.accepted
                and (share_count == variant.share if variant.joins_shared_gpu else free == WHOLE)
            ):
                count += 1
        return count if count >= variant.gpus else 0

    def _count_of(self, classified: ClassifiedCapacity) -> int:
        count = self.count_gpus(classified[0])
        return count if self.variant.is_spread else min(count, 1)

    def _masked_names(self, mask: CapacityMask | None) -> list[str]:
        if mask is None:
            return []
        return [name for name in mask.by_node if name in self._fitting]

    def _masked_options(self, mask: CapacityMask | None, masked_names: list[str]) -> list[NodeOption]:
        """Return the masked nodes on which the demand still fits; none for a demand that needs the node alone."""
        fitting = (
            [(name, mask.classify(name)) for name in masked_names] if mask and not self.variant.is_exclusive else []
        )
        return [
            self._build_option(name, classified)
            for name, classified in fitting
            if classified is not None and self.count_gpus(classified[0])
        ]

    def _build_option(self, name: str, classified: ClassifiedCapacity) -> NodeOption:
        return NodeOption(
            node=self._capacity.nodes[name], classified=classified, gpu_count=self.count_gpus(classified[0])
        )

    def _update(self) -> None:
        capacity = self._capacity
        if self._epoch != capacity.epoch:
            self._reset()
        if self._seen_changes == capacity.change_count:
            return
        names = capacity.changed_since(self._seen_changes)
        self._seen_changes = capacity.change_count
        for name in names:
            node = capacity.nodes[name]
            classified = capacity.classify(node)
            previous = self._fitting.pop(name, None)
            if previous is not None:
                self._total -= self._count_of(previous)
                self._ranked.pop(name, None)
                self._unranked.pop(name, None)
            if classified is not None and self.count_gpus(classified[0]) and self.variant.accepts_node(node.capacity):
                self._fitting[name] = classified
                self._unranked[name] = None
                self._total += self._count_of(classified)

    def _rank_all(self) -> None:
        if len(self._heap) > 4 * len(self._fitting) + 64:
            self._heap = [(rank, name) for name, rank in self._ranked.items()]
            heapq.heapify(self._heap)
        for name in self._unranked:
            choice = self.choose(self._build_option(name, self._fitting[name]), self.variant.gpus)
            if choice is not None:
                self._ranked[name] = choice.rank
                heapq.heappush(self._heap, (choice.rank, name))
        self._unranked.clear()
