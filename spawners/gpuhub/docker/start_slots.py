"""Limits how many containers start on a node at the same time, so that its daemon answers each call in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

#: Starts at once on a node: as many as the calls that create and mount at once.
STARTS_PER_NODE = 4
#: Maximum time that a start keeps its slot after its container runs, seconds. Its server loads then, which takes the
#: node's CPU; but a server that never answers must not keep others from starting.
LOADING_S = 5.0


class StartSlot:
    """One of a node's slots, until it is released."""

    def __init__(self, semaphore: asyncio.Semaphore) -> None:
        self._semaphore = semaphore
        self._is_held = True

    def release(self) -> None:
        """Give the slot to the next start; later calls do nothing."""
        if self._is_held:
            self._is_held = False
            self._semaphore.release()

    def release_later(self, delay_s: float = LOADING_S) -> None:
        """Release the slot after a delay, unless it is released before."""
        asyncio.get_running_loop().call_later(delay_s, self.release)


class StartSlots:
    """The slots of all nodes. Safe to use from one event loop."""

    def __init__(self, per_node: int = STARTS_PER_NODE) -> None:
        self._per_node = per_node
        self._semaphores: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def hold(self, node: str, report_waiting: Callable[[], None]) -> AsyncIterator[StartSlot]:
        """Wait for a slot of the node, in the order of the calls, and release it at the end.

        Args:
            report_waiting: Called once if there is no free slot.
        """
        semaphore = self._semaphores.setdefault(node, asyncio.Semaphore(self._per_node))
        if semaphore.locked():
            report_waiting()
        await semaphore.acquire()
        slot = StartSlot(semaphore)
        try:
            yield slot
        finally:
            slot.release()
