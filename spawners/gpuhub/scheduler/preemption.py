"""Preemption: which allocations release GPUs so that a request fits. Few GPUs, and the youngest allocations, come
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuhub.scheduler.backfill import plan_start
from gpuhub.scheduler.circuits import find_circuit
from gpuhub.scheduler.indexes.availability_index import AvailabilityIndex, CapacityClaim
from gpuhub.scheduler.indexes.capacity_index import CapacityIndex, IndexedNode
from gpuhub.scheduler.interface import Allocation, Preemption, SchedulingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionVictim:
    """The smallest part that can be preempted: a scavenging allocation, or one node of an elastic one."""

    allocation: Allocation
    nodes: frozenset[str]
    is_whole: bool

    @property
    def cost(self) -> tuple[int, float, str]:
        """The number of GPUs lost, then the work lost."""
        gpus = sum(
            len(node_allocation.slots)
            for node_allocation in self.allocation.node_allocations
            if node_allocation.node in self.nodes
        )
        return gpus, -self.allocation.granted_at, self.allocation.request.id


Claims = Mapping[str, Sequence[CapacityClaim]]


def choose_preemptions(
    request: SchedulingRequest,
    indexes: Sequence[AvailabilityIndex],
    claims: Claims,
    capacity: CapacityIndex,
    now: float,
) -> list[Preemption]:
    """Return the preemptions that make the request fit; none if no set does. Grants of this moment are left out."""
    victims = [
        victim
        for allocation in capacity.allocations.values()
        if allocation.granted_at < now
        for victim in _list_victims(allocation)
    ]
    if not victims:
        return []
    searches = [
        VictimSearch(request=request, availability=availability, claims=claims, capacity=capacity, now=now).find(
            victims
        )
        for availability in indexes
    ]
    found = [chosen for chosen in searches if chosen]
    if not found:
        return []
    best = min(found, key=lambda chosen: (len(chosen), sorted(victim.cost for victim in chosen)))
    return _build_preemptions(best, request)


def _list_victims(allocation: Allocation) -> Iterator[PreemptionVictim]:
    """Yield the parts of an allocation that can be preempted; none if it is ending or quarantined."""
    request = allocation.request
    nodes = frozenset(node_allocation.node for node_allocation in allocation.node_allocations)
    if allocation.is_ending or allocation.is_quarantined:
        return
    if request.scavenge:
        yield PreemptionVictim(allocation=allocation, nodes=nodes, is_whole=True)
    elif _surplus(allocation) > 0:
        for node in sorted(nodes - allocation.shrinking - {allocation.leader}):
            yield PreemptionVictim(allocation=allocation, nodes=frozenset({node}), is_whole=False)


def _surplus(allocation: Allocation) -> int:
    """Return how many nodes an elastic allocation can release."""
    if allocation.request.spread is not None:
        return 0
    return (
        len({node_allocation.node for node_allocation in allocation.node_allocations} - allocation.shrinking)
        - allocation.request.least_nodes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimSearch:
    """The search for victims of one demand variant."""

    request: SchedulingRequest
    availability: AvailabilityIndex
    claims: Claims
    capacity: CapacityIndex
    now: float

    def find(self, victims: Sequence[PreemptionVictim]) -> list[PreemptionVictim]:
        """Return the victims; none if no set of them makes the request fit."""
        chosen = self._select_spread(victims) if self.request.spread is not None else self._select_per_node(victims)
        if self.capacity.circuits and not self._fits(chosen):
            chosen = self._select_for_power(chosen, victims)
        return self._prune(chosen) if chosen and self._fits(chosen) else []

    def _select_spread(self, victims: Sequence[PreemptionVictim]) -> list[PreemptionVictim]:
        """Select victims one by one until the request fits, those with most GPUs first."""
        chosen: list[PreemptionVictim] = []
        for victim in sorted(victims, key=lambda victim: (-self._count_useful(victim), victim.cost)):
            if self._count_useful(victim) and _keeps_minimum([*chosen, victim]):
                chosen.append(victim)
                if self._fits(chosen):
                    break
        return chosen

    def _select_per_node(self, victims: Sequence[PreemptionVictim]) -> list[PreemptionVictim]:
        """Select what the cheapest nodes need."""
        by_node: dict[str, list[PreemptionVictim]] = {}
        for victim in victims:
            for node in victim.nodes:
                by_node.setdefault(node, []).append(victim)
        offers = []
        for name in self.availability.list_nodes():
            selected = self._select_for_node(self.capacity.nodes[name], by_node.get(name, []))
            if selected is not None:
                offers.append((len(selected), sorted(victim.cost for victim in selected), name, selected))
        chosen: list[PreemptionVictim] = []
        missing = self.request.least_nodes
        for _, _, _, selected in sorted(offers, key=lambda other: other[:3]):
            extended = [*chosen, *(victim for victim in selected if victim not in chosen)]
            if missing and _keeps_minimum(extended):
                chosen, missing = extended, missing - 1
        return chosen

    def _select_for_power(
        self, chosen: list[PreemptionVictim], victims: Sequence[PreemptionVictim]
    ) -> list[PreemptionVictim]:
        """Select further victims on enforced circuits, one by one until the request fits; none if all do not help."""
        others = [
            victim
            for victim in sorted(victims, key=lambda victim: victim.cost)
            if victim not in chosen and any(self._is_on_circuit(node) for node in victim.nodes)
        ]
        extended = list(chosen)
        for victim in others:
            if _keeps_minimum([*extended, victim]):
                extended.append(victim)
        if not self._fits(extended):
            return []
        for count in range(len(chosen) + 1, len(extended)):
            if self._fits(extended[:count]):
                return extended[:count]
        return extended

    def _is_on_circuit(self, node: str) -> bool:
        return node in self.capacity.nodes and find_circuit(self.capacity, node) is not None

    def _count_useful(self, victim: PreemptionVictim) -> int:
        """Return the number of its GPUs that the request accepts."""
        variant, nodes = self.availability.variant, self.capacity.nodes
        return sum(
            variant.accepts(slot.card)
            for node_allocation in victim.allocation.node_allocations
            if node_allocation.node in victim.nodes
            and node_allocation.node in nodes
            and variant.accepts_node(nodes[node_allocation.node].capacity)
            for slot in node_allocation.slots
        )

    def _select_for_node(self, node: IndexedNode, victims: Sequence[PreemptionVictim]) -> list[PreemptionVictim] | None:
        """Return the victims that make the request fit on a node; None if none do."""
        ordered = sorted(victims, key=lambda victim: (-_count_on_node(victim, node), victim.cost))
        chosen: list[PreemptionVictim] = []
        while not self._node_fits(node, chosen):
            if len(chosen) == len(ordered):
                return None
            chosen.append(ordered[len(chosen)])
        for victim in reversed(list(chosen)):
            remaining = [other for other in chosen if other is not victim]
            if self._node_fits(node, remaining):
                chosen = remaining
        return chosen

    def _node_fits(self, node: IndexedNode, freed: Iterable[PreemptionVictim]) -> bool:
        ended_ids = {victim.allocation.request.id for victim in freed}
        opening = self.availability.find_opening_without(node, ended_ids, self.claims.get(node.capacity.name, ()))
        return opening is not None and opening <= self.now

    def _fits(self, freed: Iterable[PreemptionVictim]) -> bool:
        """Return whether the request fits once the victims are gone."""
        originals: dict[str, Allocation] = {}
        for victim in freed:
            originals.setdefault(victim.allocation.request.id, victim.allocation)
            self.capacity.expect_release(victim.allocation.request.id, victim.nodes)
        planned = plan_start(self.request, [self.availability], self.claims, self.capacity)
        for allocation in originals.values():
            self.capacity.put_allocation(allocation)
        return planned is not None and planned.starts_at <= self.now

    def _prune(self, chosen: list[PreemptionVictim]) -> list[PreemptionVictim]:
        """Return the victims without those that are not needed, the expensive ones dropped first."""
        for victim in sorted(chosen, key=lambda victim: victim.cost, reverse=True):
            remaining = [other for other in chosen if other is not victim]
            if self._fits(remaining):
                chosen = remaining
        return chosen


def _count_on_node(victim: PreemptionVictim, node: IndexedNode) -> int:
    return sum(
        len(node_allocation.slots)
        for node_allocation in victim.allocation.node_allocations
        if node_allocation.node == node.capacity.name
    )


def _keeps_minimum(victims: Iterable[PreemptionVictim]) -> bool:
    """Return whether every elastic allocation keeps its minimum number of nodes."""
    counts: dict[str, int] = {}
    for victim in victims:
        name = victim.allocation.request.id
        counts[name] = counts.get(name, 0) + 1
        if not victim.is_whole and counts[name] > _surplus(victim.allocation):
            return False
    return True


def _build_preemptions(chosen: Iterable[PreemptionVictim], request: SchedulingRequest) -> list[Preemption]:
    by_allocation: dict[str, Preemption] = {}
    for victim in chosen:
        name = victim.allocation.request.id
        existing = by_allocation.get(name)
        by_allocation[name] = (
            replace(existing, nodes=existing.nodes | victim.nodes)
            if existing
            else Preemption(allocation_id=name, nodes=victim.nodes, is_whole=victim.is_whole, for_request=request.id)
        )
    return list(by_allocation.values())
