"""The order of the queue: age, priority, interactive before batch, and fair share between owners."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuhub.scheduler.interface import SchedulingParameters, SchedulingRequest

#: A request's place among its owner's: its adjusted time, its number, its id.
QueueEntry = tuple[float, int, str]
#: The first request of a group: its sort time, number, id, owner, and the group's number.
QueueHead = tuple[float, int, str, str, int]

#: Adjustment by which preemptible requests come after all others, seconds.
_SCAVENGE_DELAY_S = 1e9


def build_entry(request: SchedulingRequest, parameters: SchedulingParameters) -> QueueEntry:
    """Return a request's place among its owner's, which does not change with time."""
    made_at = request.created_at - request.priority * parameters.priority_s
    if request.scavenge and parameters.preemption:
        # Earlier in the queue it would take only what was released for other requests, and would be preempted in turn.
        made_at += _SCAVENGE_DELAY_S
    return made_at - (0.0 if request.batch else parameters.interactive_s), request.seq, request.id


def compute_penalty(used: float, used_by_all: float, due: float, parameters: SchedulingParameters) -> float:
    """Return the owner's fair-share penalty in whole seconds, so that rounding of sums does not change the order.

    Args:
        used: The owner's decayed usage; an owner without usage has no penalty.
        used_by_all: Everyone's decayed usage; an owner with all of it gets `fair_share_s`.
        due: The owner's part of the sum of all weights.
    """
    if used_by_all <= 0.0 or used <= 0.0:
        return 0.0
    fraction = min(1.0, used / used_by_all)
    return float(round(parameters.fair_share_s * (1 - 2 ** (-fraction / due)) / (1 - 2 ** (-1 / due))))


@dataclass(slots=True, kw_only=True, eq=False)
class RequestGroup:
    """Equal waiting requests, by owner in their order."""

    #: The values by which the requests are equal.
    key: object
    #: One of the requests, for the values that all share.
    sample: SchedulingRequest
    #: Ids of the reservations that admit the requests.
    admitted: frozenset[str]
    by_owner: dict[str, list[QueueEntry]] = field(default_factory=dict)
    #: The first entry of each owner.
    heads: dict[str, QueueEntry] = field(default_factory=dict)

    def add(self, owner: str, entry: QueueEntry) -> None:
        entries = self.by_owner.setdefault(owner, [])
        insort(entries, entry)
        self.heads[owner] = entries[0]

    def remove(self, owner: str, entry: QueueEntry) -> None:
        entries = self.by_owner[owner]
        del entries[bisect_left(entries, entry)]
        if entries:
            self.heads[owner] = entries[0]
        else:
            del self.by_owner[owner], self.heads[owner]


class RequestQueue:
    """Iterates over waiting requests in the order in which they are served, without those that are skipped.

    It starts owner by owner, which is cheap to set up, since an owner's requests keep their order. When it is known
    which groups still matter, `restrict_to` makes it go group by group, which skips the thousands of other requests at
    once.
    """

    def __init__(
        self,
        owners: Mapping[str, Sequence[QueueEntry]],
        group_of: Mapping[str, RequestGroup],
        penalties: Mapping[str, float],
    ) -> None:
        self.steps = 0
        self._owners = owners
        self._group_of = group_of
        self._penalties = penalties
        self._closed: set[RequestGroup] = set()
        #: Number of an owner's requests in a group that are done; infinite for a skipped owner.
        self._done: dict[tuple[RequestGroup, str], float] = {}
        self._by_owner = [
            (entries[0][0] + penalties[owner], *entries[0][1:], owner, 0) for owner, entries in owners.items()
        ]
        heapq.heapify(self._by_owner)
        self._by_group: list[QueueHead] | None = None
        self._groups: list[RequestGroup] = []

    def __iter__(self) -> Iterator[tuple[RequestGroup, str]]:
        """Yield each request's group and id."""
        while self._by_group is None and self._by_owner:
            _, _, request_id, owner, index = self._by_owner[0]
            group = self._group_of[request_id]
            if group not in self._closed and self._done.get((group, owner), 0) != math.inf:
                self.steps += 1
                yield group, request_id
            self._advance(owner, index + 1)
        while self._by_group:
            _, _, request_id, owner, group_index = self._by_group[0]
            group = self._groups[group_index]
            self.steps += 1
            yield group, request_id
            head = None if group in self._closed else self._find_head(group_index)
            if head is None:
                heapq.heappop(self._by_group)
            else:
                heapq.heapreplace(self._by_group, head)

    def close_group(self, group: RequestGroup) -> None:
        """Skip the rest of this group."""
        self._closed.add(group)

    def mark_done(self, group: RequestGroup, owner: str) -> None:
        """Mark the owner's first request in the group as done, so that the next one follows."""
        self._done[group, owner] = self._done.get((group, owner), 0) + 1

    def skip_owner(self, group: RequestGroup, owner: str) -> None:
        """Skip the rest of this owner's requests in the group."""
        self._done[group, owner] = math.inf

    @property
    def is_restricted(self) -> bool:
        return self._by_group is not None

    def restrict_to(self, groups: Iterable[RequestGroup]) -> None:
        """Continue with these groups alone."""
        self._groups = [group for group in groups if group not in self._closed]
        heads = (self._find_head(group_index) for group_index in range(len(self._groups)))
        self._by_group = [head for head in heads if head is not None]
        heapq.heapify(self._by_group)

    def _advance(self, owner: str, index: int) -> None:
        entries = self._owners[owner]
        if index < len(entries):
            made_at, seq, request_id = entries[index]
            heapq.heapreplace(self._by_owner, (made_at + self._penalties[owner], seq, request_id, owner, index))
        else:
            heapq.heappop(self._by_owner)

    def _find_head(self, group_index: int) -> QueueHead | None:
        """Return the first request of a group with its sort time."""
        group, penalties, done = self._groups[group_index], self._penalties, self._done
        best_time, best_entry, best_owner = math.inf, None, ""
        for owner, entry in group.heads.items():
            if entry[0] + penalties[owner] > best_time:
                continue
            index = done.get((group, owner), 0) if done else 0
            if index >= len(group.by_owner[owner]):
                continue
            first = group.by_owner[owner][int(index)] if index else entry
            sort_time = first[0] + penalties[owner]
            if sort_time < best_time or (sort_time == best_time and (best_entry is None or first[1:] < best_entry[1:])):
                best_time, best_entry, best_owner = sort_time, first, owner
        return None if best_entry is None else (best_time, best_entry[1], best_entry[2], best_owner, group_index)
