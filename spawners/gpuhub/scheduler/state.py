"""The scheduler's copy of what the broker has stored, with the indexes that make decisions cheap."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from gpuhub.scheduler.demand import DemandVariant, NodeDemand, list_variants
from gpuhub.scheduler.indexes.availability_index import AvailabilityIndex
from gpuhub.scheduler.indexes.capacity_index import CapacityIndex
from gpuhub.scheduler.indexes.fit_index import FitIndex
from gpuhub.scheduler.interface import (
    Allocation,
    NodeCapacity,
    Quota,
    Reservation,
    SchedulerSnapshot,
    SchedulingParameters,
    SchedulingRequest,
)
from gpuhub.scheduler.placement import PolicyFactory
from gpuhub.scheduler.queue import QueueEntry, RequestGroup, build_entry, compute_penalty
from gpuhub.scheduler.usage import UsageLedger

#: Demand variants to keep indexes of; all indexes are dropped beyond that.
_MAX_VARIANTS = 1024
#: First number of new requests after which the policy is built again for the current workload; it grows to the maximum.
_FIRST_UPDATE = 32
#: Maximum of that number.
_MAX_UPDATE = 8192

#: The number of a card, and those of the owner's groups that some node is restricted to: owners with other groups have
#: other nodes with such cards.
CardKey = tuple[int, frozenset[str]]
#: Stands for the number of a card in the key of a demand without GPU.
_NO_GPU = -1


class VariantIndexes(NamedTuple):
    """The indexes of a group's demand variants, preferred variant first."""

    #: Epoch of the capacity index for which they were built.
    epoch: int
    fit_indexes: tuple[FitIndex, ...]
    availability: tuple[AvailabilityIndex, ...]
    #: The acceptable cards; one key for a demand without GPU.
    card_keys: frozenset[CardKey]


class SchedulerState:
    """Nodes, requests, allocations, quotas, reservations and usage."""

    def __init__(
        self, snapshot: SchedulerSnapshot, parameters: SchedulingParameters, policy_factory: PolicyFactory
    ) -> None:
        self.parameters = parameters
        self.capacity = CapacityIndex()
        self.usage = UsageLedger(parameters)
        self.requests: dict[str, SchedulingRequest] = {}
        self.quotas: dict[str, Quota] = dict(snapshot.quotas)
        self.reservations: tuple[Reservation, ...] = ()
        self._groups: dict[object, RequestGroup] = {}
        self._policy_factory = policy_factory
        #: Waiting requests of each owner, in order.
        self.queues: dict[str, list[QueueEntry]] = {}
        self.group_of: dict[str, RequestGroup] = {}
        #: Ids of the waiting requests of each bundle.
        self._bundles: dict[str, set[str]] = {}
        self._fit_indexes: dict[DemandVariant, FitIndex] = {}
        self._availability_indexes: dict[DemandVariant, AvailabilityIndex] = {}
        self._group_indexes: dict[RequestGroup, VariantIndexes] = {}
        self._demand_counts: Counter[NodeDemand] = Counter()
        self._policy = policy_factory((), {})
        self._update_threshold = _FIRST_UPDATE
        self._requests_since_update = 0
        for node in snapshot.nodes:
            self.capacity.put_node(node)
        self.reservations = tuple(snapshot.reservations)
        for record in sorted(snapshot.usage_records, key=lambda reservation: reservation.ended_at):
            self.usage.record(record)
        for allocation in snapshot.allocations:
            self.put_allocation(allocation)
        for request in snapshot.requests:
            self.put_request(request)
        self._update_workload()

    # -- changes --------------------------------------------------------------------------------------------------

    def put_node(self, node: NodeCapacity) -> None:
        """Add or replace a node; the first one of a group divides equal requests by their owners' groups."""
        node_groups = self.capacity.node_groups
        self.capacity.put_node(node)
        if self.capacity.node_groups != node_groups:
            self._regroup()

    def put_request(self, request: SchedulingRequest) -> None:
        self.remove_request(request.id)
        self.requests[request.id] = request
        insort(self.queues.setdefault(request.owner, []), build_entry(request, self.parameters))
        self._requests_since_update += 1
        self._join_group(request)
        if request.bundle is not None:
            self._bundles.setdefault(request.bundle, set()).add(request.id)

    def remove_request(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        entry, entries = build_entry(request, self.parameters), self.queues[request.owner]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self.queues[request.owner]
        if request.bundle is not None:
            self._bundles[request.bundle].discard(request_id)
            if not self._bundles[request.bundle]:
                del self._bundles[request.bundle]
        group = self.group_of.pop(request_id)
        group.remove(request.owner, entry)
        if not group.heads:
            del self._groups[group.key]
            self._group_indexes.pop(group, None)

    def put_allocation(self, allocation: Allocation) -> None:
        before = self.capacity.allocations.get(allocation.request.id)
        if before is not None:
            self.usage.end_allocation(before, None)
        self.capacity.put_allocation(allocation)
        self.usage.start_allocation(allocation)

    def remove_allocation(self, holding_id: str, now: float) -> None:
        allocation = self.capacity.remove_allocation(holding_id)
        if allocation is not None:
            self.usage.end_allocation(allocation, now)

    def set_reservations(self, reservations: Iterable[Reservation]) -> None:
        """Replace all reservations, and group the requests again by the reservations that admit them."""
        self.reservations = tuple(reservations)
        self._regroup()

    def _regroup(self) -> None:
        self._groups.clear()
        self._group_indexes.clear()
        for request in self.requests.values():
            self._join_group(request)

    # -- queries ------------------------------------------------------------------------------------------------

    def compute_penalties(self, now: float) -> dict[str, float]:
        """Return the seconds by which each waiting owner's requests count as younger."""
        weights = {owner: self._weight(owner) for owner in self.queues}
        holders = self.usage.active_owners - weights.keys()
        total_weight = sum(weights.values()) + sum(self._weight(owner) for owner in holders)
        decayed = self.usage.decayed_usage(now)
        used_by_all = decayed(None)
        return {
            owner: compute_penalty(decayed(owner), used_by_all, weight / total_weight, self.parameters)
            for owner, weight in weights.items()
        }

    def _weight(self, owner: str) -> float:
        quota = self.quotas.get(owner)
        return 1.0 if quota is None else quota.weight

    @property
    def groups(self) -> Iterable[RequestGroup]:
        return self._groups.values()

    def list_bundle(self, bundle: str) -> list[SchedulingRequest]:
        """Return the waiting requests of a bundle."""
        return [self.requests[request_id] for request_id in self._bundles[bundle]]

    def get_indexes(self, group: RequestGroup) -> VariantIndexes:
        """Return the indexes of a group, built again if new cards have appeared."""
        indexes = self._group_indexes.get(group)
        if indexes is None or indexes.epoch != self.capacity.epoch:
            indexes = self._build_indexes(group.sample)
            self._group_indexes[group] = indexes
        return indexes

    def find_fit_indexes(self, request: SchedulingRequest) -> tuple[FitIndex, ...]:
        """Return the indexes that show where a request would fit, whether it waits or not."""
        return self._build_indexes(request).fit_indexes

    def update_workload(self) -> None:
        """Build the policy again for the demands of current requests, if enough have arrived: this drops its cached
        choices.
        """
        if self._requests_since_update >= self._update_threshold:
            self._update_workload()

    def _update_workload(self) -> None:
        self._update_threshold = min(max(2 * self._requests_since_update, self._update_threshold), _MAX_UPDATE)
        self._requests_since_update = 0
        for demand in list(self._demand_counts):
            self._demand_counts[demand] //= 2
        for group in self._groups.values():
            for index in self.get_indexes(group).fit_indexes[-1:]:
                self._demand_counts[index.build_demand(index.variant.gpus)] += sum(map(len, group.by_owner.values()))
        self._demand_counts += Counter()
        self._policy = self._policy_factory(
            tuple((demand, float(count)) for demand, count in self._demand_counts.items()), self.capacity.count_cards()
        )
        for fit_index in self._fit_indexes.values():
            fit_index.set_policy(self._policy)

    def _build_indexes(self, request: SchedulingRequest) -> VariantIndexes:
        variants = list_variants(request, self.capacity.cards, self.capacity.node_groups)
        if len(self._fit_indexes) + len(variants) > _MAX_VARIANTS:
            self._fit_indexes.clear()
            self._availability_indexes.clear()
            self._group_indexes.clear()
        for variant in variants:
            if variant not in self._fit_indexes:
                self._fit_indexes[variant] = FitIndex(variant, self.capacity, self._policy)
                self._availability_indexes[variant] = AvailabilityIndex(variant, self.capacity)
        fit_indexes = tuple(self._fit_indexes[variant] for variant in variants)
        availability = tuple(
            self._availability_indexes[variant] for variant in variants if not variant.joins_shared_gpu
        )
        numbers = {number for fit_index in fit_indexes for number in fit_index.accepted} if request.size else {_NO_GPU}
        groups = request.groups & self.capacity.node_groups
        return VariantIndexes(
            epoch=self.capacity.epoch,
            fit_indexes=fit_indexes,
            availability=availability,
            card_keys=frozenset((number, groups) for number in numbers),
        )

    def _join_group(self, request: SchedulingRequest) -> None:
        """Add a request to the group of equal requests that are admitted by the same reservations and nodes."""
        admitted = frozenset(
            reservation.id for reservation in self.reservations if reservation.admits(request.owner, request.groups)
        )
        key = (
            request.nodes,
            request.least_nodes,
            request.gpus_per_node,
            request.spread,
            request.requirement,
            request.share,
            request.exclude,
            request.exclusive,
            request.same_model,
            request.scavenge,
            request.time_limit_s,
            request.cpu_milli,
            request.memory_mib,
            request.cpu_by_gpu,
            request.memory_by_gpu,
            request.groups & self.capacity.node_groups,
            request.bundle,
            admitted,
        )
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = RequestGroup(key=key, sample=request, admitted=admitted)
        self.group_of[request.id] = group
        group.add(request.owner, build_entry(request, self.parameters))
