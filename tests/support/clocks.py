"""Clocks that tests move."""

from __future__ import annotations

from gpuhub.broker.clock import Clock


class StillClock(Clock):
    """Stands still but for what a test adds to `at`, seconds."""

    at = 1000.0

    def monotonic(self) -> float:
        """As in `Clock`."""
        return self.at
