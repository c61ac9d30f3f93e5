"""Decides whether idle ranks keep their GPUs."""

from __future__ import annotations

from enum import Enum, auto

#: Seconds between the warning and the end.
NOTICE_S = 60.0
#: Seconds between queries whether others wait for GPUs.
_ASK_PERIOD_S = 5.0


class IdleAction(Enum):
    """The action for ranks that run no cell."""

    KEEP = auto()
    WARN = auto()
    END = auto()


class IdlePolicy:
    """Keeps idle ranks, which hold the user's data, until others wait for GPUs and no cell has run for `keep_s`."""

    def __init__(self, keep_s: float, now: float) -> None:
        self._keep_s, self._since = keep_s, now
        self._asked_at = float("-inf")
        self._warned_at: float | None = None

    def record_cell(self, now: float) -> None:
        """Record that a cell has run."""
        self._since, self._warned_at = now, None

    def seconds_idle(self, now: float) -> float:
        """Return the seconds since the last cell."""
        return now - self._since

    def should_ask(self, now: float) -> bool:
        """Return whether it matters now if others wait; then False for some seconds."""
        if self.seconds_idle(now) < self._keep_s - NOTICE_S or now - self._asked_at < _ASK_PERIOD_S:
            return False
        self._asked_at = now
        return True

    def decide(self, now: float, *, others_wait: bool) -> IdleAction:
        """Return the action, given whether others wait for GPUs. END only follows a WARN."""
        if not others_wait or self.seconds_idle(now) < self._keep_s - NOTICE_S:
            return IdleAction.KEEP
        if self._warned_at is None:
            self._warned_at = now
            return IdleAction.WARN
        is_over = now - self._warned_at >= NOTICE_S and self.seconds_idle(now) >= self._keep_s
        return IdleAction.END if is_over else IdleAction.KEEP
