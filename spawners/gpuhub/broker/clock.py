"""Time, handed in so that tests can pass it."""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks."""

    def now(self) -> float:
        """Seconds since 1970: for what is stored and shown."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that only grow: for spans within one run of the broker."""
        return time.monotonic()
