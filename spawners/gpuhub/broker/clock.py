"""Time, handed in so that tests can pass it.

Within a run of the broker `now` moves as the monotonic clock does: when somebody sets the machine's clock, nothing
becomes due. The core notices (`jump`), moves every stored moment of what is open by the same span, and then `follow`s
the new clock, so that a lease keeps the time it had left. What is stored are moments of the machine's clock. A jump
between two runs is noticed only where it puts something that is open into the future, which is then moved back; else
leases end earlier or later by as much as the clock was set while the broker was down. That may end a notebook early;
it never frees a GPU, since an end is no proof.
"""

from __future__ import annotations

import asyncio
import time

#: A clock that was set by less is left alone, seconds.
JUMP_S = 5.0


class Clock:
    """The machine's clocks."""

    def __init__(self) -> None:
        #: How often a jump was taken over: moments from before do not compare with moments from after.
        self.follows = 0
        self._offset = self.wall() - self.monotonic()

    def wall(self) -> float:
        """What the machine's clock says at present, seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that only grow: for spans within one run of the broker."""
        return time.monotonic()

    def now(self) -> float:
        """Seconds since 1970, for what is stored and shown; jumps by `follow` alone."""
        return self._offset + self.monotonic()

    def jump(self) -> float:
        """By how much the machine's clock was set since it was followed last, seconds; 0 for next to nothing."""
        jump = self.wall() - self.now()
        return jump if abs(jump) >= JUMP_S else 0.0

    def follow(self, seconds: float) -> None:
        """Take over a jump."""
        self._offset += seconds
        self.follows += 1


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, at most so long."""
    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
