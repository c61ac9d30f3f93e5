"""Equal lines of several ranks become one. No I/O; time is passed in.

A line waits a moment for the same line of other ranks; lines of one rank never change their order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

#: How long a line may wait for its equals. With the notebook's own 50 ms between looks a line is shown within 0.15 s.
WAIT_S = 0.1

_Key = tuple[str, str]


@dataclass(frozen=True)
class Said:
    """One line, and the ranks that said it, by number."""

    ranks: tuple[int, ...]
    stream: str
    line: str


@dataclass
class _Queue:
    """A rank's lines that are not shown yet, with when they came, and how often each is in it."""

    lines: deque[tuple[_Key, float]] = field(default_factory=deque)
    times: Counter[_Key] = field(default_factory=Counter)


@dataclass
class _Group:
    """The ranks whose next line is the same one, and since when the first of them waits."""

    ranks: set[int]
    since: float


class Fold:
    """Takes ranks' lines and gives them back, those of several ranks once."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self._heads: dict[_Key, _Group] = {}
        self._last: set[int] = set()

    def feed(self, rank: int, stream: str, lines: Iterable[str], now: float) -> None:
        """Whole lines of one rank, in their order."""
        queue = self._queues.setdefault(rank, _Queue())
        is_idle = not queue.lines
        for line in lines:
            key = (stream, line)
            queue.lines.append((key, now))
            queue.times[key] += 1
        if is_idle:
            self._stand(rank)

    def take(self, speaking: Set[int], now: float, *, everything: bool = False) -> list[Said]:
        """What is to be shown now: lines that all ranks in `speaking` have said, and those that have waited enough.

        `speaking` are the ranks that may still say something.
        """
        if len(self._queues) == 1 and (everything or speaking <= self._queues.keys()):
            return self._take_all()
        said: list[Said] = []
        while (key := self._ready(speaking, now, everything=everything)) is not None:
            self._gather(key, said)
            said.append(self._release(key))
        return said

    def _take_all(self) -> list[Said]:
        """Of the only rank there is: nothing is to be compared."""
        ((rank, queue),) = self._queues.items()
        said = [Said((rank,), *key) for key, _ in queue.lines]
        self._queues.clear()
        self._heads.clear()
        self._last = {rank}
        return said

    def _ready(self, speaking: Set[int], now: float, *, everything: bool) -> _Key | None:
        """Of the lines that may be shown the oldest one; before it, one of the same ranks as the last one shown.

        So the lines of a block that only one rank says stay together.
        """
        found, best = None, (True, 0.0)
        for key, group in self._heads.items():
            if everything or now - group.since >= WAIT_S or speaking <= group.ranks:
                order = (group.ranks != self._last, group.since)
                if found is None or order < best:
                    found, best = key, order
        return found

    def _gather(self, key: _Key, said: list[Said]) -> None:
        """Bring the other ranks that have this line waiting up to it."""
        if len(self._queues) == len(self._heads[key].ranks):
            return
        for queue in self._queues.values():
            while queue.times[key] and queue.lines[0][0] != key:
                said.append(self._release(queue.lines[0][0]))

    def _release(self, key: _Key) -> Said:
        group = self._heads.pop(key)
        for rank in group.ranks:
            queue = self._queues[rank]
            queue.lines.popleft()
            queue.times[key] -= 1
            if not queue.times[key]:
                del queue.times[key]
        for rank in group.ranks:
            self._stand(rank)
        self._last = group.ranks
        return Said(tuple(sorted(group.ranks)), *key)

    def _stand(self, rank: int) -> None:
        """Put the rank's next line where the others' are."""
        queue = self._queues[rank]
        if not queue.lines:
            return
        key, at = queue.lines[0]
        group = self._heads.get(key)
        if group is None:
            self._heads[key] = _Group(ranks={rank}, since=at)
        else:
            group.ranks.add(rank)
            group.since = min(group.since, at)
