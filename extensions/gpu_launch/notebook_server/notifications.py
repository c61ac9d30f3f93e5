"""The user's notifications in JupyterLab: the notebook's server asks the broker for new ones and keeps the last."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from jupyter_server.base.handlers import APIHandler
from tornado import web

from gpu_launch.broker.client import BrokerClient
from gpu_launch.errors import BrokerError

#: Interval between two requests for notifications, seconds.
PERIOD_S = 10.0
#: Interval after a failure, seconds.
RETRY_S = 60.0
#: Notifications that are kept for pages that open later.
MAX_KEPT = 20
#: JupyterLab shows idle notebooks with a countdown, and tests are for other destinations.
_HIDDEN = frozenset({"idle", "test"})


class NotificationFeed:
    """The newest notifications since the notebook started."""

    def __init__(self, server: Any, broker: BrokerClient) -> None:
        """`server` is Jupyter Server's application."""
        self._server = server
        self._broker = broker
        self._kept: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT)
        #: Number of the last notification that was seen; None until the first answer.
        self._last: int | None = None

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            pause_s = await self.update()
            await asyncio.sleep(pause_s)

    async def update(self) -> float:
        """Ask once; return the seconds until the next question."""
        ask = partial(self._broker.list_notifications, after=self._last)
        try:
            new = await asyncio.get_running_loop().run_in_executor(None, ask)
        except BrokerError as error:
            # An older broker has no notifications.
            self._server.log.info("There are no notifications from the broker: %s", error)
            return RETRY_S
        self.add(new)
        return PERIOD_S

    def add(self, new: Iterable[dict[str, Any]]) -> None:
        """Process an answer; the first one is about the time before this notebook."""
        new = list(new)
        if self._last is not None:
            self._kept.extend(row for row in new if row["kind"] not in _HIDDEN)
        self._last = max([row["seq"] for row in new], default=self._last or 0)

    def list_after(self, seq: int) -> list[dict[str, Any]]:
        """Return what is kept after a number."""
        return [row for row in self._kept if row["seq"] > seq]


class NotificationsHandler(APIHandler):  # type: ignore[misc] # Jupyter Server is not installed where types are checked
    """GET `?after=SEQ`: `{"notifications": [NotificationView, …]}`."""

    def initialize(self, feed: NotificationFeed) -> None:
        self.feed = feed

    @web.authenticated
    def get(self) -> None:
        """Send what is new since a number."""
        after = self.get_query_argument("after", "0")
        self.finish({"notifications": self.feed.list_after(int(after) if after.isdecimal() else 0)})
