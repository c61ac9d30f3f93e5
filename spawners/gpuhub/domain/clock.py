"""The broker's clock, passed in so that tests can replace it.

Within a run of the broker `now` moves with the monotonic clock: a change of the machine's clock makes nothing due. The
broker's state measures the jump (`measure_jump`), moves every stored time of open leases and jobs by it, and then
applies it to the clock (`apply_jump`), so that a lease keeps the time it had left. Stored times are those of the
machine's clock. A jump between two runs is noticed only if it puts something open into the future, which is then moved
back; otherwise leases end earlier or later by the jump. That may end a notebook early; it never frees a GPU, since an
end is no proof.
"""

from __future__ import annotations

import asyncio
import time

#: Minimum jump of the machine's clock that counts, seconds.
MIN_JUMP_S = 5.0


class Clock:
    """The machine's clocks."""

    def __init__(self) -> None:
        #: Number of jumps applied; times before and after a jump cannot be compared.
        self.jump_count = 0
        self._offset = self.wall() - self.monotonic()

    def wall(self) -> float:
        """Return the time of the machine's clock, seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that only grow, for spans within one run of the broker."""
        return time.monotonic()

    def now(self) -> float:
        """Return seconds since 1970, for stored and displayed times; changes by jumps only through `apply_jump`."""
        return self._offset + self.monotonic()

    def measure_jump(self) -> float:
        """Return how far the machine's clock was set since the last applied jump, seconds; 0 for less than
        `MIN_JUMP_S`.
        """
        jump = self.wall() - self.now()
        return jump if abs(jump) >= MIN_JUMP_S else 0.0

    def apply_jump(self, seconds: float) -> None:
        self._offset += seconds
        self.jump_count += 1


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Return when the event is set or after the timeout."""
    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
