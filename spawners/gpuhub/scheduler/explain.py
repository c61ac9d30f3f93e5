"""Explanations for people: why a request waits, when it will start, and which of its requirements delay it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from gpuhub.common.gpu import GpuRequirement
from gpuhub.common.units import format_span
from gpuhub.scheduler.bundles import combine, list_members
from gpuhub.scheduler.circuits import exceeds, find_budget, find_circuit, find_current_headroom, group_by_circuit
from gpuhub.scheduler.cycle import SchedulingCycle
from gpuhub.scheduler.feasibility import (
    MAX_NAMED,
    describe_closed,
    describe_request,
    find_candidate_slots,
    format_names,
)
from gpuhub.scheduler.gang_placement import describe_models, find_headrooms, find_least_power, place_request
from gpuhub.scheduler.indexes.capacity_index import IMMEDIATELY, UNKNOWN_TIME, NodeMask
from gpuhub.scheduler.interface import Constraint, GpuSlot, SchedulingRequest
from gpuhub.scheduler.queue import RequestGroup
from gpuhub.scheduler.state import SchedulerState

#: Starts beyond the protected ones are computed while nodes × earlier requests stay below this.
_MAX_STEPS = 8192
#: Maximum work of the forecast of one request, see `SchedulingCycle`.
FORECAST_WORK = 12_288
#: Maximum work of the forecasts of a request without each of its requirements, together.
CONSTRAINTS_WORK = 24_576
#: A time limit that lets a request be backfilled before others, seconds.
_SHORT_S = 3600.0
_REQUESTED_EARLIER = "requested earlier by others"


def describe_wait(
    request: SchedulingRequest, group: RequestGroup, cycle: SchedulingCycle, state: SchedulerState
) -> str:
    """Return one line: what a request asks for, and what blocks it after this cycle."""
    if request.id in cycle.grants:
        return f"{describe_request(request)}: next to be granted"
    members = [] if request.bundle is None else list_members(request.bundle, state)
    limit = cycle.headroom.explain(combine(members) if members else request)
    if limit is not None:
        return limit
    text = _describe_pending_reasons(request, group, cycle, state)
    if len(members) > 1:
        text += f"; it starts together with the other {len(members) - 1} of its job group"
    return text


def _describe_pending_reasons(
    request: SchedulingRequest, group: RequestGroup, cycle: SchedulingCycle, state: SchedulerState
) -> str:
    if not request.size:
        return _describe_wait_without_gpu(request, state)
    candidates = find_candidate_slots(request, state.capacity)
    if not candidates:
        closed = _describe_closed(request, candidates, state)
        return f"{describe_request(request)}: no node currently has such GPUs{closed and f'; {closed}'}"
    if _is_only_short_of_cpu(request, group, cycle, state):
        return f"{describe_request(request)}: {_describe_shortage(request)}"
    reasons = [
        _describe_waking(candidates, state),
        _describe_circuits(request, group, cycle, state),
        _describe_releases(request, cycle, state),
        _describe_holders(candidates, cycle, state),
        _describe_competitors(request, candidates, cycle, state),
        _describe_reservations(group, candidates, cycle, state),
        _describe_unavailable(candidates, state),
        _describe_closed(request, candidates, state),
    ]
    distinct = dict.fromkeys(filter(None, reasons))
    return f"{describe_request(request)}: {'; '.join(distinct) or _describe_shortage(request)}"


def _describe_releases(request: SchedulingRequest, cycle: SchedulingCycle, state: SchedulerState) -> str:
    """Return which owners were asked to release GPUs that the request counts on."""
    planned = cycle.planned_starts.get(request.id)
    if planned is None or planned.starts_at > cycle.now:
        return ""
    models: dict[str, Counter[str]] = {}
    for name, uuids in planned.slots.items():
        node = state.capacity.nodes[name]
        for allocation_id, use in node.uses.items():
            for position in use.positions:
                slot = node.capacity.slots[position]
                if slot.uuid in uuids and use.ends_at == IMMEDIATELY:
                    owner = state.capacity.allocations[allocation_id].request.owner
                    models.setdefault(owner, Counter())[slot.card.model] += 1
    return ", ".join(f"waits for {owner} to release {describe_models(counts)}" for owner, counts in models.items())


def _describe_circuits(
    request: SchedulingRequest, group: RequestGroup, cycle: SchedulingCycle, state: SchedulerState
) -> str:
    """Return the circuits that cannot supply GPUs which are free otherwise, or that earlier requests count on them."""
    if not state.capacity.circuits:
        return ""
    mask = cycle.protections.build_mask(request.time_limit_s, group.admitted, request.id)
    for fit_index in state.find_fit_indexes(request):
        slots = find_least_power(request, fit_index, mask)
        current = find_headrooms(state.capacity, None)
        texts = [
            _describe_circuit(circuit, of_circuit, cycle, state)
            for circuit, of_circuit in group_by_circuit(slots, state.capacity).items()
            if exceeds({of_circuit[0].node: of_circuit}, current, state.capacity)
        ]
        if texts:
            return "; ".join(texts)
        all_admitted = frozenset(reservation.id for reservation in state.reservations)
        others = cycle.protections.build_mask(request.time_limit_s, all_admitted, request.id)
        if exceeds(slots, find_headrooms(state.capacity, others), state.capacity):
            return _REQUESTED_EARLIER
    return ""


def _describe_circuit(circuit: str, slots: Sequence[GpuSlot], cycle: SchedulingCycle, state: SchedulerState) -> str:
    """Return such as `circuit 'left' has 290 W of 1,140 W for GPUs left and 575 W are needed (taken by ada)`."""
    headroom = find_current_headroom(state.capacity, circuit)
    nodes = [state.capacity.nodes[name] for name in state.capacity.circuits[circuit]]
    owners = {
        state.capacity.allocations[allocation_id].request.owner
        for node in nodes
        for allocation_id, use in node.uses.items()
        if use.positions and allocation_id not in cycle.grants
    }
    left = f"{max(0, headroom.free):,} W of {find_budget(nodes[0]).gpu_watts:,} W for GPUs left"
    taken = f" (taken by {format_names(owners)})" if owners else ""
    return f"circuit {circuit!r} has {left} and {headroom.count_watts(slots):,} W are needed{taken}"


def _describe_holders(candidates: Mapping[str, frozenset[str]], cycle: SchedulingCycle, state: SchedulerState) -> str:
    owners = set()
    for name, uuids in candidates.items():
        node = state.capacity.nodes[name]
        for allocation_id, use in node.uses.items():
            is_candidate = any(node.capacity.slots[position].uuid in uuids for position in use.positions)
            if allocation_id not in cycle.grants and (is_candidate or use.is_exclusive):
                owners.add(state.capacity.allocations[allocation_id].request.owner)
    return f"held by {format_names(owners)}" if owners else ""


def _describe_competitors(
    request: SchedulingRequest, candidates: Mapping[str, frozenset[str]], cycle: SchedulingCycle, state: SchedulerState
) -> str:
    """Return whether earlier requests were just granted the free GPUs, or count on them."""
    taken = any(
        node_allocation.node in candidates
        for grant in cycle.grants.values()
        for node_allocation in grant.node_allocations
    )
    mask = cycle.protections.build_mask(
        request.time_limit_s, frozenset(reservation.id for reservation in state.reservations), request.id
    )
    masks = mask.by_node if mask else {}
    if taken or any(
        _has_free(state, name, candidates[name], node_mask) for name, node_mask in masks.items() if name in candidates
    ):
        return _REQUESTED_EARLIER
    return ""


def _has_free(state: SchedulerState, name: str, uuids: frozenset[str], node_mask: NodeMask) -> bool:
    """Return whether something that the mask excludes is free on a node."""
    node = state.capacity.nodes[name]
    classified = state.capacity.classify(node)
    if classified is None:
        return False
    masked_uuids = uuids if node_mask.excludes_node else uuids & node_mask.slots
    capacity_class, slot_order = classified
    free_slots = zip(capacity_class.free, slot_order, strict=True)
    return any(free and node.capacity.slots[position].uuid in masked_uuids for free, position in free_slots)


def _describe_reservations(
    group: RequestGroup, candidates: Mapping[str, frozenset[str]], cycle: SchedulingCycle, state: SchedulerState
) -> str:
    """Return the reservations for other users on GPUs that the request could use, and their ends."""
    uuids = frozenset().union(*candidates.values())
    circuits = {find_circuit(state.capacity, name) for name in candidates}
    for circuit, names in state.capacity.circuits.items():
        if circuit in circuits:
            # What is reserved there keeps its power as well.
            uuids = uuids.union(*(state.capacity.nodes[name].positions for name in names))
    texts = []
    for reservation in state.reservations:
        if reservation.id not in group.admitted and reservation.ends_at > cycle.now and reservation.uuids & uuids:
            begins = f"from {format_time(reservation.starts_at)} " if reservation.starts_at > cycle.now else ""
            texts.append(f"reserved {begins}until {format_time(reservation.ends_at)}: {reservation.name}")
    return "; ".join(texts)


def _describe_waking(nodes: Iterable[str], state: SchedulerState) -> str:
    """Return such as `waking rig2, usually up after 40 s`."""
    capacities = (state.capacity.nodes[name].capacity for name in sorted(nodes))
    texts = [
        f"waking {capacity.name}"
        + ("" if capacity.usual_wake_s is None else f", usually up after {format_span(capacity.usual_wake_s)}")
        for capacity in capacities
        if capacity.is_waking
    ]
    rest = f" and {len(texts) - MAX_NAMED} other nodes" if len(texts) > MAX_NAMED else ""
    return f"{'; '.join(texts[:MAX_NAMED])}{rest}"


def _describe_unavailable(candidates: Mapping[str, frozenset[str]], state: SchedulerState) -> str:
    texts = []
    for name, uuids in sorted(candidates.items()):
        capacity = state.capacity.nodes[name].capacity
        if capacity.is_waking:
            continue
        reasons = [slot.unavailable_reason for slot in capacity.slots if slot.uuid in uuids and not slot.available]
        if not capacity.takes_work:
            reasons = [capacity.unavailable_reason]
        if reasons:
            reason_text = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
            texts.append(f"{name} ({reason_text})" if reason_text else name)
    rest = f" and {len(texts) - MAX_NAMED} other nodes" if len(texts) > MAX_NAMED else ""
    return f"currently not available: {', '.join(texts[:MAX_NAMED])}{rest}" if texts else ""


def _describe_closed(
    request: SchedulingRequest, candidates: Mapping[str, frozenset[str]], state: SchedulerState
) -> str:
    """Return the nodes that have what the request needs and are restricted to groups that its owner is not in."""
    node_groups = state.capacity.node_groups
    if node_groups <= request.groups:
        return ""
    of_member = find_candidate_slots(replace(request, groups=request.groups | node_groups), state.capacity)
    closed = of_member.keys() - candidates.keys()
    return describe_closed(state.capacity.nodes[name].capacity for name in closed)


def _describe_wait_without_gpu(request: SchedulingRequest, state: SchedulerState) -> str:
    capacities = [node.capacity for node in state.capacity.nodes.values()]
    waking = _describe_waking((capacity.name for capacity in capacities if capacity.admits(request.groups)), state)
    if waking:
        return f"{describe_request(request)}: {waking}"
    if not any(capacity.takes_work for capacity in capacities):
        return "no node can be reached"
    closed = describe_closed(capacity for capacity in capacities if not capacity.admits(request.groups))
    return f"{describe_request(request)}: {'; '.join(filter(None, [_describe_shortage(request), closed]))}"


def _is_only_short_of_cpu(
    request: SchedulingRequest, group: RequestGroup, cycle: SchedulingCycle, state: SchedulerState
) -> bool:
    """Return whether only CPU or memory blocks the request."""
    if not (request.cpu_milli or request.memory_mib):
        return False
    relaxed = replace(request, cpu_milli=0, memory_mib=0)
    mask = cycle.protections.build_mask(request.time_limit_s, group.admitted, request.id)
    return place_request(relaxed, state.find_fit_indexes(relaxed), mask, None) is not None


def _describe_shortage(request: SchedulingRequest) -> str:
    if request.cpu_milli or request.memory_mib:
        return "too little CPU or memory is left on the nodes"
    return "not free yet"


def format_time(seconds: float) -> str:
    """Return the time for people: `2026-03-01 14:30 UTC`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def estimate_start(
    state: SchedulerState, cycle: SchedulingCycle, request_id: str, position: int, max_work: int = FORECAST_WORK
) -> tuple[float | None, int]:
    """Return the start according to time limits, and the work to find it. `cycle` has run and is undone.

    The start is None if it is not known, or not found with at most `max_work`.
    """
    if request_id in cycle.grants:
        return cycle.now, 0
    planned, work = cycle.planned_starts.get(request_id), 0
    if planned is None and max_work > 0 and position * len(state.capacity.nodes) <= _MAX_STEPS:
        forecast = SchedulingCycle(state, cycle.now, protects_all=True)
        forecast.run_to(request_id, max_work)
        forecast.undo()
        work = forecast.work
        if request_id in forecast.grants:
            return cycle.now, work
        planned = forecast.planned_starts.get(request_id)
    if planned is None or planned.starts_at == UNKNOWN_TIME:
        return None, work
    return max(planned.starts_at, cycle.now), work


def find_constraints(
    state: SchedulerState, request: SchedulingRequest, now: float, position: int
) -> Iterator[Constraint]:
    """Yield the request's own requirements, each with the start without it.

    Between two of them the state may change; it is as before at each yield.
    """
    left = CONSTRAINTS_WORK
    for text, variant in relax_demands(request):
        if state.requests.get(request.id) is not request:
            return
        state.put_request(variant)
        cycle = SchedulingCycle(state, now)
        cycle.run()
        cycle.undo()
        would_start_at, work = estimate_start(state, cycle, request.id, position, min(left, FORECAST_WORK))
        left -= work
        state.put_request(request)
        yield Constraint(requirement=text, would_start_at=would_start_at)


def relax_demands(request: SchedulingRequest) -> Iterator[tuple[str, SchedulingRequest]]:
    """Yield each requirement, as text for people, and the request without it."""
    requirement = request.requirement
    if requirement.models:
        yield f"model {' or '.join(requirement.models)}", _requiring(request, replace(requirement, models=()))
    if requirement.least_memory_mib:
        memory = f"at least {requirement.least_memory_mib / 1024:.3g} GiB"
        yield memory, _requiring(request, replace(requirement, least_memory_mib=0))
    if requirement.least_driver is not None:
        yield (
            f"driver {requirement.least_driver} or newer",
            _requiring(request, replace(requirement, least_driver=None)),
        )
    if requirement.least_capability is not None:
        capability = f"compute capability {'.'.join(map(str, requirement.least_capability))} or newer"
        yield capability, _requiring(request, replace(requirement, least_capability=None))
    yield from _relax_size(request)
    if request.same_model and request.size > 1:
        yield "same model", replace(request, same_model=False)
    if request.exclusive:
        yield "exclusive node", replace(request, exclusive=False)
    if request.exclude:
        yield f"not on {', '.join(sorted(request.exclude))}", replace(request, exclude=frozenset())
    if request.names_cpu:
        yield f"{request.cpu_milli / 1000:.3g} CPU cores", replace(request, cpu_milli=0)
    if request.names_memory:
        yield f"{request.memory_mib / 1024:.3g} GiB of memory", replace(request, memory_mib=0)
    if request.time_limit_s is None:
        yield "no time limit", replace(request, time_limit_s=_SHORT_S)
    elif request.time_limit_s > _SHORT_S:
        limit_text = f"time limit of {request.time_limit_s / 3600:.3g} h"
        yield limit_text, replace(request, time_limit_s=_SHORT_S)


def _relax_size(request: SchedulingRequest) -> Iterator[tuple[str, SchedulingRequest]]:
    if request.spread is not None:
        if request.spread > 1:
            yield f"{request.spread} GPUs", replace(request, spread=1)
        return
    if request.least_nodes > 1:
        yield f"{request.least_nodes} nodes", replace(request, nodes=1, least_nodes=1)
    if request.gpus_per_node > 1:
        text = f"{request.gpus_per_node} GPUs on one node"
        yield text, replace(request, spread=request.least_size, nodes=1, least_nodes=1)
    if request.share > 1:
        share_text = f"1/{request.share} of a GPU"
        yield share_text, replace(request, share=2 * request.share)


def _requiring(request: SchedulingRequest, requirement: GpuRequirement) -> SchedulingRequest:
    return replace(request, requirement=requirement)
