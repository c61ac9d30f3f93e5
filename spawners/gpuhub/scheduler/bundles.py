"""Bundles: requests of one owner that are granted at the same moment, or none of them is. Where and when all fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpuhub.scheduler.backfill import PlannedStart, ProtectionTable, plan_start, protect_start
from gpuhub.scheduler.feasibility import describe_request
from gpuhub.scheduler.gang_placement import place_request
from gpuhub.scheduler.indexes.availability_index import CapacityClaim
from gpuhub.scheduler.indexes.capacity_index import CapacityIndex
from gpuhub.scheduler.interface import Allocation, NodeAllocation, Preemption, SchedulingRequest
from gpuhub.scheduler.preemption import choose_preemptions
from gpuhub.scheduler.queue import RequestGroup
from gpuhub.scheduler.state import SchedulerState, VariantIndexes


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleMember:
    """One request of a bundle."""

    request: SchedulingRequest
    group: RequestGroup
    indexes: VariantIndexes


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlePreemption:
    """The preemptions with which a bundle starts as soon as the GPUs are released."""

    preemptions: list[Preemption]
    #: The preempted allocations as they were, by id.
    originals: dict[str, Allocation]
    starts: list[PlannedStart]


def list_members(bundle: str, state: SchedulerState) -> list[BundleMember]:
    """Return the waiting requests of a bundle in the order in which they are placed: those with fewest cards first."""
    members = []
    for request in state.list_bundle(bundle):
        group = state.group_of[request.id]
        members.append(BundleMember(request=request, group=group, indexes=state.get_indexes(group)))
    return sorted(members, key=_placing_key)


def _placing_key(member: BundleMember) -> tuple[bool, int, int, int]:
    request = member.request
    return not request.size, len(member.indexes.card_keys), -request.least_size, request.seq


def explain_infeasible(idle: SchedulerState) -> str | None:
    """Return why the requests of a state without allocations, all of one bundle, do not fit there together."""
    [bundle] = {request.bundle for request in idle.requests.values()}
    members = list_members(str(bundle), idle)
    for count, member in enumerate(members, start=1):
        if place_members(members[:count], ProtectionTable(idle.capacity, 0.0, ()), None, idle.capacity) is None:
            return (
                f"the tasks of the job group never fit at the same time: next to the others there is no room for "
                f"{describe_request(member.request)}"
            )
    return None


def combine(members: Iterable[BundleMember]) -> SchedulingRequest:
    """Return a request for as many GPUs as all requests of a bundle need at least, which stands for them in quotas."""
    requests = [member.request for member in members]
    return replace(requests[0], spread=sum(request.least_size for request in requests))


def place_members(
    members: Sequence[BundleMember], protections: ProtectionTable, max_gpus: int | None, capacity: CapacityIndex
) -> dict[str, tuple[NodeAllocation, ...]] | None:
    """Return where each request goes now, by its id; None if not all of them fit. Capacity and protections stay as they
    were.
    """
    protections = protections.copy()
    placed: dict[str, tuple[NodeAllocation, ...]] = {}
    for member in members:
        # What the members that follow need at least is kept from an elastic one.
        reserved = sum(other.request.least_size for other in members if other.request.id not in placed)
        reserved -= member.request.least_size
        left = None if max_gpus is None else max_gpus - reserved - sum(map(_count_gpus, placed.values()))
        request, admitted = member.request, member.group.admitted
        mask = protections.build_mask(request.time_limit_s, admitted)
        found = place_request(request, member.indexes.fit_indexes, mask, left)
        if found is None:
            break
        placed[request.id] = found
        protections.apply_grant(request, found, admitted)
        capacity.put_allocation(Allocation(request=request, node_allocations=found, granted_at=protections.now))
    for request_id in placed:
        capacity.remove_allocation(request_id)
    return placed if len(placed) == len(members) else None


def _count_gpus(node_allocations: tuple[NodeAllocation, ...]) -> int:
    return sum(len(node_allocation.slots) for node_allocation in node_allocations)


def plan_members(
    members: Sequence[BundleMember], protections: ProtectionTable, capacity: CapacityIndex
) -> list[PlannedStart] | None:
    """Return each request's place at the earliest moment at which all can start; None if one fits nowhere."""
    own, starts = _OwnClaims(protections, capacity), []
    for member in members:
        planned = own.plan(member)
        if planned is None:
            return None
        starts.append(planned)
    starts_at = max(planned.starts_at for planned in starts)
    return [replace(planned, starts_at=starts_at) for planned in starts]


def preempt_members(
    members: Sequence[BundleMember], protections: ProtectionTable, capacity: CapacityIndex
) -> BundlePreemption | None:
    """Return the preemptions that make room for all requests, as expected releases in the capacity; None, and nothing
    changed, if no preemptions do.
    """
    own, found = _OwnClaims(protections, capacity), BundlePreemption(preemptions=[], originals={}, starts=[])
    for member in members:
        claims = own.collect(member)
        planned = plan_start(member.request, member.indexes.availability, claims, capacity)
        if planned is None or planned.starts_at > protections.now:
            chosen = choose_preemptions(member.request, member.indexes.availability, claims, capacity, protections.now)
            for preemption in chosen:
                found.originals.setdefault(preemption.allocation_id, capacity.allocations[preemption.allocation_id])
                capacity.expect_release(preemption.allocation_id, preemption.nodes)
            found.preemptions.extend(chosen)
        planned = own.plan(member)
        if planned is None or planned.starts_at > protections.now:
            for allocation in found.originals.values():
                capacity.put_allocation(allocation)
            return None
        found.starts.append(planned)
    return found


class _OwnClaims:
    """What is promised to others, and to the requests of a bundle that are planned already."""

    def __init__(self, protections: ProtectionTable, capacity: CapacityIndex) -> None:
        self._protections = protections
        self._capacity = capacity
        self._own: list[tuple[str, CapacityClaim]] = []

    def collect(self, member: BundleMember) -> dict[str, list[CapacityClaim]]:
        claims = self._protections.collect_claims(member.group.admitted)
        for node, claim in self._own:
            claims.setdefault(node, []).append(claim)
        return claims

    def plan(self, member: BundleMember) -> PlannedStart | None:
        """Return a request's earliest start, and count it as promised."""
        claims = self.collect(member)
        planned = plan_start(member.request, member.indexes.availability, claims, self._capacity)
        if planned is not None:
            protected = protect_start(planned, self._protections.now, claims, self._capacity)
            self._own.extend(protected.claims.items())
        return planned
