"""Schedulers: the base that keeps the state, and gpuhub's own, which decides.

`BuiltinScheduler` grants all of a request or nothing, places by best fit, orders by fair share, and backfills without
delaying a protected request. `queue.py` gives the order. What does not fit gets a planned start (`backfill.py`), and
later requests keep off the planned GPUs unless they end in time. Every change updates the state in memory, so a
decision reads what changed and not the whole cluster:

- Equal requests form one group, and the first of a group that does not fit stops the whole group.
- `fit_index.py` has the nodes on which a demand fits now, `availability.py` those on which it will fit, and when.
- `cycle.py` serves the groups in the order of the queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler import bundles, circuits, explain, feasibility
from gpuhub.scheduler.cycle import SchedulingCycle
from gpuhub.scheduler.feasibility import find_candidate_slots
from gpuhub.scheduler.interface import (
    Allocation,
    CircuitUsage,
    Constraint,
    NodeCapacity,
    OwnerUsage,
    PendingReason,
    Quota,
    Reservation,
    SchedulerSnapshot,
    SchedulingDecision,
    SchedulingParameters,
    SchedulingRequest,
    UsageRecord,
)
from gpuhub.scheduler.placement import DEFAULT_POLICY, PolicyFactory
from gpuhub.scheduler.queue import QueueEntry, build_entry
from gpuhub.scheduler.quota import QuotaHeadroom
from gpuhub.scheduler.state import SchedulerState


class BaseScheduler:
    """Keeps the state that decisions are made from; subclasses decide."""

    def __init__(
        self, parameters: SchedulingParameters | None = None, policy_factory: PolicyFactory = DEFAULT_POLICY
    ) -> None:
        self._parameters = parameters or SchedulingParameters()
        self._policy_factory = policy_factory
        self._state = SchedulerState(SchedulerSnapshot(), self._parameters, policy_factory)

    def rebuild(self, snapshot: SchedulerSnapshot) -> None:
        self._state = SchedulerState(snapshot, self._parameters, self._policy_factory)

    def put_node(self, node: NodeCapacity) -> None:
        self._state.put_node(node)

    def put_request(self, request: SchedulingRequest) -> None:
        self._state.put_request(request)

    def put_allocation(self, allocation: Allocation) -> None:
        self._state.remove_request(allocation.request.id)
        self._state.put_allocation(allocation)

    def remove(self, request_id: str, now: float) -> None:
        self._state.remove_request(request_id)
        self._state.remove_allocation(request_id, now)

    def put_quota(self, owner: str, quota: Quota) -> None:
        self._state.quotas[owner] = quota

    def record_usage(self, record: UsageRecord) -> None:
        self._state.usage.record(record)

    def set_reservations(self, reservations: Iterable[Reservation]) -> None:
        self._state.set_reservations(reservations)

    def find_candidates(self, request: SchedulingRequest) -> frozenset[str]:
        return frozenset[str]().union(*find_candidate_slots(request, self._state.capacity).values())

    def find_grantable(self, request: SchedulingRequest, now: float) -> frozenset[str]:
        if not QuotaHeadroom(self._state.usage, self._state.quotas, now).allows(request.owner, request):
            return frozenset()
        reserved = (
            reservation.uuids
            for reservation in self._state.reservations
            if reservation.starts_at <= now < reservation.ends_at
            and not reservation.admits(request.owner, request.groups)
        )
        return self.find_candidates(request).difference(*reserved)

    def report_circuits(self) -> Mapping[str, CircuitUsage]:
        return circuits.report_circuits(self._state.capacity)

    def has_room(self, node: str, cpu_milli: int, memory_mib: int) -> bool:
        found = self._state.capacity.nodes.get(node)
        return found is not None and found.free_cpu_milli() >= cpu_milli and found.free_memory_mib() >= memory_mib

    def explain_infeasible(
        self, request: SchedulingRequest, cards: Mapping[str, Sequence[GpuSpec] | None]
    ) -> str | None:
        nodes = {name: node.capacity for name, node in self._state.capacity.nodes.items()}
        return feasibility.explain_infeasible(request, cards, nodes)

    def explain_infeasible_bundle(
        self, requests: Sequence[SchedulingRequest], cards: Mapping[str, Sequence[GpuSpec] | None]
    ) -> str | None:
        if any(of_node is None for of_node in cards.values()):
            # A node whose GPUs are not known yet may have room.
            return None
        nodes = [node.capacity for node in self._state.capacity.nodes.values()]
        idle = [
            replace(node, takes_work=True, slots=tuple(replace(slot, available=True) for slot in node.slots))
            for node in nodes
        ]
        snapshot = SchedulerSnapshot(nodes=idle, requests=requests)
        return bundles.explain_infeasible(SchedulerState(snapshot, self._parameters, self._policy_factory))

    def report_usage(self, now: float) -> Mapping[str, OwnerUsage]:
        usage = self._state.usage
        penalties, decayed = self._state.compute_penalties(now), usage.decayed_usage(now)
        return {
            owner: OwnerUsage(
                gpus=usage.count_gpus(owner),
                gpu_hours_week=usage.week_hours(owner, now),
                decayed_gpu_hours=decayed(owner) / 3600.0,
                penalty_s=penalties.get(owner, 0.0),
            )
            for owner in sorted({*usage.owners, *penalties})
        }


class BuiltinScheduler(BaseScheduler):
    """The scheduler of the backend `builtin`."""

    def decide(self, now: float) -> SchedulingDecision:
        self._state.update_workload()
        cycle = SchedulingCycle(self._state, now)
        cycle.run()
        for request_id in cycle.grants:
            self._state.remove_request(request_id)
            self._state.usage.start_allocation(self._state.capacity.allocations[request_id])
        return cycle.build_decision()

    def order_requests(self, now: float) -> list[str]:
        penalties = self._state.compute_penalties(now)
        queue = []
        for owner, entries in self._state.queues.items():
            penalty = penalties[owner]
            queue += [(made_at + penalty, seq, request_id) for made_at, seq, request_id in entries]
        return [request_id for _, _, request_id in sorted(queue)]

    def explain_pending(self, request_id: str, now: float) -> PendingReason:
        state = self._state
        request = state.requests[request_id]
        position = self._find_position(request, now)
        cycle = SchedulingCycle(state, now)
        cycle.run()
        text = explain.describe_wait(request, state.group_of[request_id], cycle, state)
        cycle.undo()
        expected_start, _ = explain.estimate_start(state, cycle, request_id, position)
        return PendingReason(position=position, text=text, expected_start=expected_start)

    def find_constraints(self, request_id: str, now: float) -> Iterator[Constraint]:
        request = self._state.requests.get(request_id)
        if request is not None:
            yield from explain.find_constraints(self._state, request, now, self._find_position(request, now))

    def can_start_now(self, request: SchedulingRequest, now: float) -> bool:
        existing = self._state.requests.get(request.id)
        self._state.put_request(request)
        cycle = SchedulingCycle(self._state, now)
        cycle.run()
        cycle.undo()
        if existing is None:
            self._state.remove_request(request.id)
        else:
            self._state.put_request(existing)
        return request.id in cycle.grants

    def find_startable(self, nodes: Iterable[NodeCapacity], now: float) -> frozenset[str]:
        known = self._state.capacity.nodes
        variants = [node for node in nodes if node.name in known]
        before = [known[node.name].capacity for node in variants]
        for node in variants:
            self._state.put_node(node)
        cycle = SchedulingCycle(self._state, now)
        cycle.run()
        cycle.undo()
        for node in before:
            self._state.put_node(node)
        return frozenset(cycle.grants)

    def _find_position(self, request: SchedulingRequest, now: float) -> int:
        penalties = self._state.compute_penalties(now)
        made_at, seq, request_id = build_entry(request, self._parameters)
        sort_time = made_at + penalties[request.owner]
        before = 0
        for owner, entries in self._state.queues.items():
            # Compare sums that `order_requests` makes as well: their difference could round differently.
            before += bisect_left(entries, (sort_time, seq, request_id), key=_penalized(penalties[owner]))
        return before + 1


def _penalized(penalty: float) -> Callable[[QueueEntry], QueueEntry]:
    return lambda entry: (entry[0] + penalty, entry[1], entry[2])
