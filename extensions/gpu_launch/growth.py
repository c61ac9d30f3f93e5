"""More nodes for an elastic launch that has less than it may have, while it runs."""

from __future__ import annotations

import threading
import time

from gpu_launch.containers import Containers
from gpu_launch.errors import GpuLaunchError
from gpu_launch.gang import Gang

_EVERY_S = 5.0  # seconds between looks, longer when nothing comes of it
_MOST_S = 60.0


class Growth:
    """Asks the broker in a thread of its own, as its answer may take long."""

    def __init__(self, gang: Containers) -> None:
        self._gang = gang
        self._thread: threading.Thread | None = None
        self._every_s = _EVERY_S
        self._due_at = time.monotonic() + _EVERY_S

    def look(self) -> None:
        """Ask, where it is time and nodes are missing."""
        gang, now = self._gang, time.monotonic()
        if not isinstance(gang, Gang) or now < self._due_at or (self._thread is not None and self._thread.is_alive()):
            return
        roster = gang.roster()
        if roster is None or roster.nnodes >= gang.plan.nnodes:
            return
        self._due_at = now + self._every_s
        self._thread = threading.Thread(target=self._ask, args=(gang,), name="gpu_launch growth", daemon=True)
        self._thread.start()

    def _ask(self, gang: Gang) -> None:
        try:
            has_grown = gang.grow()
        except GpuLaunchError:
            # Nothing is lost: it goes on as it is.
            has_grown = False
        self._every_s = _EVERY_S if has_grown else min(_MOST_S, 1.5 * self._every_s)
