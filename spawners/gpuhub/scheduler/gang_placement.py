"""Placement of a whole request: one node, or several nodes that are close to each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gpuhub.scheduler.circuits import (
    Headrooms,
    count_needed,
    exceeds,
    find_circuit,
    find_current_headroom,
    list_parts,
    needs_parts_together,
    select_parts,
)
from gpuhub.scheduler.container_size import size_container
from gpuhub.scheduler.demand import WHOLE, DemandVariant
from gpuhub.scheduler.indexes.capacity_index import CapacityIndex
from gpuhub.scheduler.indexes.fit_index import CapacityMask, FitIndex, NodeOption
from gpuhub.scheduler.interface import GpuSlot, NodeAllocation, NodeCapacity, SchedulingRequest
from gpuhub.scheduler.placement import PlacementChoice

#: The policy's rank of a node, its name, the node, and the GPUs chosen there.
RankedOption = tuple[tuple[float, ...], str, NodeOption, PlacementChoice]


def place_request(
    request: SchedulingRequest, fit_indexes: Sequence[FitIndex], mask: CapacityMask | None, max_gpus: int | None
) -> tuple[NodeAllocation, ...] | None:
    """Return where the request goes now; None if it does not fit. `max_gpus` limits the grant; None for no limit."""
    node_allocations = place_regardless_of_power(request, fit_indexes, mask, max_gpus)
    if node_allocations is None or not fit_indexes[0].capacity.circuits:
        return node_allocations
    slots = {node_allocation.node: node_allocation.slots for node_allocation in node_allocations}
    headrooms = find_headrooms(fit_indexes[0].capacity, mask)
    if not exceeds(slots, headrooms, fit_indexes[0].capacity):
        return node_allocations
    return _place_within_circuits(request, fit_indexes, mask, max_gpus, headrooms)


def find_headrooms(capacity: CapacityIndex, mask: CapacityMask | None) -> Headrooms:
    """Return what each enforced circuit can supply, now and as far as the mask protects it."""
    protected = {} if mask is None else mask.headrooms
    return {
        circuit: [find_current_headroom(capacity, circuit), *protected.get(circuit, ())]
        for circuit in capacity.circuits
    }


def _place_within_circuits(
    request: SchedulingRequest,
    fit_indexes: Sequence[FitIndex],
    mask: CapacityMask | None,
    max_gpus: int | None,
    headrooms: Headrooms,
) -> tuple[NodeAllocation, ...] | None:
    """Return where the request goes if its GPUs are those that need least power; the most nodes if it is elastic."""
    placements = []
    for fit_index in fit_indexes:
        options = _list_supplied(request, fit_index, fit_index.list_options(mask), headrooms)
        if request.spread is not None:
            placed = _place_spread(request.spread, fit_index, options)
        else:
            nodes = min(len(options), _count_max_nodes(request, max_gpus))
            is_enough = nodes >= request.least_nodes
            placed = _place_on_nodes(nodes, request.gpus_per_node, fit_index, options) if is_enough else None
        if placed is not None:
            placements.append(placed)
    return max(placements, key=len, default=None) if request.spread is None else next(iter(placements), None)


def _list_supplied(
    request: SchedulingRequest, fit_index: FitIndex, options: Sequence[NodeOption], headrooms: Headrooms
) -> list[NodeOption]:
    """Return the options without what the circuits cannot supply, whichever of the rest are chosen."""
    slots = {option.node.capacity.name: fit_index.list_open_slots(option) for option in options}
    circuits = {name: find_circuit(fit_index.capacity, name) for name in slots}
    # For one GPU, the policy may choose among all that can be supplied; for several, only among those that need least.
    is_single = request.size == 1
    parts = list_parts(replace(request, spread=1) if is_single else request, slots, circuits, headrooms)
    supplied: dict[str, set[str]] = {}
    for part in select_parts(parts, headrooms, together=needs_parts_together(request)):
        supplied.setdefault(part.node, set()).update(slot.uuid for slot in part.slots)
    restricted = []
    for option in options:
        name = option.node.capacity.name
        if circuits[name] is None:
            restricted.append(option)
        elif name in supplied:
            left = fit_index.restrict(option, frozenset(slot.uuid for slot in slots[name]) - supplied[name])
            restricted += [] if left is None else [left]
    return restricted


def find_least_power(
    request: SchedulingRequest, fit_index: FitIndex, mask: CapacityMask | None
) -> dict[str, list[GpuSlot]]:
    """Return the free GPUs that need least power for a request, by node, if no circuit were enforced; none if they do
    not suffice.
    """
    slots = {option.node.capacity.name: fit_index.list_open_slots(option) for option in fit_index.list_options(mask)}
    circuits = {name: find_circuit(fit_index.capacity, name) for name in slots}
    parts = list_parts(request, slots, circuits, find_headrooms(fit_index.capacity, mask))
    chosen: dict[str, list[GpuSlot]] = {}
    for part in parts[: count_needed(request)] if len(parts) >= count_needed(request) else ():
        chosen.setdefault(part.node, []).extend(part.slots)
    return chosen


def _count_max_nodes(request: SchedulingRequest, max_gpus: int | None) -> int:
    if max_gpus is None or not request.gpus_per_node or request.spread is not None:
        return request.nodes
    return min(request.nodes, max_gpus // request.gpus_per_node)


def place_regardless_of_power(
    request: SchedulingRequest, fit_indexes: Sequence[FitIndex], mask: CapacityMask | None, max_gpus: int | None
) -> tuple[NodeAllocation, ...] | None:
    """Return where the request would go now if no circuit were enforced."""
    min_nodes, max_nodes = request.least_nodes, _count_max_nodes(request, max_gpus)
    needed = count_needed(request)
    open_indexes = [(fit_index, count) for fit_index in fit_indexes if (count := fit_index.count(mask)) >= needed]
    if not open_indexes or max_nodes < min_nodes:
        return None
    if request.spread is not None:
        fit_index = open_indexes[0][0]
        return _place_spread(request.spread, fit_index, fit_index.list_options(mask))
    fit_index, count = max(open_indexes, key=lambda pair: min(pair[1], max_nodes))
    nodes = min(count, max_nodes)
    if nodes == 1 and (request.gpus_per_node < 2 or not fit_index.is_mixed):
        best = fit_index.find_best(mask)
        return (_build_allocation(fit_index.variant, *best),) if best else None
    return _place_on_nodes(nodes, request.gpus_per_node, fit_index, fit_index.list_options(mask))


def build_note(node_allocations: Sequence[NodeAllocation]) -> str | None:
    """Return the note for the owner about mixed cards; None if all cards are of one model."""
    models = Counter(slot.card.model for node_allocation in node_allocations for slot in node_allocation.slots)
    if len(models) < 2:
        return None
    return f"mixed cards: {describe_models(models)}; the slowest sets the pace"


def describe_models(models: Counter[str]) -> str:
    """Return the models for people: `1 × RTX 5090, 2 × RTX 5070`."""
    return ", ".join(f"{count} × {model}" for model, count in models.items())


def _build_allocation(variant: DemandVariant, option: NodeOption, choice: PlacementChoice) -> NodeAllocation:
    slots = option.node.select_slots(option.classified[1], choice.gpus)
    cpu_milli, memory_mib = size_container(variant, option.node, option.classified[0], len(slots))
    return NodeAllocation(node=option.node.capacity.name, slots=slots, cpu_milli=cpu_milli, memory_mib=memory_mib)


def _place_on_nodes(
    nodes: int, gpus: int, fit_index: FitIndex, options: Sequence[NodeOption]
) -> tuple[NodeAllocation, ...] | None:
    """Return nodes with equal cards if possible, then on one switch, then in one rack, and the best ranked of these."""
    for card in _list_cards(options, fit_index, gpus):
        ranked = _rank_options(options, fit_index, gpus, card)
        if len(ranked) >= nodes:
            nearby = _pick_nearby(ranked, lambda group: len(group) >= nodes)
            return tuple(
                _build_allocation(fit_index.variant, option, choice)
                for _, _, option, choice in sorted(nearby, key=_rank_key)[:nodes]
            )
    return None


def _rank_key(ranked: RankedOption) -> tuple[tuple[float, ...], str]:
    return ranked[0], ranked[1]


def _rank_options(options: Sequence[NodeOption], fit_index: FitIndex, gpus: int, card: int) -> list[RankedOption]:
    ranked = []
    for option in options:
        choice = fit_index.choose(option, gpus, card) if card < 0 or card in option.classified[0].cards else None
        if choice is not None:
            ranked.append((choice.rank, option.node.capacity.name, option, choice))
    return ranked


def _list_cards(options: Sequence[NodeOption], fit_index: FitIndex, gpus: int) -> Iterator[int]:
    """Yield the cards to try alone, preferred card first, and -1 for mixed cards (or none)."""
    if gpus:
        states = {option.classified[0] for option in options}
        present = frozenset[int]().union(*(state.cards for state in states))
        yield from (number for number in fit_index.ranked_card_numbers if number in present)
    yield -1


def _pick_nearby(ranked: list[RankedOption], suffices: Callable[[list[RankedOption]], bool]) -> list[RankedOption]:
    """Return the nodes on one switch, or else in one rack, if enough: the smallest such set, so that large ones stay
    free.
    """
    if len(ranked) < 2:
        return ranked
    for get_label in (_switch, _rack):
        groups: defaultdict[str, list[RankedOption]] = defaultdict(list)
        for option_rank in ranked:
            label = get_label(option_rank[2].node.capacity)
            if label is not None:
                groups[label].append(option_rank)
        enough = [(len(group), label) for label, group in groups.items() if suffices(group)]
        if enough:
            return groups[min(enough)[1]]
    return ranked


def _switch(node: NodeCapacity) -> str | None:
    return node.switch


def _rack(node: NodeCapacity) -> str | None:
    return node.rack


def _place_spread(gpus: int, fit_index: FitIndex, options: Sequence[NodeOption]) -> tuple[NodeAllocation, ...] | None:
    """Return GPUs of one model if possible, close to each other, on as few nodes as possible."""
    for card in _list_cards(options, fit_index, gpus):
        ranked = _rank_options(options, fit_index, 1, card)
        gpu_counts = {name: _count_free_gpus(option, fit_index, card) for _, name, option, _ in ranked}

        def suffices(group: Sequence[RankedOption], gpu_counts: dict[str, int] = gpu_counts) -> bool:
            return sum(gpu_counts[option_rank[1]] for option_rank in group) >= gpus

        if suffices(ranked):
            return _fill_fewest_nodes(gpus, _pick_nearby(ranked, suffices), gpu_counts, fit_index, card)
    return None


def _count_free_gpus(option: NodeOption, fit_index: FitIndex, card: int) -> int:
    if card < 0:
        return option.gpu_count
    state = option.classified[0]
    return sum(number == card and free == WHOLE for number, free in zip(state.cards, state.free, strict=True))


def _fill_fewest_nodes(
    gpus: int, ranked: Sequence[RankedOption], gpu_counts: dict[str, int], fit_index: FitIndex, card: int
) -> tuple[NodeAllocation, ...] | None:
    """Return the nodes with most GPUs first; the last part goes where it leaves fewest GPUs."""
    remaining = sorted(ranked, key=lambda option_rank: (-gpu_counts[option_rank[1]], *_rank_key(option_rank)))
    node_allocations: list[NodeAllocation] = []
    while gpus:
        fitting = [option_rank for option_rank in remaining if gpu_counts[option_rank[1]] >= gpus]
        best = (
            min(fitting, key=lambda option_rank: (gpu_counts[option_rank[1]], *_rank_key(option_rank)))
            if fitting
            else remaining[0]
        )
        remaining.remove(best)
        count = min(gpus, gpu_counts[best[1]])
        choice = fit_index.choose(best[2], count, card)
        if choice is None:
            return None
        node_allocations.append(_build_allocation(fit_index.variant, best[2], choice))
        gpus -= count
    return tuple(sorted(node_allocations, key=_node_order))


def _node_order(node_allocation: NodeAllocation) -> tuple[int, str]:
    return -len(node_allocation.slots), node_allocation.node
