"""Ends that time brings about: time limits, jobs without renewal, requests without a spawner.

An end proves nothing: what ends here keeps its GPUs blocked until its nodes prove that nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose
from gpuhub.common.units import format_span
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import lease_states, reconcile
from gpuhub.domain.models import JobRow, LeaseRow, LedgerSnapshot

#: When no spawner has polled a notebook's request for this time, the hub is asked to start the server, seconds.
POLL_TIMEOUT_S = 20.0

_REPORTING = frozenset({JobState.WAITING, JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING})


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
    if lease.profile is not None and cluster.profile(lease.profile) is None:
        return f"the profile {lease.profile!r} is no longer offered"
    return None


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
        if job.state in _REPORTING
        and seconds_since_renewal(job) > cluster.jobs.renew_within
        and not (job.detached or snapshot.leases[job.lease_id].resources.batch)
    ]


def find_expired_notebooks(snapshot: LedgerSnapshot, now: float) -> list[LeaseRow]:
    """Return the running notebooks whose time limit is over."""
    return [
        lease
        for lease in snapshot.leases.values()
        if lease.purpose is Purpose.NOTEBOOK
        and lease.state is LeaseState.ACTIVE
        and lease_states.is_expired(lease, now)
    ]


def find_orphaned_requests(snapshot: LedgerSnapshot, seconds_since_poll: Callable[[LeaseRow], float]) -> list[LeaseRow]:
    """Return the requests of notebooks that no spawner polls, since the hub has restarted."""
    return [
        lease
        for lease in snapshot.leases.values()
        if lease.purpose is Purpose.NOTEBOOK
        and lease.state in {LeaseState.REQUESTED, LeaseState.GRANTED}
        and seconds_since_poll(lease) > POLL_TIMEOUT_S
    ]
