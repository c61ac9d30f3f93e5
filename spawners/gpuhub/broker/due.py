"""What time alone brings about: time limits, silent notebooks, requests that nobody waits for any more. Pure.

An end is no proof: what ends here keeps its GPUs blocked until its nodes prove that nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuhub.broker import leases as rules
from gpuhub.broker import reconcile
from gpuhub.broker.ledger import Snapshot
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose
from gpuhub.quantities import format_span
from gpuhub.settings import Cluster

#: A notebook's request without a spawner that asks for it this long: the hub is asked to start the server, seconds.
UNASKED_S = 20.0

_REPORTING = frozenset({JobState.WAITING, JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING})


def due_leases(snapshot: Snapshot, cluster: Cluster, now: float) -> Mapping[str, str]:
    """Leases that end now, with the reason. A running notebook is stopped by the hub first, and ends here when the hub
    had its time and did not.
    """
    due: dict[str, str] = {}
    for lease in snapshot.leases.values():
        reason = _why_unwanted(lease, cluster, now) if lease.state is LeaseState.REQUESTED else _why_over(lease, now)
        if reason is not None:
            due[lease.id] = reason
    return due


def _why_unwanted(lease: LeaseRow, cluster: Cluster, now: float) -> str | None:
    if lease.purpose is not Purpose.NOTEBOOK:
        return None
    if now - lease.created_at > cluster.users.queue_limit:
        return f"it waited longer than {format_span(cluster.users.queue_limit)}"
    if lease.profile is not None and cluster.profile(lease.profile) is None:
        return f"the profile {lease.profile!r} is no longer offered"
    return None


def _why_over(lease: LeaseRow, now: float) -> str | None:
    if lease.expires_at is None or lease.state not in rules.LIVE:
        return None
    is_running_notebook = lease.purpose is Purpose.NOTEBOOK and lease.state is LeaseState.ACTIVE
    grace_s = reconcile.HUB_GRACE_S if is_running_notebook else 0.0
    return "its time limit was reached" if rules.is_expired(lease, now - grace_s) else None


def silent_jobs(snapshot: Snapshot, cluster: Cluster, unrenewed_s: Callable[[JobRow], float]) -> list[str]:
    """Jobs whose notebook stopped reporting; a batch job, or a detached one, has nobody who would report."""
    return [
        job.id
        for job in snapshot.jobs.values()
        if job.state in _REPORTING
        and unrenewed_s(job) > cluster.jobs.renew_within
        and not (job.detached or snapshot.leases[job.lease_id].ask.batch)
    ]


def expired_notebooks(snapshot: Snapshot, now: float) -> list[LeaseRow]:
    """Running notebooks whose time is over."""
    return [
        lease
        for lease in snapshot.leases.values()
        if lease.purpose is Purpose.NOTEBOOK and lease.state is LeaseState.ACTIVE and rules.is_expired(lease, now)
    ]


def orphaned_requests(snapshot: Snapshot, unasked_s: Callable[[LeaseRow], float]) -> list[LeaseRow]:
    """Notebooks' requests for which no spawner asks: the hub restarted."""
    return [
        lease
        for lease in snapshot.leases.values()
        if lease.purpose is Purpose.NOTEBOOK
        and lease.state in {LeaseState.REQUESTED, LeaseState.GRANTED}
        and unasked_s(lease) > UNASKED_S
    ]
