"""The controller of idle notebooks: it follows the use of their GPUs and records when their owners are warned.

It stops nothing: the hub's culler asks the broker, and stops what the broker says.
"""

from __future__ import annotations

import asyncio

from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common.units import format_span
from gpuhub.domain import idle_policy, notifications

#: Interval of the readings that are counted, seconds; the GPU agents' own.
CHECK_PERIOD_S = 2.0


class IdleController:
    """Updates the assessments of all notebooks, until cancelled."""

    def __init__(self, core: BrokerState) -> None:
        self._core = core

    async def run(self) -> None:
        while True:
            await run_step("idle notebooks", self.update)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def update(self) -> None:
        """Process the last readings, and record an event for each notebook whose owner is warned from now on."""
        core = self._core
        for lease, limits in core.idle.list_leases():
            warned = core.idle.update(lease, limits)
            if warned is not None:
                state = idle_policy.describe_state(warned.reason, warned.idle_s, limits)
                core.add_event(
                    "lease.idle",
                    f"{lease.owner}'s notebook on {', '.join(lease.nodes)}: {state}; it will be stopped in "
                    f"{format_span(warned.stops_in_s)} unless it is used or kept",
                    owner=lease.owner,
                    lease=lease.id,
                    notifications=[notifications.build_idle(lease, state, warned.stops_in_s, core.clock.now())],
                )
        core.idle.forget_ended()
