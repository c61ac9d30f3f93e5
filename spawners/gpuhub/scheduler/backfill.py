"""Backfill: planned starts of blocked requests, and the capacity that later requests must leave free for them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from gpuhub.scheduler.circuits import (
    exceeds_at,
    find_current_headroom,
    find_first_fit,
    find_slots,
    group_by_circuit,
    protect_power,
)
from gpuhub.scheduler.indexes.availability_index import (
    AvailabilityIndex,
    CapacityClaim,
    list_cpu_uses,
    list_memory_uses,
)
from gpuhub.scheduler.indexes.capacity_index import IMMEDIATELY, UNKNOWN_TIME, CapacityIndex, IndexedNode, NodeMask
from gpuhub.scheduler.indexes.fit_index import CapacityMask
from gpuhub.scheduler.indexes.power_headroom import PowerHeadroom
from gpuhub.scheduler.interface import NodeAllocation, Reservation, SchedulingRequest

NO_EXCEPTION = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStart:
    """When and where a blocked request will start, according to time limits."""

    request: SchedulingRequest
    #: `IMMEDIATELY` if it only waits for GPUs that are being released; `UNKNOWN_TIME` if these have no known end.
    starts_at: float
    #: The GPUs that it counts on, by node; nodes without GPUs as well.
    slots: Mapping[str, tuple[str, ...]]


@dataclass(slots=True, kw_only=True)
class ProtectedCapacity:
    """Capacity that requests may not use unless they end before a moment."""

    #: Requests that end by then may use the capacity; `NO_EXCEPTION` for none.
    exempt_until: float
    masks: dict[str, NodeMask]
    #: The protected capacity as plans see it: until when it is not available.
    claims: dict[str, CapacityClaim]
    #: What each enforced circuit can supply to requests that do not end before, by its name.
    headrooms: dict[str, PowerHeadroom] = field(default_factory=dict)
    #: Id of the reservation behind it, whose users are not affected; None for a planned start.
    reservation: str | None = None
    #: Id of the request whose start is protected.
    request: str | None = None

    def applies_to(self, now: float, time_limit_s: float | None, admitted: Set[str]) -> bool:
        """Return whether a request that starts now must leave this capacity free."""
        if self.reservation in admitted:
            return False
        return time_limit_s is None or now + time_limit_s > self.exempt_until


class ProtectionTable:
    """All protected capacity of one scheduling cycle."""

    def __init__(self, capacity: CapacityIndex, now: float, reservations: Sequence[Reservation]) -> None:
        self.now = now
        self._capacity = capacity
        self._protections = [
            _protect_reservation(reservation, capacity) for reservation in reservations if reservation.ends_at > now
        ]
        self._masks: dict[tuple[int, ...], CapacityMask] = {}
        #: Number of GPUs on the nodes of each protection, summed, and of these nodes: what a plan has to examine.
        self.size = 0
        for protection in self._protections:
            self._count(protection)

    def copy(self) -> ProtectionTable:
        """Return a table to which grants can be applied without changing this one."""
        table = ProtectionTable(self._capacity, self.now, ())
        for protection in self._protections:
            table.add(replace(protection, masks=dict(protection.masks), headrooms=dict(protection.headrooms)))
        return table

    def add(self, protection: ProtectedCapacity) -> None:
        self._protections.append(protection)
        self._count(protection)

    def _count(self, protection: ProtectedCapacity) -> None:
        self.size += sum(1 + len(self._capacity.nodes[name].cards) for name in protection.masks)

    def build_mask(
        self, time_limit_s: float | None, admitted: Set[str], before: str | None = None
    ) -> CapacityMask | None:
        """Return what a request may not use now; None for no restriction. With `before`, as it was when that request
        was planned.
        """
        numbers: list[int] = []
        for number, protection in enumerate(self._protections):
            if before is not None and protection.request == before:
                break
            if protection.applies_to(self.now, time_limit_s, admitted):
                numbers.append(number)
        if not numbers:
            return None
        mask = self._masks.get(tuple(numbers))
        if mask is None:
            by_node: dict[str, NodeMask] = {}
            headrooms: dict[str, list[PowerHeadroom]] = {}
            for number in numbers:
                for circuit, headroom in self._protections[number].headrooms.items():
                    headrooms.setdefault(circuit, []).append(headroom)
                for node, node_mask in self._protections[number].masks.items():
                    by_node[node] = by_node[node].combine(node_mask) if node in by_node else node_mask
            mask = self._masks[tuple(numbers)] = CapacityMask(self._capacity, by_node, headrooms)
        return mask

    def collect_claims(self, admitted: Set[str]) -> dict[str, list[CapacityClaim]]:
        """Return what is promised to other requests, by node."""
        claims: dict[str, list[CapacityClaim]] = {}
        for protection in self._protections:
            if protection.reservation not in admitted:
                for node, claim in protection.claims.items():
                    claims.setdefault(node, []).append(claim)
        return claims

    def apply_grant(
        self, request: SchedulingRequest, node_allocations: Sequence[NodeAllocation], admitted: Set[str]
    ) -> None:
        """Reduce the CPU, memory and power that others may use next to protected capacity, after a grant that outlasts
        it.
        """
        self._apply_power(request, node_allocations, admitted)
        if not (request.cpu_milli or request.memory_mib):
            return
        for protection in self._protections:
            if not protection.applies_to(self.now, request.time_limit_s, admitted):
                continue
            for part in node_allocations:
                if part.node in protection.masks:
                    protection.masks[part.node] = _use_spare(protection.masks[part.node], request, part)
                    self._masks.clear()

    def _apply_power(
        self, request: SchedulingRequest, node_allocations: Sequence[NodeAllocation], admitted: Set[str]
    ) -> None:
        if not self._capacity.circuits:
            return
        slots = {node_allocation.node: node_allocation.slots for node_allocation in node_allocations}
        for circuit, of_circuit in group_by_circuit(slots, self._capacity).items():
            for protection in self._protections:
                headroom = protection.headrooms.get(circuit)
                if headroom is not None and protection.applies_to(self.now, request.time_limit_s, admitted):
                    protection.headrooms[circuit] = headroom.use(of_circuit)
                    self._masks.clear()


def plan_start(
    request: SchedulingRequest,
    indexes: Sequence[AvailabilityIndex],
    claims: Mapping[str, Sequence[CapacityClaim]],
    capacity: CapacityIndex,
) -> PlannedStart | None:
    """Return the earliest start and its place; None if the request fits nowhere even after all allocations."""
    if request.spread is not None:
        starts = [_plan_spread(request, request.spread, availability, claims, capacity) for availability in indexes]
    else:
        starts = [_plan_on_nodes(request, availability, claims, capacity) for availability in indexes]
    planned = _find_first(starts)
    if planned is None or not exceeds_at(planned.starts_at, find_slots(planned.slots, capacity), claims, capacity):
        return planned
    fits = [find_first_fit(request, availability, claims, capacity, planned.starts_at) for availability in indexes]
    return _find_first(fit and PlannedStart(request=request, starts_at=fit[0], slots=fit[1]) for fit in fits)


def _find_first(starts: Iterable[PlannedStart | None]) -> PlannedStart | None:
    return min(
        (planned for planned in starts if planned is not None), key=lambda planned: planned.starts_at, default=None
    )


def protect_start(
    planned: PlannedStart, now: float, claims: Mapping[str, Sequence[CapacityClaim]], capacity: CapacityIndex
) -> ProtectedCapacity:
    """Return the capacity that keeps a planned start possible."""
    request = planned.request
    start = max(planned.starts_at, now)
    until = UNKNOWN_TIME if request.time_limit_s is None else start + request.time_limit_s
    protection = ProtectedCapacity(
        exempt_until=NO_EXCEPTION if planned.starts_at == UNKNOWN_TIME else start,
        masks={},
        claims={},
        request=request.id,
    )
    for name, uuids in planned.slots.items():
        slots, node = frozenset(uuids), capacity.nodes[name]
        protection.masks[name] = NodeMask(
            slots=slots,
            excludes_node=request.exclusive,
            cpu_milli=_spare_cpu(node, request, planned.starts_at, claims.get(name, ())),
            memory_mib=_spare_memory(node, request, planned.starts_at, claims.get(name, ())),
        )
        protection.claims[name] = CapacityClaim(
            slots=slots,
            until=until,
            is_whole=request.exclusive,
            cpu_milli=request.cpu_milli,
            memory_mib=request.memory_mib,
        )
    protection.headrooms = protect_power(find_slots(planned.slots, capacity), capacity, planned.starts_at, claims)
    return protection


def protect_candidates(
    request: SchedulingRequest, slots: Mapping[str, frozenset[str]], capacity: CapacityIndex
) -> ProtectedCapacity:
    """Return the protection without backfill: of everything that the blocked request could ever use."""
    protection = ProtectedCapacity(
        exempt_until=NO_EXCEPTION, masks={node: NodeMask(slots=uuids) for node, uuids in slots.items()}, claims={}
    )
    for circuit, of_circuit in group_by_circuit(find_slots(slots, capacity), capacity).items():
        headroom = find_current_headroom(capacity, circuit)
        needed = sorted((headroom.count_watts([slot]) for slot in of_circuit), reverse=True)[: request.size]
        protection.headrooms[circuit] = replace(headroom, free=headroom.free - sum(needed))
    return protection


def _protect_reservation(reservation: Reservation, capacity: CapacityIndex) -> ProtectedCapacity:
    protection = ProtectedCapacity(exempt_until=reservation.starts_at, masks={}, claims={}, reservation=reservation.id)
    for name, node in capacity.nodes.items():
        slots = reservation.uuids & node.positions.keys()
        if slots:
            protection.masks[name] = NodeMask(slots=slots)
            protection.claims[name] = CapacityClaim(slots=slots, until=reservation.ends_at)
    reserved = find_slots({name: claim.slots for name, claim in protection.claims.items()}, capacity)
    protection.headrooms = protect_power(reserved, capacity, reservation.starts_at, {})
    return protection


def _plan_on_nodes(
    request: SchedulingRequest,
    availability: AvailabilityIndex,
    claims: Mapping[str, Sequence[CapacityClaim]],
    capacity: CapacityIndex,
) -> PlannedStart | None:
    openings = availability.find_openings(claims)
    nodes, gpus = request.least_nodes, availability.variant.gpus
    if len(openings) < nodes:
        return None
    starts_at = min(openings.values()) if nodes == 1 else sorted(openings.values())[nodes - 1]
    earlier_nodes = [name for name, opening in openings.items() if opening < starts_at] if nodes > 1 else []
    last_nodes = [name for name, opening in openings.items() if opening == starts_at]
    if starts_at == UNKNOWN_TIME:
        # Without a known end, prefer the nodes that have most of the GPUs already.
        last_nodes.sort(key=lambda name: (availability.count_unknown(name, claims), name))
    else:
        last_nodes.sort()
    chosen = earlier_nodes + last_nodes[: nodes - len(earlier_nodes)]
    slots = {}
    for name in chosen:
        slots[name] = tuple(
            capacity.nodes[name].capacity.slots[position].uuid
            for _, position in availability.list_gpus(name, claims)[:gpus]
        )
    return PlannedStart(request=request, starts_at=starts_at, slots=slots)


def _plan_spread(
    request: SchedulingRequest,
    gpus: int,
    availability: AvailabilityIndex,
    claims: Mapping[str, Sequence[CapacityClaim]],
    capacity: CapacityIndex,
) -> PlannedStart | None:
    openings = availability.find_openings(claims)
    # As many nodes as GPUs: the first GPUs of these nodes suffice, and no GPU elsewhere is free sooner.
    first_nodes = heapq.nsmallest(gpus, ((opening, name) for name, opening in openings.items()))
    gpu_times = [
        (max(time, opening), name, position)
        for opening, name in first_nodes
        for time, position in availability.list_gpus(name, claims)
    ]
    if len(gpu_times) < gpus:
        return None
    gpu_times.sort()
    slots: dict[str, tuple[str, ...]] = {}
    for _, name, position in gpu_times[:gpus]:
        slots[name] = (*slots.get(name, ()), capacity.nodes[name].capacity.slots[position].uuid)
    return PlannedStart(request=request, starts_at=gpu_times[gpus - 1][0] if gpus else IMMEDIATELY, slots=slots)


def _use_spare(mask: NodeMask, request: SchedulingRequest, part: NodeAllocation) -> NodeMask:
    """Return the mask after a grant, of which a container may be larger than the request needs."""
    cpu = request.cpu_milli if part.cpu_milli is None else part.cpu_milli
    memory = request.memory_mib if part.memory_mib is None else part.memory_mib
    return replace(
        mask,
        cpu_milli=None if mask.cpu_milli is None else max(0, mask.cpu_milli - cpu),
        memory_mib=None if mask.memory_mib is None else max(0, mask.memory_mib - memory),
    )


def _spare_cpu(
    node: IndexedNode, request: SchedulingRequest, starts_at: float, claims: Sequence[CapacityClaim]
) -> int | None:
    if node.capacity.cpu_milli is None or not request.cpu_milli:
        return None
    return _spare_amount(node.capacity.cpu_milli - request.cpu_milli, starts_at, list_cpu_uses(node, claims))


def _spare_memory(
    node: IndexedNode, request: SchedulingRequest, starts_at: float, claims: Sequence[CapacityClaim]
) -> int | None:
    if node.capacity.memory_mib is None or not request.memory_mib:
        return None
    return _spare_amount(node.capacity.memory_mib - request.memory_mib, starts_at, list_memory_uses(node, claims))


def _spare_amount(total: int, starts_at: float, used: Sequence[tuple[float, int]]) -> int:
    """Return the amount that others may use until after the planned start; if that is unknown, all use counts."""
    return max(0, total - sum(amount for time, amount in used if time > starts_at or starts_at == UNKNOWN_TIME))
