"""Views of the broker's current state: leases, jobs, the cluster, usage and events, as clients see them."""

from __future__ import annotations

import asyncio

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker import audit
from gpuhub.broker.admission import validate
from gpuhub.broker.operations import cluster_view, serializers
from gpuhub.broker.operations.cluster_view import ClusterViewInput
from gpuhub.broker.state.core import BrokerState
from gpuhub.broker_api.schemas import (
    ClusterView,
    EventView,
    JobView,
    LeaseView,
    NodeView,
    UsageView,
)
from gpuhub.common.errors import NotAllowed, NotFound
from gpuhub.domain import reservations as reservation_rules
from gpuhub.domain.identity import Identity
from gpuhub.domain.models import EventRow, JobRow, LeaseRow
from gpuhub.scheduler.interface import OwnerUsage


def view_lease(core: BrokerState, lease: LeaseRow) -> LeaseView:
    """Return a lease, as shown to its owner."""
    return serializers.build_lease(
        lease, core.queue_positions.find_version(lease), core.queue_positions.refresh().get(lease.id)
    )


async def view_job(core: BrokerState, job: JobRow) -> JobView:
    """Return a job, as shown to its owner.

    Raises:
        NotFound: its lease does not exist.
    """
    lease = core.ledger.snapshot.leases.get(job.lease_id)
    if lease is None or not job.is_open:
        lease = await asyncio.to_thread(core.store.get_lease, job.lease_id)
    if lease is None:
        raise NotFound(f"there is no job {job.id!r}")
    return _build_job(core, job, lease)


async def view_ended_jobs(core: BrokerState, caller: Identity, limit: int) -> list[JobView]:
    """Return jobs that ended within `[jobs] remember`, newest first: the caller's own, or all for an administrator."""
    since = core.clock.now() - core.cluster.jobs.remember
    owner = None if caller.sees_all else caller.name
    rows = await asyncio.to_thread(core.store.list_ended_jobs, owner, since, limit)
    return [_build_job(core, job, lease) for job, lease in rows]


def _build_job(core: BrokerState, job: JobRow, lease: LeaseRow) -> JobView:
    version = max(job.version, core.queue_positions.find_version(lease))
    place = core.queue_positions.refresh().get(lease.id)
    return serializers.build_job(job, lease, version, place, float(core.cluster.jobs.renew_within))


def view_cluster(core: BrokerState, backend: SchedulingBackend, caller: Identity | None) -> ClusterView:
    """Return the whole cluster, as shown to the caller, or to all users where that is None."""
    return cluster_view.build_cluster(_collect_inputs(core, backend, caller))


def view_node(core: BrokerState, backend: SchedulingBackend, node: str) -> NodeView:
    """Return one node, as shown to all users."""
    return cluster_view.build_one_node(_collect_inputs(core, backend, None), node)


def _collect_inputs(core: BrokerState, backend: SchedulingBackend, caller: Identity | None) -> ClusterViewInput:
    return ClusterViewInput(
        cluster=core.cluster,
        leases=core.ledger.snapshot.leases,
        places=core.queue_positions.refresh(),
        inventory=core.capacity.inventory,
        cordons=core.capacity.cordons,
        lease_statuses=core.capacity.lease_flags.by_uuid,
        job_names={job.lease_id: job.name for job in core.ledger.snapshot.jobs.values() if job.name},
        reservations=[reservation_rules.build_reservation_view(row) for row in core.capacity.current_reservations],
        engine=core.scheduler,
        external=backend.external_usage(core.clock.now()),
        capabilities=backend.capabilities,
        build_partitions=backend.build_partitions,
        now=core.clock.now(),
        monotonic=core.clock.monotonic(),
        owner="" if caller is None or not caller.is_user else caller.name,
        groups=frozenset() if caller is None else caller.groups,
    )


def view_usage(core: BrokerState, caller: Identity, owner: str | None) -> list[UsageView]:
    """Return usage and limits of `owner`, or, for an administrator without `owner`, of all owners.

    Raises:
        NotAllowed: the owner is another user, and the caller is not an administrator.
    """
    if owner is not None:
        audit.note_owner(owner)
    if not caller.sees_all and owner not in {None, caller.name}:
        raise NotAllowed(f"{caller.name} may not see what {owner} uses")
    usage = core.scheduler.report_usage(core.clock.now())
    if owner is not None or not caller.sees_all:
        names = [owner or caller.name]
    else:
        names = sorted(usage.keys() | {lease.owner for lease in core.ledger.snapshot.leases.values()})
    index, jobs = core.ledger.index, core.ledger.snapshot.jobs
    return [
        serializers.build_usage(
            name,
            usage.get(name, OwnerUsage()),
            validate.count_requests(index, jobs, "waiting of", name),
            core.scheduler_sync.get_quota(name).per_user,
        )
        for name in names
    ]


def view_event(row: EventRow) -> EventView:
    """Return the wire model of an event."""
    return EventView(
        seq=row.seq,
        at=serializers.to_datetime(row.at),
        kind=row.kind,
        text=row.text,
        owner=row.owner,
        lease=row.lease,
        job=row.job,
        node=row.node,
    )
