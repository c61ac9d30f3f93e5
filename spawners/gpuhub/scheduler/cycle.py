"""The scheduling cycle: serves the queue in order and keeps free what earlier requests are waiting for."""

from __future__ import annotations

from gpuhub.scheduler.backfill import PlannedStart, ProtectionTable, plan_start, protect_candidates, protect_start
from gpuhub.scheduler.bundles import BundleMember, combine, list_members, place_members, plan_members, preempt_members
from gpuhub.scheduler.circuits import count_needed
from gpuhub.scheduler.feasibility import find_candidate_slots
from gpuhub.scheduler.gang_placement import build_note, place_request
from gpuhub.scheduler.indexes.fit_index import CapacityMask
from gpuhub.scheduler.interface import (
    Allocation,
    Grant,
    NodeAllocation,
    Preemption,
    SchedulingDecision,
    SchedulingRequest,
)
from gpuhub.scheduler.preemption import choose_preemptions
from gpuhub.scheduler.queue import RequestGroup, RequestQueue
from gpuhub.scheduler.quota import QuotaHeadroom
from gpuhub.scheduler.state import CardKey, SchedulerState, VariantIndexes

#: Requests to serve without a grant before the queue is restricted to the groups that still matter.
_MAX_STEPS = 64


class SchedulingCycle:
    """One pass over the queue at one moment. Grants and preemptions change the capacity index at once; `undo` reverts
    them.

    With `protects_all` every blocked request gets a protected start: that is a forecast and not a decision.
    """

    def __init__(self, state: SchedulerState, now: float, *, protects_all: bool = False) -> None:
        self.now = now
        self.grants: dict[str, Grant] = {}
        self.preemptions: list[Preemption] = []
        #: Planned starts of blocked requests, in their order.
        self.planned_starts: dict[str, PlannedStart] = {}
        #: GPUs of nodes with protected capacity that `run_to` had to examine, summed over its steps.
        self.work = 0
        self.protections = ProtectionTable(state.capacity, now, state.reservations)
        self.headroom = QuotaHeadroom(state.usage, state.quotas, now)
        self._state = state
        self._parameters = state.parameters
        self._protects_all = protects_all
        self._preempted: dict[str, Allocation] = {}
        #: The planned starts of the previous round; None in the first round.
        self._previous_starts: dict[str, PlannedStart] | None = None
        self._penalties = state.compute_penalties(now)
        self._start_round()

    def _start_round(self) -> None:
        self.planned_starts.clear()
        self.protections = ProtectionTable(self._state.capacity, self.now, self._state.reservations)
        self._protected_count = 0
        self._covered_cards: set[CardKey] = set()
        self._served_bundles: set[str] = set()
        self._queue = RequestQueue(self._state.queues, self._state.group_of, self._penalties)

    def run(self) -> None:
        """Serve the queue until nothing more follows: a grant may change the plans of other requests."""
        self._serve_queue()
        change_count = 0
        while len(self.grants) + len(self.preemptions) > change_count:
            change_count = len(self.grants) + len(self.preemptions)
            self._previous_starts = dict(self.planned_starts)
            self._start_round()
            self._serve_queue()

    def run_to(self, request_id: str, max_work: int) -> None:
        """Serve the queue once, up to and including a request, or until that has cost more than `max_work`.

        Each plan examines what earlier ones protect, so that the work grows with the square of their number.
        """
        self._serve_queue(request_id, max_work)

    def _serve_queue(self, until: str | None = None, max_work: int | None = None) -> None:
        for group, request_id in self._queue:
            self.work += self.protections.size
            if max_work is not None and self.work > max_work:
                return
            request = self._state.requests[request_id]
            if request_id in self.grants:
                self._queue.mark_done(group, request.owner)
            elif not self.headroom.allows(request.owner, request):
                self._queue.skip_owner(group, request.owner)
            elif request.bundle is not None:
                self._serve_bundle(request.bundle)
                self._queue.mark_done(group, request.owner)
            else:
                self._serve(group, request)
            if request_id == until:
                return
            if self._queue.is_restricted:
                continue
            if self._has_enough_protected() and self.planned_starts == self._previous_starts:
                # The planned starts equal those of the previous round: nothing new can follow.
                return
            if self._has_enough_protected() or self._queue.steps - len(self.grants) > _MAX_STEPS:
                self._queue.restrict_to(group for group in self._state.groups if self._matters(group))

    def build_decision(self) -> SchedulingDecision:
        edges = {
            edge for reservation in self._state.reservations for edge in (reservation.starts_at, reservation.ends_at)
        }
        if self.headroom.decide_again_at is not None:
            edges.add(self.headroom.decide_again_at)
        return SchedulingDecision(
            grants=self.grants,
            preemptions=tuple(self.preemptions),
            decide_again_at=min((edge for edge in edges if edge > self.now), default=None),
        )

    def undo(self) -> None:
        """Revert all grants and preemptions."""
        for request_id in self.grants:
            self._state.capacity.remove_allocation(request_id)
        for allocation in self._preempted.values():
            self._state.capacity.put_allocation(allocation)

    def _serve(self, group: RequestGroup, request: SchedulingRequest) -> None:
        indexes = self._state.get_indexes(group)
        mask = self.protections.build_mask(request.time_limit_s, group.admitted)
        node_allocations = place_request(
            request, indexes.fit_indexes, mask, self.headroom.remaining_gpus(request.owner)
        )
        if node_allocations is not None:
            self._grant(group, request, node_allocations)
            self._queue.mark_done(group, request.owner)
        elif not (self._parameters.backfill or self._protects_all):
            self._protect_candidates(group, request, indexes)
            self._queue.close_group(group)
        elif self._skips_planning(group, request, indexes, mask):
            self._queue.close_group(group)
        else:
            self._protect(group, request, indexes)

    def _serve_bundle(self, bundle: str) -> None:
        """Serve all requests of a bundle at the place of the first one in the queue."""
        if bundle in self._served_bundles:
            return
        self._served_bundles.add(bundle)
        members = list_members(bundle, self._state)
        combined = combine(members)
        if not self.headroom.allows(combined.owner, combined):
            return
        placed = place_members(
            members, self.protections, self.headroom.remaining_gpus(combined.owner), self._state.capacity
        )
        if placed is not None:
            for member in members:
                self._grant(member.group, member.request, placed[member.request.id])
        elif self._parameters.backfill or self._protects_all:
            self._protect_bundle(members)
        else:
            for member in members:
                self._protect_candidates(member.group, member.request, member.indexes)

    def _protect_bundle(self, members: list[BundleMember]) -> None:
        """Plan a moment at which all requests of a bundle start, by preemption if necessary, and protect it."""
        capacity = self._state.capacity
        may_preempt = all(self._may_preempt(member.request) for member in members)
        if self._has_enough_protected() and not may_preempt:
            return
        starts = plan_members(members, self.protections, capacity)
        is_released_now = starts is not None and starts[0].starts_at <= self.now
        if not is_released_now and may_preempt:
            found = preempt_members(members, self.protections, capacity)
            if found is not None:
                self._preempted = found.originals | self._preempted
                self.preemptions += found.preemptions
                starts, is_released_now = found.starts, True
        if starts is None or (self._has_enough_protected() and not is_released_now):
            return
        self._protected_count += not is_released_now
        for member, planned in zip(members, starts, strict=True):
            self._covered_cards |= member.indexes.card_keys
            self.planned_starts[planned.request.id] = planned
            claims = self.protections.collect_claims(member.group.admitted)
            self.protections.add(protect_start(planned, self.now, claims, capacity))

    def _grant(
        self, group: RequestGroup, request: SchedulingRequest, node_allocations: tuple[NodeAllocation, ...]
    ) -> None:
        self.protections.apply_grant(request, node_allocations, group.admitted)
        self.headroom.record_grant(request, sum(len(node_allocation.slots) for node_allocation in node_allocations))
        ends_at = None if request.time_limit_s is None else self.now + request.time_limit_s
        self._state.capacity.put_allocation(
            Allocation(request=request, node_allocations=node_allocations, granted_at=self.now, ends_at=ends_at)
        )
        self.grants[request.id] = Grant(node_allocations=node_allocations, note=build_note(node_allocations))

    def _protect_candidates(self, group: RequestGroup, request: SchedulingRequest, indexes: VariantIndexes) -> None:
        """Without backfill: protect everything that the request could ever use, if it can be served in time."""
        capacity = self._state.capacity
        if not request.size or self._is_reserved_only(group, request, indexes):
            return
        if plan_start(request, indexes.availability, {}, capacity) is not None:
            self.protections.add(protect_candidates(request, find_candidate_slots(request, capacity), capacity))

    def _skips_planning(
        self, group: RequestGroup, request: SchedulingRequest, indexes: VariantIndexes, mask: CapacityMask | None
    ) -> bool:
        """Return whether the request needs no plan: enough are protected, or only a reservation blocks it."""
        if self._protects_all:
            return False
        if self._is_covered(indexes) and not self._may_preempt(request):
            return True
        return mask is not None and self._is_reserved_only(group, request, indexes)

    def _is_reserved_only(self, group: RequestGroup, request: SchedulingRequest, indexes: VariantIndexes) -> bool:
        all_reservations = frozenset(reservation.id for reservation in self._state.reservations)
        if all_reservations == group.admitted:
            return False
        mask = self.protections.build_mask(request.time_limit_s, all_reservations)
        if self._state.capacity.circuits:
            return place_request(request, indexes.fit_indexes, mask, None) is not None
        needed = count_needed(request)
        return any(fit_index.count(mask) >= needed for fit_index in indexes.fit_indexes)

    def _has_enough_protected(self) -> bool:
        return self._protected_count >= self._parameters.protected and not self._protects_all

    def _is_covered(self, indexes: VariantIndexes) -> bool:
        """Return whether enough requests are protected, and one of them is first in the queue for these cards."""
        return self._has_enough_protected() and not self._covered_cards.isdisjoint(indexes.card_keys)

    def _matters(self, group: RequestGroup) -> bool:
        """Return whether a request of the group may still be granted or planned."""
        indexes = self._state.get_indexes(group)
        if not self._is_covered(indexes) or self._may_preempt(group.sample):
            return True
        needed = count_needed(group.sample)
        mask = self.protections.build_mask(group.sample.time_limit_s, group.admitted)
        return any(fit_index.count(mask) >= needed for fit_index in indexes.fit_indexes)

    def _may_preempt(self, request: SchedulingRequest) -> bool:
        return self._parameters.preemption and not request.scavenge and not self._protects_all

    def _protect(self, group: RequestGroup, request: SchedulingRequest, indexes: VariantIndexes) -> None:
        """Plan the request's start, by preemption if necessary, and protect it."""
        state, availability = self._state, indexes.availability
        claims = self.protections.collect_claims(group.admitted)
        planned = plan_start(request, availability, claims, state.capacity)
        if self._may_preempt(request) and (planned is None or planned.starts_at > self.now):
            planned = self._preempt(request, group, indexes, planned)
        is_released_now = planned is not None and self._may_preempt(request) and planned.starts_at <= self.now
        if planned is None or (self._is_covered(indexes) and not is_released_now):
            self._queue.close_group(group)
            return
        self._protected_count += not is_released_now
        self._covered_cards |= indexes.card_keys
        self.planned_starts[request.id] = planned
        self.protections.add(protect_start(planned, self.now, claims, state.capacity))
        self._queue.mark_done(group, request.owner)

    def _preempt(
        self, request: SchedulingRequest, group: RequestGroup, indexes: VariantIndexes, planned: PlannedStart | None
    ) -> PlannedStart | None:
        """Return the planned start after the preemptions that the request needs; `planned` if none help."""
        state = self._state
        claims = self.protections.collect_claims(group.admitted)
        preemptions = choose_preemptions(request, indexes.availability, claims, state.capacity, self.now)
        for preemption in preemptions:
            self._preempted.setdefault(preemption.allocation_id, state.capacity.allocations[preemption.allocation_id])
            state.capacity.expect_release(preemption.allocation_id, preemption.nodes)
        self.preemptions += preemptions
        return plan_start(request, indexes.availability, claims, state.capacity) if preemptions else planned
