"""The controller of costs: it has the broker write what was charged, often enough that a crash loses little."""

from __future__ import annotations

import asyncio

from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.state.broker_state import BrokerState

#: Interval between two writes of all meters, seconds.
WRITE_PERIOD_S = 30.0
#: Interval between two searches for leases and jobs that have ended, seconds.
CHECK_PERIOD_S = 1.0


class CostController:
    """Writes the costs, until cancelled."""

    def __init__(self, core: BrokerState) -> None:
        self._core = core
        self._written_at = core.clock.monotonic()

    async def run(self) -> None:
        while True:
            await run_step("costs", self.write)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def write(self) -> None:
        """Write if something has ended, or the last write is long ago."""
        now, costs = self._core.clock.monotonic(), self._core.costs
        if costs.has_ended or now - self._written_at >= WRITE_PERIOD_S:
            self._written_at = now
            await costs.flush()
