"""Progress events of one start of a notebook."""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator
from typing import Any

#: Number of events that are kept; older ones are dropped, because a request may wait for days.
MAX_EVENTS = 30


class ProgressLog:
    """Events of one start, in JupyterHub's form, for any number of followers."""

    def __init__(self) -> None:
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._count = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, message: str, *, percent: int, html_text: str = "") -> None:
        """Add an event unless the last one is equal. `html_text` is trusted; without it, `message` is escaped."""
        event = {"progress": percent, "message": message, "html_message": html_text or html.escape(message)}
        if self._events and self._events[-1][1] == event:
            return
        self._events = [*self._events[-(MAX_EVENTS - 1) :], (self._count, event)]
        self._count += 1
        self._wake()

    def close(self) -> None:
        """End the log, and with it all followers."""
        self._is_closed = True
        self._wake()

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Yield every kept event, then each new one, until the log is closed."""
        seen = 0
        while True:
            changed = self._changed
            for number, event in self._events:
                if number >= seen:
                    seen = number + 1
                    yield dict(event)
            if self._is_closed and seen >= self._count:
                return
            if changed is self._changed:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
