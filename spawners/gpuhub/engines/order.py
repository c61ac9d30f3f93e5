"""In which order requests are served: age, priority, interactive before batch, and fair share between owners."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuhub.engines.base import Request, Rules

#: A request's place among its owner's: when it counts as made, its number, its id.
Entry = tuple[float, int, str]
#: The first of a group: its place in line, number, id, owner, and the group's number.
Head = tuple[float, int, str, str, int]

#: Scavenging requests come after all others where they are preempted.
_AFTER_ALL_S = 1e9


def entry_of(request: Request, rules: Rules) -> Entry:
    """A request's place among its owner's, which does not change with time."""
    made_at = request.created_at - request.priority * rules.priority_s
    if request.scavenge and rules.preemption:
        # Before others it would only take what was given back for them, and have to give it back in turn.
        made_at += _AFTER_ALL_S
    return made_at - (0.0 if request.batch else rules.interactive_s), request.seq, request.id


def penalty_s(used: float, used_by_all: float, due: float, rules: Rules) -> float:
    """By how much an owner is put back, in whole seconds, so that no rounding of sums changes the order.

    `due` is the owner's part of all weights. Who used nothing has none, who used all has `fair_share_s`.
    """
    if used_by_all <= 0.0 or used <= 0.0:
        return 0.0
    part = min(1.0, used / used_by_all)
    return float(round(rules.fair_share_s * (1 - 2 ** (-part / due)) / (1 - 2 ** (-1 / due))))


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Waiting requests that ask for the same, by owner in their order."""

    #: What makes them equal.
    key: object
    #: One of them, for what they ask.
    sample: Request
    #: Reservations whose users they are.
    admitted: frozenset[str]
    by_owner: dict[str, list[Entry]] = field(default_factory=dict)
    #: The first of each owner.
    heads: dict[str, Entry] = field(default_factory=dict)

    def add(self, owner: str, entry: Entry) -> None:
        """A request joins."""
        entries = self.by_owner.setdefault(owner, [])
        insort(entries, entry)
        self.heads[owner] = entries[0]

    def remove(self, owner: str, entry: Entry) -> None:
        """A request leaves."""
        entries = self.by_owner[owner]
        del entries[bisect_left(entries, entry)]
        if entries:
            self.heads[owner] = entries[0]
        else:
            del self.by_owner[owner], self.heads[owner]


class Line:
    """Waiting requests in the order in which they are served, without those that are passed over.

    At first owner by owner, since an owner's requests keep their order: that is cheap to begin. Once it is known which
    groups still matter, group by group (`narrow`): that skips the thousands of others at once.
    """

    def __init__(
        self,
        owners: Mapping[str, Sequence[Entry]],
        group_of: Mapping[str, Group],
        penalties: Mapping[str, float],
    ) -> None:
        self.steps = 0
        self._owners = owners
        self._group_of = group_of
        self._penalties = penalties
        self._closed: set[Group] = set()
        #: How many of an owner's requests in a group are dealt with; beyond all for an owner who is passed over.
        self._done: dict[tuple[Group, str], float] = {}
        self._by_owner = [
            (entries[0][0] + penalties[owner], *entries[0][1:], owner, 0) for owner, entries in owners.items()
        ]
        heapq.heapify(self._by_owner)
        self._by_group: list[Head] | None = None
        self._groups: list[Group] = []

    def __iter__(self) -> Iterator[tuple[Group, str]]:
        """A request's group and id."""
        while self._by_group is None and self._by_owner:
            _, _, request_id, owner, place = self._by_owner[0]
            group = self._group_of[request_id]
            if group not in self._closed and self._done.get((group, owner), 0) != math.inf:
                self.steps += 1
                yield group, request_id
            self._step(owner, place + 1)
        while self._by_group:
            _, _, request_id, owner, number = self._by_group[0]
            group = self._groups[number]
            self.steps += 1
            yield group, request_id
            head = None if group in self._closed else self._head(number)
            if head is None:
                heapq.heappop(self._by_group)
            else:
                heapq.heapreplace(self._by_group, head)

    def close(self, group: Group) -> None:
        """No more of this group."""
        self._closed.add(group)

    def deal_with(self, group: Group, owner: str) -> None:
        """The owner's first request in the group is dealt with; the next may come."""
        self._done[group, owner] = self._done.get((group, owner), 0) + 1

    def pass_over(self, group: Group, owner: str) -> None:
        """No more of this group from this owner."""
        self._done[group, owner] = math.inf

    @property
    def is_narrow(self) -> bool:
        """Whether it goes by groups already."""
        return self._by_group is not None

    def narrow(self, groups: Iterable[Group]) -> None:
        """Nothing but these groups matters from now on."""
        self._groups = [group for group in groups if group not in self._closed]
        heads = (self._head(number) for number in range(len(self._groups)))
        self._by_group = [head for head in heads if head is not None]
        heapq.heapify(self._by_group)

    def _step(self, owner: str, place: int) -> None:
        entries = self._owners[owner]
        if place < len(entries):
            made_at, seq, request_id = entries[place]
            heapq.heapreplace(self._by_owner, (made_at + self._penalties[owner], seq, request_id, owner, place))
        else:
            heapq.heappop(self._by_owner)

    def _head(self, number: int) -> Head | None:
        """The first of a group, with its place in line."""
        group, penalties, done = self._groups[number], self._penalties, self._done
        best, first, best_owner = math.inf, None, ""
        for owner, entry in group.heads.items():
            if entry[0] + penalties[owner] > best:
                continue
            place = done.get((group, owner), 0) if done else 0
            if place >= len(group.by_owner[owner]):
                continue
            here = group.by_owner[owner][int(place)] if place else entry
            at = here[0] + penalties[owner]
            if at < best or (at == best and (first is None or here[1:] < first[1:])):
                best, first, best_owner = at, here, owner
        return None if first is None else (best, first[1], first[2], best_owner, number)
