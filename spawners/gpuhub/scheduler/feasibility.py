"""Feasibility: which GPUs a request could ever use, and whether it can ever be granted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from gpuhub.common import gpu
from gpuhub.common.gpu import GpuSpec
from gpuhub.common.node_access import describe_access
from gpuhub.scheduler.circuits import (
    GpuPart,
    Headrooms,
    count_needed,
    list_parts,
    needs_parts_together,
    select_parts,
    sum_watts,
)
from gpuhub.scheduler.demand import list_variants
from gpuhub.scheduler.indexes.capacity_index import CapacityIndex
from gpuhub.scheduler.indexes.power_headroom import PowerHeadroom
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity, SchedulingRequest

#: Owners or nodes that are named in one line.
MAX_NAMED = 4


def find_candidate_slots(request: SchedulingRequest, capacity: CapacityIndex) -> dict[str, frozenset[str]]:
    """Return every GPU that a request could ever use, free or not, by node.

    A node counts if it has enough acceptable GPUs.
    """
    candidates: dict[str, frozenset[str]] = {}
    for variant in list_variants(request, capacity.cards, capacity.node_groups):
        accepted = {number for card, number in capacity.cards.items() if variant.accepts(card)}
        for name, node in capacity.nodes.items():
            slots = zip(node.capacity.slots, node.cards, strict=True)
            uuids = frozenset(
                slot.uuid for slot, number in slots if number in accepted and _can_be_supplied(slot, node.capacity)
            )
            if uuids and variant.gpus and len(uuids) >= variant.gpus and variant.accepts_node(node.capacity):
                candidates[name] = candidates.get(name, frozenset()) | uuids
    return candidates


def _can_be_supplied(slot: GpuSlot, node: NodeCapacity) -> bool:
    return node.circuit is None or (slot.watts or 0) <= node.circuit.gpu_watts


def explain_infeasible(
    request: SchedulingRequest, cards: Mapping[str, Sequence[GpuSpec] | None], nodes: Mapping[str, NodeCapacity]
) -> str | None:
    """Return why the request can never be granted, for people; None if it can or might.

    Args:
        cards: The GPUs of every node of the cluster; None for a node whose GPUs are not known yet.
        nodes: Driver, CPU, memory and groups of the nodes of which these are known.
    """
    closed = {name for name in cards if name in nodes and not nodes[name].admits(request.groups)}
    reason = _explain_infeasible(request, cards, nodes, closed) or _explain_power(request, cards, nodes, closed)
    if reason is None or not closed:
        return reason
    return f"{reason}; {describe_closed(nodes[name] for name in closed)}"


def describe_closed(nodes: Iterable[NodeCapacity]) -> str:
    """Return whom nodes are restricted to, for people: `only for members of vision: rig1, rig2`; empty for no nodes."""
    by_groups: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        by_groups.setdefault(tuple(sorted(node.groups)), []).append(node.name)
    return "; ".join(f"{describe_access(groups)}: {format_names(names)}" for groups, names in sorted(by_groups.items()))


def format_names(names: Iterable[str]) -> str:
    """Return names for people, the first few of many."""
    ordered = sorted(names)
    if len(ordered) <= MAX_NAMED:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:MAX_NAMED])} and {len(ordered) - MAX_NAMED} others"


def _explain_infeasible(
    request: SchedulingRequest,
    cards: Mapping[str, Sequence[GpuSpec] | None],
    nodes: Mapping[str, NodeCapacity],
    closed: Set[str],
) -> str | None:
    available = "the cluster has: " + gpu.describe_nodes({node: node_cards or () for node, node_cards in cards.items()})
    unknown = sorted(request.exclude - set(cards))
    if unknown:
        return f"there is no node {unknown[0]!r} to exclude; {available}"
    unusable = request.exclude | closed
    usable = {node: node_cards for node, node_cards in cards.items() if node not in unusable}
    excluding = f" other than {', '.join(sorted(unusable))}" if unusable else ""
    needed = 1 if request.spread is not None else request.least_nodes
    if len(usable) < needed:
        return (
            f"{needed} nodes were requested and the cluster has {len(usable)}{excluding}: {', '.join(usable) or 'none'}"
        )
    equipped = [node for node in usable if _has_resources(request, nodes.get(node))]
    if len(equipped) < needed:
        number = len(equipped) or "none"
        sizes = _describe_sizes(nodes[name] for name in usable if name in nodes)
        return f"{_describe_resources(request)} was requested; {number} of the nodes{excluding} can provide it{sizes}"
    if any(_is_satisfiable(request, usable, equipped, model) for model in _list_models(request, usable)):
        return None
    if request.spread is not None:
        count = max(_count_gpus(request, usable, equipped, model) for model in _list_models(request, usable))
        supply = f"the nodes{excluding} have {count or 'no'} such GPUs"
        return f"{describe_request(request)} was requested; {supply}; {available}"
    suitable = [
        node
        for node in equipped
        if any(_has_enough_gpus(request, usable[node], model) for model in _list_models(request, usable))
    ]
    one_model = " with GPUs of one model" if request.same_model and len(suitable) >= needed else ""
    number = "too few" if one_model else len(suitable) or "none"
    supply = f"{number} of the nodes{excluding} can provide it{one_model}"
    return f"{describe_request(request)} was requested; {supply}; {available}"


def _explain_power(
    request: SchedulingRequest,
    cards: Mapping[str, Sequence[GpuSpec] | None],
    nodes: Mapping[str, NodeCapacity],
    closed: Set[str],
) -> str | None:
    """Return which circuit could never supply the request, and what it could; None if the circuits suffice."""
    names = [name for name in cards.keys() - request.exclude - closed if _has_resources(request, nodes.get(name))]
    usable = [nodes[name] for name in sorted(names) if name in nodes]
    circuits = {node.circuit.name: node.circuit for node in usable if node.circuit is not None}
    # A GPU that was never read may be one that is supplied.
    is_known = all(name in nodes and len(nodes[name].slots) >= len(cards[name] or (None,)) for name in names)
    if not circuits or not request.size or not is_known or _can_supply(request, usable):
        return None
    parts = _find_least_parts(request, usable)
    texts = [
        f"{sum_watts(slots):,} W of circuit {circuit!r}, which leaves {circuits[circuit].gpu_watts:,} W to GPUs"
        for circuit, slots in parts.items()
        if sum_watts(slots) > circuits[circuit].gpu_watts
    ]
    smaller = next((other for other in _list_smaller(request) if _can_supply(other, usable)), None)
    models = {
        slot.card.model: slot.watts
        for node in usable
        for slot in node.slots
        if slot.watts is not None and _can_be_supplied(slot, node)
    }
    if smaller is not None:
        remedy = f"possible is: {describe_request(smaller)}"
    elif models:
        remedy = f"possible are: {', '.join(f'{model} ({watts:,} W)' for model, watts in sorted(models.items()))}"
    else:
        remedy = "ask the administrator for a lower power limit of the GPUs"
    return f"{describe_request(request)} was requested, and needs {' and '.join(texts)}; {remedy}"


def _can_supply(request: SchedulingRequest, nodes: Iterable[NodeCapacity]) -> bool:
    """Return whether the circuits could supply a request if nothing else were in use."""
    nodes = list(nodes)
    headrooms = _build_full_headrooms(nodes)
    return any(
        len(select_parts(parts, headrooms, together=needs_parts_together(request))) >= count_needed(request)
        for parts in _list_parts_by_model(request, nodes)
    )


def _find_least_parts(request: SchedulingRequest, nodes: Sequence[NodeCapacity]) -> dict[str, list[GpuSlot]]:
    """Return the GPUs that need least power for a request, by their circuit."""
    needed = count_needed(request)
    enough = [parts[:needed] for parts in _list_parts_by_model(request, nodes) if len(parts) >= needed]
    parts: dict[str, list[GpuSlot]] = {}
    for part in min(enough, key=lambda parts: sum(sum_watts(part.slots) for part in parts)):
        if part.circuit is not None:
            parts.setdefault(part.circuit, []).extend(part.slots)
    return parts


def _list_parts_by_model(request: SchedulingRequest, nodes: Sequence[NodeCapacity]) -> Iterator[list[GpuPart]]:
    """Yield the parts of each model that the request could get, or of all if it may mix them."""
    circuits = {node.name: None if node.circuit is None else node.circuit.name for node in nodes}
    headrooms = _build_full_headrooms(nodes)
    for model in _list_models(request, {node.name: [slot.card for slot in node.slots] for node in nodes}):
        slots = {
            node.name: [
                slot
                for slot in node.slots
                if model in (None, slot.card.model) and request.requirement.accepts(slot.card)
            ]
            for node in nodes
        }
        least = 1 if request.spread is not None else request.gpus_per_node
        enough = {name: of_node for name, of_node in slots.items() if len(of_node) >= least}
        yield list_parts(request, enough, circuits, headrooms)


def _build_full_headrooms(nodes: Iterable[NodeCapacity]) -> Headrooms:
    """Return what the circuits can supply while nothing is in use."""
    circuits = {node.circuit for node in nodes if node.circuit is not None}
    return {circuit.name: [PowerHeadroom(free=circuit.gpu_watts)] for circuit in circuits}


def _list_smaller(request: SchedulingRequest) -> Iterator[SchedulingRequest]:
    """Yield smaller requests, the largest first: with fewer GPUs, or fewer nodes, then one node with fewer GPUs."""
    for spread in range((request.spread or 1) - 1, 0, -1):
        yield replace(request, spread=spread)
    if request.spread is not None:
        return
    for nodes in range(request.least_nodes - 1, 0, -1):
        yield replace(request, nodes=nodes, least_nodes=nodes)
    for gpus in range(request.gpus_per_node - 1, 0, -1):
        yield replace(request, nodes=1, least_nodes=1, gpus_per_node=gpus)


def describe_request(request: SchedulingRequest) -> str:
    """Return what a request asks for, for people: `1 × RTX 5090 on each of 3 nodes`."""
    if request.spread is not None:
        return f"{gpu.describe_gpus(request.spread, request.requirement)} on any nodes"
    if request.share > 1:
        gpus = f"1/{request.share} of {gpu.describe_gpus(1, request.requirement)}"
    elif request.gpus_per_node:
        gpus = gpu.describe_gpus(request.gpus_per_node, request.requirement)
    else:
        gpus = "a place without GPU"
    if request.nodes == 1:
        return f"{gpus} on one node"
    if request.least_nodes < request.nodes:
        return f"{gpus} on each of {request.least_nodes} to {request.nodes} nodes"
    return f"{gpus} on each of {request.nodes} nodes"


def _list_models(request: SchedulingRequest, usable: Mapping[str, Sequence[GpuSpec] | None]) -> list[str | None]:
    """Return the models to check one by one, or None to check all at once."""
    if not request.same_model or not request.size:
        return [None]
    return [*dict.fromkeys(card.model for node_cards in usable.values() for card in node_cards or ()), None][
        : -1 if any(usable.values()) else None
    ]


def _has_resources(request: SchedulingRequest, node: NodeCapacity | None) -> bool:
    """Return whether the node's CPU, memory and driver suffice, as far as they are known."""
    if node is None:
        return True
    if node.driver is not None and not request.requirement.accepts_driver(node.driver):
        return False
    if node.cpu_milli is not None and node.cpu_milli < request.cpu_milli:
        return False
    return node.memory_mib is None or node.memory_mib >= request.memory_mib


def _describe_resources(request: SchedulingRequest) -> str:
    driver = request.requirement.least_driver
    parts = [f"{request.cpu_milli / 1000:.3g} CPU cores"] if request.names_cpu else []
    parts += [f"{_format_gib(request.memory_mib)} of memory"] if request.names_memory else []
    parts += [f"driver {driver} or newer"] if driver else []
    if not parts:
        return "room for one more container"
    return " with ".join([", ".join(parts[:2]), *parts[2:]]) if len(parts) > 2 else " and ".join(parts)


def _format_gib(mib: int) -> str:
    return f"{round(mib / 1024, 1):g} GiB"


def _describe_sizes(nodes: Iterable[NodeCapacity]) -> str:
    """Return what containers may have on each node: `; containers may have: rig1 15 CPU cores and 60 GiB`."""
    sizes = [
        f"{node.name} {node.cpu_milli / 1000:.3g} CPU cores and {_format_gib(node.memory_mib)}"
        for node in nodes
        if node.cpu_milli is not None and node.memory_mib is not None
    ]
    if not sizes:
        return ""
    more = f" and {len(sizes) - MAX_NAMED} others" if len(sizes) > MAX_NAMED else ""
    return f"; containers may have: {', '.join(sizes[:MAX_NAMED])}{more}"


def _is_satisfiable(
    request: SchedulingRequest,
    usable: Mapping[str, Sequence[GpuSpec] | None],
    equipped: Iterable[str],
    model: str | None,
) -> bool:
    suitable = [node for node in equipped if usable[node] is None or _has_enough_gpus(request, usable[node], model)]
    if request.spread is None:
        return len(suitable) >= request.least_nodes
    return (
        any(usable[node] is None for node in suitable)
        or _count_gpus(request, usable, equipped, model) >= request.spread
    )


def _has_enough_gpus(request: SchedulingRequest, cards: Iterable[GpuSpec] | None, model: str | None) -> bool:
    needed = min(1, request.spread) if request.spread is not None else request.gpus_per_node
    return cards is not None and _count_fitting(request, cards, model) >= needed


def _count_gpus(
    request: SchedulingRequest,
    usable: Mapping[str, Sequence[GpuSpec] | None],
    equipped: Iterable[str],
    model: str | None,
) -> int:
    return sum(_count_fitting(request, usable[node] or (), model) for node in equipped)


def _count_fitting(request: SchedulingRequest, cards: Iterable[GpuSpec], model: str | None) -> int:
    return sum(model in (None, card.model) and request.requirement.accepts(card) for card in cards)
