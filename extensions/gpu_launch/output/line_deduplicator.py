"""Merges the same line of several ranks into one, and keeps the order of each rank's lines."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

#: Maximum time that a line waits for equal lines of other ranks, seconds. With the notebook's poll period of 50 ms a
#: line is shown within 0.15 s.
MAX_WAIT_S = 0.1
_Key = tuple[str, str]


@dataclass(frozen=True)
class OutputLine:
    """A line, and the numbers of the ranks that wrote it."""

    ranks: tuple[int, ...]
    stream: str
    line: str


@dataclass
class _RankQueue:
    """A rank's pending lines with their arrival times, and a count of each."""

    lines: deque[tuple[_Key, float]] = field(default_factory=deque)
    times: Counter[_Key] = field(default_factory=Counter)


@dataclass
class _LineGroup:
    """The ranks whose next line is the same, and the arrival of the first one."""

    ranks: set[int]
    since: float


class LineDeduplicator:
    """Takes ranks' lines and returns equal ones of several ranks once.

    A line waits a moment for the same line of other ranks. Lines of one rank never change their order.
    """

    def __init__(self) -> None:
        self._queues: dict[int, _RankQueue] = {}
        self._heads: dict[_Key, _LineGroup] = {}
        self._last: set[int] = set()

    def feed(self, rank: int, stream: str, lines: Iterable[str], now: float) -> None:
        """Add complete lines of one rank, in their order."""
        queue = self._queues.setdefault(rank, _RankQueue())
        is_idle = not queue.lines
        for line in lines:
            key = (stream, line)
            queue.lines.append((key, now))
            queue.times[key] += 1
        if is_idle:
            self._enqueue_head(rank)

    def drain(self, active_ranks: Set[int], now: float, *, everything: bool = False) -> list[OutputLine]:
        """Return the lines to show now: those of all `active_ranks`, and those that have waited long enough.

        Args:
            active_ranks: Ranks that may still write lines.
            now: Time in seconds.
            everything: Return all lines.
        """
        if len(self._queues) == 1 and (everything or active_ranks <= self._queues.keys()):
            return self._drain_only_rank()
        lines: list[OutputLine] = []
        while (key := self._find_ready(active_ranks, now, everything=everything)) is not None:
            self._align_ranks(key, lines)
            lines.append(self._release(key))
        return lines

    def _drain_only_rank(self) -> list[OutputLine]:
        """Return all lines of the only rank: there are no others to wait for."""
        ((rank, queue),) = self._queues.items()
        lines = [OutputLine((rank,), *key) for key, _ in queue.lines]
        self._queues.clear()
        self._heads.clear()
        self._last = {rank}
        return lines

    def _find_ready(self, active_ranks: Set[int], now: float, *, everything: bool) -> _Key | None:
        """Return the line to show next: one of the same ranks as the last line, else the oldest.

        So the lines of a block that only one rank writes stay together.
        """
        best_key, best = None, (True, 0.0)
        for key, group in self._heads.items():
            if everything or now - group.since >= MAX_WAIT_S or active_ranks <= group.ranks:
                order = (group.ranks != self._last, group.since)
                if best_key is None or order < best:
                    best_key, best = key, order
        return best_key

    def _align_ranks(self, key: _Key, lines: list[OutputLine]) -> None:
        """Release lines of other ranks that come before this line in their queues."""
        if len(self._queues) == len(self._heads[key].ranks):
            return
        for queue in self._queues.values():
            while queue.times[key] and queue.lines[0][0] != key:
                lines.append(self._release(queue.lines[0][0]))

    def _release(self, key: _Key) -> OutputLine:
        group = self._heads.pop(key)
        for rank in group.ranks:
            queue = self._queues[rank]
            queue.lines.popleft()
            queue.times[key] -= 1
            if not queue.times[key]:
                del queue.times[key]
        for rank in group.ranks:
            self._enqueue_head(rank)
        self._last = group.ranks
        return OutputLine(tuple(sorted(group.ranks)), *key)

    def _enqueue_head(self, rank: int) -> None:
        """Add the rank's next line to the group of that line."""
        queue = self._queues[rank]
        if not queue.lines:
            return
        key, arrived_at = queue.lines[0]
        group = self._heads.get(key)
        if group is None:
            self._heads[key] = _LineGroup(ranks={rank}, since=arrived_at)
        else:
            group.ranks.add(rank)
            group.since = min(group.since, arrived_at)
