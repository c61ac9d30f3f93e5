"""The base of schedulers that follow another system: a request is granted what that system has allocated to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from gpuhub.scheduler.gang_placement import build_note
from gpuhub.scheduler.interface import (
    Allocation,
    Constraint,
    Grant,
    NodeAllocation,
    NodeCapacity,
    PendingReason,
    SchedulingDecision,
    SchedulingParameters,
    SchedulingRequest,
)
from gpuhub.scheduler.scheduler import BaseScheduler


class ExternalScheduler(BaseScheduler, ABC):
    """A `Scheduler` that grants allocations of another system as soon as all of their GPUs are free in the ledger."""

    #: The other system's name for people.
    title: str

    def __init__(self, rules: SchedulingParameters | None = None) -> None:
        super().__init__(rules)
        self._unreachable: str | None = None

    # -- what subclasses know of the other system -----------------------------------------------------------------

    @abstractmethod
    def find_allocation(self, request: SchedulingRequest) -> tuple[NodeAllocation, ...] | None:
        """Return what can be granted to a request now; None while it waits, or waits for some of its GPUs."""

    @abstractmethod
    def explain(self, request: SchedulingRequest) -> str:
        """Return why a request is not granted, for a person."""

    def predict_start(self, request: SchedulingRequest, now: float) -> float | None:
        """Return when a request is expected to start, seconds since 1970; None where that is not known."""
        return None

    def note_grant(self, request: SchedulingRequest) -> None:
        """Remember that a request is granted what is allocated to it now."""

    # -- a Scheduler ----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> SchedulingDecision:
        grants: dict[str, Grant] = {}
        for request in self.list_waiting():
            nodes = self.find_allocation(request)
            if nodes:
                self.note_grant(request)
                grants[request.id] = Grant(node_allocations=nodes, note=build_note(nodes))
                ends_at = None if request.time_limit_s is None else now + request.time_limit_s
                self.put_allocation(
                    Allocation(request=request, node_allocations=nodes, granted_at=now, ends_at=ends_at)
                )
        return SchedulingDecision(grants=grants)

    def order_requests(self, now: float) -> list[str]:
        return [request.id for request in self.list_waiting()]

    def explain_pending(self, request_id: str, now: float) -> PendingReason:
        request = self._state.requests[request_id]
        text = self.explain(request)
        if self._unreachable is not None:
            text = f"{self._unreachable}; last known state: {text}"
        return PendingReason(
            position=self.order_requests(now).index(request_id) + 1,
            text=f"{self.title}: {text}",
            expected_start=self.predict_start(request, now),
        )

    def find_constraints(self, request_id: str, now: float) -> Iterator[Constraint]:
        """Yield nothing: the other system does not report the effects of requirements."""
        return iter(())

    def can_start_now(self, request: SchedulingRequest, now: float) -> bool:
        """Return whether what a request needs is free; requests that wait may still get it."""
        return False

    def find_startable(self, nodes: Iterable[NodeCapacity], now: float) -> frozenset[str]:
        """Return nothing: the other system decides what starts, and wakes its nodes itself."""
        return frozenset()

    # -- the state of the other system ----------------------------------------------------------------------------

    def note_unreachable(self, reason: str) -> None:
        """Keep the last known state, and show the reason to users who wait."""
        self._unreachable = reason

    def note_answer(self) -> None:
        """Show no reason any more: the other system answers again."""
        self._unreachable = None

    def list_waiting(self) -> list[SchedulingRequest]:
        """Return the waiting requests, the oldest first."""
        return sorted(self._state.requests.values(), key=lambda request: (request.created_at, request.seq, request.id))

    def find_held(self, node: str) -> set[str]:
        """Return the UUIDs of a node's GPUs that leases hold; KeyError for an unknown node."""
        known = self._state.capacity.nodes[node]
        return {known.capacity.slots[at].uuid for use in known.uses.values() for at in use.positions}
