"""The cluster's state for all pages of the hub: asked once for many viewers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gpuhub.broker.schemas import ClusterView
from gpuhub.errors import Unavailable

#: So old may what a page shows be, seconds: less than between two of its refreshes.
FRESH_S = 1.5
#: A page that refreshes itself is better told that the broker is silent than kept waiting, seconds.
PATIENCE_S = 2.5


class Glance:
    """The last answer, and the one that is on its way."""

    def __init__(self, ask: Callable[[], Awaitable[ClusterView]]) -> None:
        self._ask = ask
        self._view: ClusterView | None = None
        self._at = 0.0
        self._asking: asyncio.Task[ClusterView] | None = None

    async def look(self) -> ClusterView | None:
        """Everything as it was a moment ago; None while the broker is silent."""
        loop = asyncio.get_running_loop()
        if self._view is not None and loop.time() - self._at < FRESH_S:
            return self._view
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        try:
            async with asyncio.timeout(PATIENCE_S):
                self._view = await asyncio.shield(self._asking)
        except (Unavailable, TimeoutError):
            self._view = None
        self._at = loop.time()
        return self._view
