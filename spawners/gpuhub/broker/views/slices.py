"""Work on many rows in slices, between which the event loop serves others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

#: Processor time after which others are served, seconds.
SLICE_S = 0.01
#: Pause before a caller's next turn, as a multiple of the last turn's duration.
PAUSE_FACTOR = 3.0
#: Maximum pause, seconds.
MAX_PAUSE_S = 1.0


async def collect(items: Iterable[T]) -> list[T]:
    """Return all items of a lazy iterable; others are served after each item that ends a slice."""
    collected: list[T] = []
    began = time.thread_time()
    for item in items:
        collected.append(item)
        if time.thread_time() - began >= SLICE_S:
            await asyncio.sleep(0)
            began = time.thread_time()
    return collected


class FairTurns:
    """Turns for work in slices, one at a time: many callers take no more of the event loop than one.

    Waiting callers have their turns in order, each with one at a time, however many works the caller asks for.
    """

    def __init__(self) -> None:
        #: Held by each caller during a turn, and during the pause that follows.
        self._of_callers: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._current = asyncio.Lock()

    @asynccontextmanager
    async def take(self, caller: str) -> AsyncIterator[None]:
        """Wait for a turn of the caller, which lasts for the duration of the context."""
        own, loop, pause_s = self._of_callers.setdefault(caller, asyncio.Lock()), asyncio.get_running_loop(), 0.0
        await own.acquire()
        try:
            async with self._current:
                began = loop.time()
                yield
                pause_s = min(MAX_PAUSE_S, PAUSE_FACTOR * (loop.time() - began))
        finally:
            loop.call_later(pause_s, own.release)
