"""The controller of deadlines: it ends leases and jobs whose time is over, and quarantines leases without proof.

`domain.deadlines` decides what is due, `state.conditions` which proofs are overdue.
"""

from __future__ import annotations

import asyncio
import logging

from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.state import mutations
from gpuhub.broker.state.conditions import UnprovenLeases, find_overdue_proofs
from gpuhub.broker.state.core import BrokerState
from gpuhub.domain import job_states
from gpuhub.domain.deadlines import find_due_leases, find_silent_jobs
from gpuhub.domain.models import JobRow

log = logging.getLogger(__name__)

#: Interval between two checks of all deadlines, seconds.
CHECK_PERIOD_S = 1.0


class DeadlineController:
    """Ends what is due, until cancelled."""

    def __init__(self, *, core: BrokerState, unproven: UnprovenLeases) -> None:
        """`unproven` is shared with the node controller, which finds the reasons why nodes give no proof."""
        self._core = core
        self._unproven = unproven
        self._started = core.clock.monotonic()

    async def run(self) -> None:
        while True:
            await run_step("deadlines", self.end_due)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def end_due(self) -> None:
        """End leases and jobs that are due, and quarantine leases whose proof is overdue."""
        core = self._core
        snapshot = core.ledger.snapshot
        now = core.clock.now()
        ends = {**find_due_leases(snapshot, core.cluster, now), **self._find_checkpointed(now)}
        if ends:
            log.info("leases end: %s", ends)
            await core.ledger.change(mutations.end_leases(ends))
        silent = find_silent_jobs(snapshot, core.cluster, core.heartbeats.seconds_since_renewal)
        if silent:
            log.info("jobs end, their notebooks stopped reporting: %s", silent)
            await core.ledger.change(mutations.change_jobs([(job_id, _stop_silent) for job_id in silent]))
        await self._quarantine()
        core.heartbeats.forget_ended(core.ledger.snapshot)

    def _find_checkpointed(self, now: float) -> dict[str, str]:
        """Return leases of preempted jobs whose workers have written their checkpoints, with the reason."""
        jobs = [self._core.ledger.snapshot.jobs.get(job) for job in self._core.ledger.index.find("preempting")]
        return {
            job.lease_id: job_states.PREEMPTED
            for job in jobs
            if job is not None and job_states.is_checkpoint_done(job, now)
        }

    async def _quarantine(self) -> None:
        core = self._core
        after = core.cluster.scheduling.quarantine_after
        # After a start of the broker, every node gets the same time to give its proofs.
        if core.clock.monotonic() - self._started < after:
            return
        overdue = find_overdue_proofs(
            core.ledger.snapshot, core.capacity.inventory, self._unproven.reasons, core.clock.now(), after
        )
        if overdue:
            await core.ledger.change(mutations.quarantine(overdue))


def _stop_silent(job: JobRow, now: float) -> JobRow:
    return job_states.stop(job, "the notebook stopped reporting", now)
