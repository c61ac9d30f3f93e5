"""More nodes for a running elastic launch that has fewer than it may have."""

from __future__ import annotations

import threading
import time

from gpu_launch.errors import GpuLaunchError
from gpu_launch.launch.worker_group import BrokerWorkerGroup, WorkerGroup

_EVERY_S = 5.0  # seconds between requests, longer after one that brought nothing
_MOST_S = 60.0


class ScaleUp:
    """Requests for the missing nodes, in a thread, because the broker's answer may take long."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._thread: threading.Thread | None = None
        self._every_s = _EVERY_S
        self._due_at = time.monotonic() + _EVERY_S

    def poll(self) -> None:
        """Request nodes when it is time and some are missing."""
        group, now = self._group, time.monotonic()
        if (
            not isinstance(group, BrokerWorkerGroup)
            or now < self._due_at
            or (self._thread is not None and self._thread.is_alive())
        ):
            return
        membership = group.membership()
        if membership is None or membership.nnodes >= group.plan.nnodes:
            return
        self._due_at = now + self._every_s
        self._thread = threading.Thread(target=self._request, args=(group,), name="gpu_launch scale-up", daemon=True)
        self._thread.start()

    def _request(self, group: BrokerWorkerGroup) -> None:
        try:
            has_grown = group.scale_up()
        except GpuLaunchError:
            # The launch continues with the nodes that it has.
            has_grown = False
        self._every_s = _EVERY_S if has_grown else min(_MOST_S, 1.5 * self._every_s)
