"""An index of when a demand will fit on each node according to time limits, updated from the capacity index's log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from gpuhub.scheduler.demand import DemandVariant
from gpuhub.scheduler.indexes.capacity_index import IMMEDIATELY, UNKNOWN_TIME, CapacityIndex, IndexedNode


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityClaim:
    """Resources of a node that are promised to other requests from now until a moment."""

    slots: frozenset[str]
    until: float
    is_whole: bool = False
    cpu_milli: int = 0
    memory_mib: int = 0


class AvailabilityIndex:
    """When a demand variant will fit on which node; nodes on which it never fits are not listed."""

    def __init__(self, variant: DemandVariant, capacity: CapacityIndex) -> None:
        self.variant = variant
        self._capacity = capacity
        self._epoch, self._seen_changes = -1, -1
        self._openings: dict[str, float] = {}
        self._unknown_counts: dict[str, int] = {}

    def find_openings(self, claims: Mapping[str, Sequence[CapacityClaim]]) -> Mapping[str, float]:
        """Return by node when the demand fits (one GPU at least for a spread demand); `claims` of others come first."""
        self._update()
        claimed_names = [name for name in claims if name in self._openings]
        if not claimed_names:
            return self._openings
        openings = dict(self._openings)
        for name in claimed_names:
            opening = self._find_opening(self._capacity.nodes[name], claims[name])
            if opening is None:
                del openings[name]
            else:
                openings[name] = opening
        return openings

    def list_gpus(self, name: str, claims: Mapping[str, Sequence[CapacityClaim]]) -> list[tuple[float, int]]:
        """Return when each acceptable GPU of a node is free, soonest first, with its position."""
        return self._list_gpus(self._capacity.nodes[name], claims.get(name, ()))

    def count_unknown(self, name: str, claims: Mapping[str, Sequence[CapacityClaim]]) -> int:
        """Return how many of the GPUs needed on a node are free at no known time."""
        lacking = None if name in claims else self._unknown_counts.get(name)
        if lacking is None:
            lacking = sum(time == UNKNOWN_TIME for time, _ in self.list_gpus(name, claims)[: self.variant.gpus])
            if name not in claims:
                self._unknown_counts[name] = lacking
        return lacking

    def list_nodes(self) -> list[str]:
        """Return the nodes on which the demand fits at some time."""
        self._update()
        return list(self._openings)

    def find_opening_without(
        self, node: IndexedNode, allocations: Set[str], claims: Sequence[CapacityClaim]
    ) -> float | None:
        """Return when the demand fits on a node if these allocations ended at once; None for never."""
        uses = {
            name: replace(use, ends_at=IMMEDIATELY) if name in allocations else use for name, use in node.uses.items()
        }
        return self._find_opening(replace(node, uses=uses, is_current=False), claims)

    def _update(self) -> None:
        capacity = self._capacity
        if self._epoch != capacity.epoch:
            self._epoch, self._seen_changes = capacity.epoch, -1
            self._accepted = frozenset(number for card, number in capacity.cards.items() if self.variant.accepts(card))
            self._openings.clear()
            self._unknown_counts.clear()
        if self._seen_changes == capacity.change_count:
            return
        names: Iterable[str] = capacity.changed_since(self._seen_changes)
        self._seen_changes = capacity.change_count
        for name in names:
            node = capacity.nodes[name]
            self._unknown_counts.pop(name, None)
            opening = self._find_opening(node, ()) if self.variant.accepts_node(node.capacity) else None
            if opening is None:
                self._openings.pop(name, None)
            else:
                self._openings[name] = opening

    def _find_opening(self, node: IndexedNode, claims: Sequence[CapacityClaim]) -> float | None:
        if not node.capacity.takes_work:
            return None
        variant = self.variant
        self._capacity.classify(node)
        gpus = self._list_gpus(node, claims) if variant.gpus else []
        if len(gpus) < variant.gpus:
            return None
        times: list[float | None] = [gpus[variant.gpus - 1][0] if variant.gpus else IMMEDIATELY]
        times += [use.ends_at for use in node.uses.values() if variant.is_exclusive or use.is_exclusive]
        times += [claim.until for claim in claims if variant.is_exclusive or claim.is_whole]
        node_capacity = node.capacity
        if variant.cpu_milli and node_capacity.cpu_milli is not None:
            times.append(_find_time_of(variant.cpu_milli, node_capacity.cpu_milli, list_cpu_uses(node, claims)))
        if variant.memory_mib and node_capacity.memory_mib is not None:
            times.append(_find_time_of(variant.memory_mib, node_capacity.memory_mib, list_memory_uses(node, claims)))
        known_times = [opening for opening in times if opening is not None]
        return max(known_times) if len(known_times) == len(times) else None

    def _list_gpus(self, node: IndexedNode, claims: Sequence[CapacityClaim]) -> list[tuple[float, int]]:
        gpus = []
        accepted, shares = self._accepted, self.variant.share
        for position, (time, card) in enumerate(zip(node.free_at, node.cards, strict=True)):
            if time is not None and card in accepted:
                gpus.append((time, position))
        if shares > 1:
            share_free_at = node.share_free_at
            gpus = [
                (
                    share_free_at[position][1]
                    if position in share_free_at and share_free_at[position][0] == shares
                    else time,
                    position,
                )
                for time, position in gpus
            ]
        for claim in claims:
            slots = node.capacity.slots
            gpus = [
                (max(time, claim.until) if slots[position].uuid in claim.slots else time, position)
                for time, position in gpus
            ]
        gpus.sort()
        return gpus


def list_cpu_uses(node: IndexedNode, claims: Sequence[CapacityClaim]) -> list[tuple[float, int]]:
    """Return the uses and claims of a node's CPU: when each ends, and its amount."""
    used = [(use.ends_at, use.cpu_milli) for use in node.uses.values()]
    return used + [(claim.until, claim.cpu_milli) for claim in claims]


def list_memory_uses(node: IndexedNode, claims: Sequence[CapacityClaim]) -> list[tuple[float, int]]:
    """Return the uses and claims of a node's memory: when each ends, and its amount."""
    used = [(use.ends_at, use.memory_mib) for use in node.uses.values()]
    return used + [(claim.until, claim.memory_mib) for claim in claims]


def _find_time_of(needed: int, total: int, used: Iterable[tuple[float, int]]) -> float | None:
    """Return when `needed` of `total` is free; None for never."""
    ending = sorted(used)
    free = total - sum(amount for _, amount in ending)
    if free >= needed:
        return IMMEDIATELY
    for time, amount in ending:
        free += amount
        if free >= needed:
            return time
    return None
