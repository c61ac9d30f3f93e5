"""Whether ranks that stand idle keep their GPUs. Pure: time is passed in."""

from __future__ import annotations

from enum import Enum, auto

#: Between the word and the end, seconds.
NOTICE_S = 60.0
#: Between questions whether anybody waits, seconds.
_ASK_S = 5.0


class Idle(Enum):
    """What to do with ranks that run no cell."""

    STAY = auto()
    WARN = auto()
    END = auto()


class Patience:
    """What ranks hold in memory is precious: they end only when others wait for GPUs, after `keep_s` without a cell."""

    def __init__(self, keep_s: float, now: float) -> None:
        self._keep_s, self._since = keep_s, now
        self._asked_at = float("-inf")
        self._warned_at: float | None = None

    def touch(self, now: float) -> None:
        """A cell has run."""
        self._since, self._warned_at = now, None

    def idle_s(self, now: float) -> float:
        """Seconds since the last cell."""
        return now - self._since

    def is_to_ask(self, now: float) -> bool:
        """Whether it matters now if others wait; not true again for some seconds."""
        if self.idle_s(now) < self._keep_s - NOTICE_S or now - self._asked_at < _ASK_S:
            return False
        self._asked_at = now
        return True

    def decide(self, now: float, *, is_wanted: bool) -> Idle:
        """What to do, now that it is known whether others wait for GPUs. Nobody is surprised: WARN comes first."""
        if not is_wanted or self.idle_s(now) < self._keep_s - NOTICE_S:
            return Idle.STAY
        if self._warned_at is None:
            self._warned_at = now
            return Idle.WARN
        is_over = now - self._warned_at >= NOTICE_S and self.idle_s(now) >= self._keep_s
        return Idle.END if is_over else Idle.STAY
