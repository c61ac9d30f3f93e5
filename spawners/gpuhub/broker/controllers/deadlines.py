"""The controller of deadlines: it ends leases and jobs whose time is over, and quarantines leases without proof.

An end proves nothing: what ends here keeps its GPUs blocked until its nodes prove that nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose
from gpuhub.common.units import format_span
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import job_states, lease_states, owner_limits, reconcile
from gpuhub.domain.models import JobRow, LeaseRow, LedgerSnapshot
from gpuhub.nodes.inventory import Inventory

log = logging.getLogger(__name__)

#: Interval between two checks of all deadlines, seconds.
CHECK_PERIOD_S = 1.0
#: States of a job whose notebook renews it.
_RENEWED = frozenset({JobState.WAITING, JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING})


class UnprovenLeases:
    """Leases for which a node's report proves nothing."""

    def __init__(self) -> None:
        #: The reason for people, by lease and node.
        self.reasons: dict[tuple[str, str], str] = {}

    def replace_node(self, node: str, reasons: Mapping[str, str]) -> list[str]:
        """Replace a node's reasons, by lease; return the leases that are new."""
        new = [lease for lease in reasons if (lease, node) not in self.reasons]
        kept = {key: why for key, why in self.reasons.items() if key[1] != node}
        self.reasons = kept | {(lease, node): why for lease, why in reasons.items()}
        return new


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
        return {
            job.lease_id: job_states.explain_preemption(job)
            for job in self._core.ledger.find_jobs("preempting")
            if job_states.is_checkpoint_done(job, now)
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


def find_due_leases(snapshot: LedgerSnapshot, cluster: ClusterSettings, now: float) -> Mapping[str, str]:
    """Return the leases that end now, with the reason.

    The hub stops a running notebook first; its lease is due if the hub did not stop it within its grace.
    """
    due: dict[str, str] = {}
    for lease in snapshot.leases.values():
        reason = (
            _explain_withdrawal(lease, cluster, now)
            if lease.state is LeaseState.REQUESTED
            else _explain_expiry(lease, now)
        )
        if reason is not None:
            due[lease.id] = reason
    return due


def _explain_withdrawal(lease: LeaseRow, cluster: ClusterSettings, now: float) -> str | None:
    if lease.purpose is not Purpose.NOTEBOOK:
        return None
    if now - lease.created_at > cluster.users.queue_limit:
        return f"it waited longer than {format_span(cluster.users.queue_limit)}"
    if lease.profile is None:
        return None
    profile = cluster.profile(lease.profile)
    if profile is None:
        return f"the profile {lease.profile!r} is no longer offered"
    return profile.explain_refusal(lease.owner, owner_limits.list_groups(cluster, lease.owner, lease.groups))


def _explain_expiry(lease: LeaseRow, now: float) -> str | None:
    if lease.expires_at is None or lease.state not in lease_states.LIVE:
        return None
    is_running_notebook = lease.purpose is Purpose.NOTEBOOK and lease.state is LeaseState.ACTIVE
    grace_s = reconcile.HUB_GRACE_S if is_running_notebook else 0.0
    return "its time limit was reached" if lease_states.is_expired(lease, now - grace_s) else None


def find_silent_jobs(
    snapshot: LedgerSnapshot, cluster: ClusterSettings, seconds_since_renewal: Callable[[JobRow], float]
) -> list[str]:
    """Return the jobs whose notebook has stopped renewing them; nothing renews a batch job or a detached job."""
    return [
        job.id
        for job in snapshot.jobs.values()
        if job.state in _RENEWED
        and seconds_since_renewal(job) > cluster.jobs.renew_within
        and not (job.detached or snapshot.leases[job.lease_id].resources.batch)
    ]


def find_overdue_proofs(
    snapshot: LedgerSnapshot, inventory: Inventory, unproven: Mapping[tuple[str, str], str], now: float, limit_s: float
) -> Mapping[str, str]:
    """Return the releasing leases that lack proof for longer than `limit_s`, with the reason.

    Args:
        unproven: Why a node's report proves nothing, by lease and node.
    """
    overdue: dict[str, str] = {}
    for lease in snapshot.leases.values():
        if lease.state is LeaseState.RELEASING and now - lease.since >= limit_s:
            reasons = [
                _explain_missing_proof(inventory, lease.id, node, unproven)
                for node in lease_states.list_unproven_nodes(lease)
            ]
            overdue[lease.id] = "; ".join(reasons)
    return overdue


def _explain_missing_proof(inventory: Inventory, lease: str, node: str, unproven: Mapping[tuple[str, str], str]) -> str:
    record = inventory.nodes.get(node)
    if record is not None and not record.is_up:
        return f"node {node} does not answer, so what ran there may still run"
    return unproven.get((lease, node)) or f"its containers on {node} are not gone yet"
