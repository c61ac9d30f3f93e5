"""What time alone brings about: time limits, silent notebooks, requests that nobody waits for any more. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuhub.broker import leases as rules
from gpuhub.broker.ledger import Snapshot
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose
from gpuhub.quantities import format_span
from gpuhub.settings import Cluster

#: A notebook's request without a spawner that asks for it this long: the hub is asked to start the server, seconds.
UNASKED_S = 20.0


def due_leases(snapshot: Snapshot, cluster: Cluster, now: float) -> Mapping[str, str]:
    """Leases that end now, with the reason. Running notebooks are not among them: the hub stops those first."""
    due: dict[str, str] = {}
    for lease in snapshot.leases.values():
        if lease.purpose is Purpose.NOTEBOOK and lease.state is LeaseState.WAITING:
            if now - lease.created_at > cluster.users.queue_limit:
                due[lease.id] = f"it waited longer than {format_span(cluster.users.queue_limit)}"
            elif lease.profile is not None and cluster.profile(lease.profile) is None:
                due[lease.id] = f"the profile {lease.profile!r} is no longer offered"
        elif rules.is_expired(lease, now) and _ends_by_itself(lease):
            due[lease.id] = "its time limit was reached"
    return due


def _ends_by_itself(lease: LeaseRow) -> bool:
    if lease.purpose is Purpose.JOB:
        return lease.state in {LeaseState.GRANTED, LeaseState.ACTIVE}
    return lease.state is LeaseState.GRANTED


def silent_jobs(snapshot: Snapshot, cluster: Cluster, unrenewed_s: Callable[[JobRow], float]) -> list[str]:
    """Jobs whose notebook stopped reporting."""
    live = {JobState.WAITING, JobState.STARTING, JobState.RUNNING}
    return [
        job.id for job in snapshot.jobs.values() if job.state in live and unrenewed_s(job) > cluster.jobs.renew_within
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
        and lease.state in {LeaseState.WAITING, LeaseState.GRANTED}
        and unasked_s(lease) > UNASKED_S
    ]
