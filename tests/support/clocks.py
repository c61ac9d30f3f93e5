"""Clocks that tests set."""

from __future__ import annotations

from gpuhub.domain.clock import Clock


class StillClock(Clock):
    """Stands still except for the seconds that a test adds to `at`."""

    at = 1000.0

    def monotonic(self) -> float:
        """As in `Clock`."""
        return self.at


class AheadClock(Clock):
    """A clock with both times ahead by `ahead_s` seconds; `jump_s` is the change of the machine's clock."""

    ahead_s = 0.0
    jump_s = 0.0

    def monotonic(self) -> float:
        """As in `Clock`."""
        return super().monotonic() + self.ahead_s

    def wall(self) -> float:
        """As in `Clock`."""
        return super().wall() + self.ahead_s + self.jump_s
