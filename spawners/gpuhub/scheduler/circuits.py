"""The power of enforced circuits: what they can still supply, and which GPUs may be used with it.

A GPU that is in use, as a whole or in part, counts with its power limit once; one whose limit is not known counts as
the whole circuit. The other GPUs of a node draw little, and are part of what its machine needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpuhub.scheduler.indexes.availability_index import AvailabilityIndex, CapacityClaim
from gpuhub.scheduler.indexes.capacity_index import UNKNOWN_TIME, CapacityIndex, IndexedNode
from gpuhub.scheduler.indexes.power_headroom import PowerHeadroom
from gpuhub.scheduler.interface import CircuitBudget, CircuitUsage, GpuSlot, SchedulingRequest

#: What a request must leave to each circuit: now, and at the planned starts of others.
Headrooms = Mapping[str, Sequence[PowerHeadroom]]
#: GPUs by node.
SlotsByNode = Mapping[str, Sequence[GpuSlot]]
ClaimsByNode = Mapping[str, Sequence[CapacityClaim]]


class GpuPart(NamedTuple):
    """GPUs of one node that are used together."""

    circuit: str | None
    node: str
    slots: tuple[GpuSlot, ...]


def find_headroom(capacity: CapacityIndex, circuit: str, at: float | None, claims: ClaimsByNode) -> PowerHeadroom:
    """Return what a circuit can still supply at a moment.

    Args:
        capacity: All nodes and allocations.
        circuit: Name of an enforced circuit.
        at: Allocations and claims that end by then do not count; None if all count, also those that were asked to end.
        claims: What is promised to others, by node.
    """
    watts: dict[str, int] = {}
    gpu_watts = 0
    for name in capacity.circuits[circuit]:
        node = capacity.nodes[name]
        gpu_watts = find_budget(node).gpu_watts
        positions = {
            position for use in node.uses.values() if at is None or use.ends_at > at for position in use.positions
        }
        positions.update(
            node.positions[uuid]
            for claim in claims.get(name, ())
            if at is None or claim.until > at
            for uuid in claim.slots
        )
        for position in positions:
            slot = node.capacity.slots[position]
            watts[slot.whole_uuid] = gpu_watts if slot.watts is None else slot.watts
    return PowerHeadroom(free=gpu_watts - sum(watts.values()), powered=frozenset(watts))


def find_current_headroom(capacity: CapacityIndex, circuit: str) -> PowerHeadroom:
    """Return what a circuit can still supply now."""
    if capacity.headrooms_at != capacity.change_count:
        capacity.headrooms_at = capacity.change_count
        capacity.headrooms.clear()
    headroom = capacity.headrooms.get(circuit)
    if headroom is None:
        headroom = capacity.headrooms[circuit] = find_headroom(capacity, circuit, None, {})
    return headroom


def find_budget(node: IndexedNode) -> CircuitBudget:
    """Return the circuit of a node that has one."""
    if node.capacity.circuit is None:
        raise LookupError(f"node {node.capacity.name} is on no enforced circuit")
    return node.capacity.circuit


def report_circuits(capacity: CapacityIndex) -> dict[str, CircuitUsage]:
    """Return how much of each enforced circuit is taken now, by its name."""
    usage = {}
    for circuit, names in capacity.circuits.items():
        nodes, headroom = [capacity.nodes[name] for name in names], find_current_headroom(capacity, circuit)
        slots = [slot for node in nodes for slot in node.capacity.slots]
        usage[circuit] = CircuitUsage(
            taken_watts=find_budget(nodes[0]).gpu_watts - headroom.free,
            gpu_watts=find_budget(nodes[0]).gpu_watts,
            uuids=frozenset(slot.uuid for slot in slots),
            unsupplied=frozenset(slot.uuid for slot in slots if not headroom.allows([slot])),
        )
    return usage


def find_circuit(capacity: CapacityIndex, node: str) -> str | None:
    """Return the name of the enforced circuit that supplies a node; None if none does."""
    circuit = capacity.nodes[node].capacity.circuit
    return None if circuit is None else circuit.name


def group_by_circuit(slots: SlotsByNode, capacity: CapacityIndex) -> dict[str, list[GpuSlot]]:
    """Return the GPUs on each enforced circuit."""
    grouped: dict[str, list[GpuSlot]] = {}
    for node, of_node in slots.items():
        circuit = find_circuit(capacity, node)
        if circuit is not None and of_node:
            grouped.setdefault(circuit, []).extend(of_node)
    return grouped


def exceeds(slots: SlotsByNode, headrooms: Headrooms, capacity: CapacityIndex) -> bool:
    """Return whether the GPUs need more than their circuits can still supply."""
    return any(
        not headroom.allows(of_circuit)
        for circuit, of_circuit in group_by_circuit(slots, capacity).items()
        for headroom in headrooms[circuit]
    )


def protect_power(
    slots: SlotsByNode, capacity: CapacityIndex, at: float, claims: ClaimsByNode
) -> dict[str, PowerHeadroom]:
    """Return what each circuit can supply to others at a moment while these GPUs will be used then.

    At an unknown time, everything that is in use now counts.
    """
    headrooms = {}
    for circuit, of_circuit in group_by_circuit(slots, capacity).items():
        used = find_headroom(capacity, circuit, None if at == UNKNOWN_TIME else at, claims)
        headrooms[circuit] = replace(used, free=used.free - used.count_watts(of_circuit))
    return headrooms


def count_needed(request: SchedulingRequest) -> int:
    """Return what must be free to serve a request, in the unit of `FitIndex.count`: GPUs for a spread demand, else
    nodes.
    """
    return request.spread if request.spread is not None else request.least_nodes


def needs_parts_together(request: SchedulingRequest) -> bool:
    """Return whether a request needs several parts, and not any one of them."""
    return request.nodes > 1 if request.spread is None else request.spread > 1


def list_parts(
    request: SchedulingRequest, slots: SlotsByNode, circuits: Mapping[str, str | None], headrooms: Headrooms
) -> list[GpuPart]:
    """Return what of each node needs least power: its part of the request, or each GPU of a spread demand; the least
    first.

    Args:
        request: The request.
        slots: GPUs that the request could get; of each node, enough.
        circuits: The enforced circuit of each node; None for none.
        headrooms: What the circuits can supply.
    """
    parts = []
    for node, of_node in slots.items():
        circuit = circuits[node]
        of_circuit = () if circuit is None else headrooms[circuit]
        ordered = sorted(of_node, key=lambda slot: (_slot_watts(of_circuit, slot), slot.whole_uuid, slot.uuid))
        is_spread = request.spread is not None
        chosen = [(slot,) for slot in ordered] if is_spread else [tuple(ordered[: request.gpus_per_node])]
        parts += [(_count_watts(of_circuit, each), GpuPart(circuit, node, each)) for each in chosen]
    parts.sort(key=lambda pair: (pair[0], pair[1].node))
    return [part for _, part in parts]


def select_parts(parts: Iterable[GpuPart], headrooms: Headrooms, *, together: bool) -> list[GpuPart]:
    """Return the parts that the circuits can supply: all of them `together`, else each of them alone."""
    left = {circuit: list(of_circuit) for circuit, of_circuit in headrooms.items()}
    selected = []
    for part in parts:
        of_circuit = left[part.circuit] if part.circuit is not None else []
        if all(headroom.allows(part.slots) for headroom in of_circuit):
            selected.append(part)
            if together:
                of_circuit[:] = [headroom.use(part.slots) for headroom in of_circuit]
    return selected


def sum_watts(slots: Iterable[GpuSlot]) -> int:
    """Return what GPUs may draw together, watts; MIG devices of one GPU count once."""
    return PowerHeadroom(free=0).count_watts(slots)


def _slot_watts(headrooms: Iterable[PowerHeadroom], slot: GpuSlot) -> int:
    return (slot.watts or 0) if any(slot.whole_uuid not in headroom.powered for headroom in headrooms) else 0


def _count_watts(headrooms: Iterable[PowerHeadroom], slots: Iterable[GpuSlot]) -> int:
    return max((headroom.count_watts(slots) for headroom in headrooms), default=0)


def find_slots(uuids: Mapping[str, Iterable[str]], capacity: CapacityIndex) -> dict[str, list[GpuSlot]]:
    """Return the GPUs of each node; none if no circuit is enforced, for which alone they are needed."""
    if not capacity.circuits:
        return {}
    nodes = ((capacity.nodes[name], of_node) for name, of_node in uuids.items())
    return {
        node.capacity.name: [node.capacity.slots[node.positions[uuid]] for uuid in of_node] for node, of_node in nodes
    }


def exceeds_at(moment: float, slots: SlotsByNode, claims: ClaimsByNode, capacity: CapacityIndex) -> bool:
    """Return whether the GPUs will need more than their circuits can supply at a moment."""
    circuits = group_by_circuit(slots, capacity)
    return exceeds(slots, {name: [find_headroom(capacity, name, moment, claims)] for name in circuits}, capacity)


def find_first_fit(
    request: SchedulingRequest,
    availability: AvailabilityIndex,
    claims: ClaimsByNode,
    capacity: CapacityIndex,
    earliest: float,
) -> tuple[float, dict[str, tuple[str, ...]]] | None:
    """Return when GPUs and power suffice for a request, not before `earliest`, and its GPUs by node; None for never."""
    openings = availability.find_openings(claims)
    times = {name: availability.list_gpus(name, claims) for name in openings}
    moments = {time for gpu_times in times.values() for time, _ in gpu_times} | set(openings.values())
    for name in {name for names in capacity.circuits.values() for name in names}:
        moments.update(use.ends_at for use in capacity.nodes[name].uses.values())
        moments.update(claim.until for claim in claims.get(name, ()))
    ordered = sorted({earliest, *(moment for moment in moments if moment > earliest)})

    def select(moment: float) -> dict[str, tuple[str, ...]] | None:
        slots = {
            name: [capacity.nodes[name].capacity.slots[position] for time, position in times[name] if time <= moment]
            for name, opening in openings.items()
            if opening <= moment
        }
        headrooms = {circuit: [find_headroom(capacity, circuit, moment, claims)] for circuit in capacity.circuits}
        return _select_slots(request, slots, headrooms, capacity)

    # What is free only grows with time.
    index = bisect_left(ordered, True, key=lambda moment: select(moment) is not None)
    selected = select(ordered[index]) if index < len(ordered) else None
    return None if selected is None else (ordered[index], selected)


def _select_slots(
    request: SchedulingRequest, slots: SlotsByNode, headrooms: Headrooms, capacity: CapacityIndex
) -> dict[str, tuple[str, ...]] | None:
    """Return the GPUs for a request, of those that are free; None if they or the power do not suffice."""
    circuits = {name: find_circuit(capacity, name) for name in slots}
    parts = select_parts(list_parts(request, slots, circuits, headrooms), headrooms, together=True)
    needed = count_needed(request)
    if len(parts) < needed:
        return None
    chosen: dict[str, tuple[str, ...]] = {}
    for part in parts[:needed]:
        chosen[part.node] = (*chosen.get(part.node, ()), *(slot.uuid for slot in part.slots))
    return chosen
