"""What ranks that may be failing say of it is kept back from the live output. No I/O; time is passed in.

A launch that fails shows the first failing rank's traceback itself, once. The other ranks' tracebacks, and what C++ has
to say of a lost peer (NCCL's watchdog: twenty lines), are consequences. A traceback that a script only logs is shown as
soon as the script goes on, or after a few seconds, and so is C++'s error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_launch import tracebacks

HOLD_S = 5.0
#: What follows a traceback within this time belongs to it: the further lines of a message, say.
_TOGETHER_S = 0.1
#: A rank that says anything so long after a traceback does not end of it.
_ENDING_S = 0.5
_MOST_LINES = 2000


@dataclass
class _Held:
    lines: list[str] = field(default_factory=list)
    since: float = 0.0
    #: When the line that names the exception came; None before that.
    named_at: float | None = None


class Hold:
    """Every rank's stderr goes through it."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        #: A rank has failed: nothing held is shown any more, nor what C++ has to say of lost peers.
        self.is_failing = False

    def feed(self, rank: int, lines: list[str], now: float) -> list[str]:
        """Those of the lines, and of the ones held before, that are to be shown."""
        held = self._held.get(rank)
        if held is None and not self.is_failing and not any(map(_begins, lines)):
            return lines
        shown: list[str] = []
        for line in lines:
            held = self._held.get(rank)
            if held is None and _begins(line):
                named_at = None if tracebacks.HEADER in line else now
                self._held[rank] = _Held(lines=[line], since=now, named_at=named_at)
            elif held is not None and _belongs(held, tracebacks.plain(line), now):
                held.lines.append(line)
            elif held is not None and not self.is_failing:
                shown += [*self._held.pop(rank).lines, line]
            elif not (self.is_failing and _is_native(line)):
                shown.append(line)
        return shown

    def release(self, rank: int) -> list[str]:
        """Lines of a rank that did not fail."""
        held = self._held.pop(rank, None)
        return held.lines if held is not None else []

    def go_on(self, rank: int, now: float) -> list[str]:
        """A rank says something: what was held of it for a moment is no failure."""
        held = self._held.get(rank)
        if held is None or self.is_failing or held.named_at is None or now - held.named_at < _ENDING_S:
            return []
        return self.release(rank)

    def overdue(self, now: float, *, everything: bool = False) -> dict[int, list[str]]:
        """Lines by rank that have been held for long enough; none while a rank is failing."""
        if self.is_failing:
            return {}
        due = [rank for rank, held in self._held.items() if everything or now - held.since >= HOLD_S]
        return {rank: self._held.pop(rank).lines for rank in due}


def _begins(line: str) -> bool:
    return tracebacks.HEADER in line or tracebacks.NATIVE_ERROR.match(line) is not None


def _is_native(line: str) -> bool:
    return tracebacks.NATIVE_LOG.match(line) is not None or tracebacks.NATIVE_FRAME.match(line) is not None


def _belongs(held: _Held, line: str, now: float) -> bool:
    if len(held.lines) >= _MOST_LINES:
        return False
    if not line.strip() or line[0].isspace() or _is_native(line):
        return True
    if tracebacks.HEADER in line or line in tracebacks.CHAINED:
        held.named_at = None
        return True
    if held.named_at is None:
        held.named_at = now
        return True
    return now - held.named_at <= _TOGETHER_S
