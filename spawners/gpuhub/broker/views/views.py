"""Views of the broker's current state: leases, jobs, the cluster, usage and events, as clients see them.

The view of the cluster is expensive to build, and in a large cluster many clients request it all the time. There, a
cached view is served for a few times as long as it took to build; in a small cluster every change is visible at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker import audit
from gpuhub.broker.admission import limits
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import cluster_view, serializers
from gpuhub.broker.views.cluster_view import MAX_STARTS_SHOWN
from gpuhub.broker.views.gpu_summary import ClusterViewInput
from gpuhub.broker_api.schemas import (
    ClusterView,
    EventView,
    IdleView,
    JobView,
    LeaseView,
    NodeView,
    SuspensionView,
    UsageView,
)
from gpuhub.common.errors import NotAllowed, NotFound
from gpuhub.domain import idle_policy, lease_states, owner_limits, suspension
from gpuhub.domain import reservations as reservation_rules
from gpuhub.domain.costs import CostRecord
from gpuhub.domain.models import EventRow, Identity, JobRow, LeaseRow
from gpuhub.nodes import gpu_health
from gpuhub.scheduler.interface import OwnerUsage, Quota

#: Maximum age of a view, since times and readings in it change, seconds.
MAX_VIEW_AGE_S = 1.0
#: A view that is built faster than this is rebuilt at every change, seconds.
FAST_BUILD_S = 0.01
#: Maximum age of another view after a change, as a multiple of the time that it took to build.
AGE_PER_BUILD_TIME = 5
#: Maximum number of views that are kept.
MAX_VIEWS = 64


def view_lease(core: BrokerState, lease: LeaseRow) -> LeaseView:
    """Return a lease, as shown to its owner."""
    version, place = core.queue_positions.find_version(lease), core.queue_positions.refresh().get(lease.id)
    return serializers.build_lease(
        lease,
        version,
        place,
        idle=view_idle(core, lease),
        gpu_problems=list_gpu_problems(core, lease),
        suspension=view_suspension(core, lease),
        may_suspend=core.idle.explain_unsuspendable(lease) is None,
    )


def view_suspension(core: BrokerState, lease: LeaseRow) -> SuspensionView | None:
    """Return the suspension of a notebook or job as its owner sees it; None if it has none."""
    if lease.suspension is None or lease.state not in lease_states.LIVE:
        return None
    place = core.queue_positions.refresh().get(lease.id)
    position = None if place is None else place.position
    text = suspension.describe(lease, lease.suspension, core.clock.now(), position)
    return SuspensionView(
        state=lease.suspension.state,
        text=text,
        since=serializers.to_datetime(lease.suspension.since),
        moved_mib=lease.suspension.moved_mib,
    )


def list_gpu_problems(core: BrokerState, lease: LeaseRow) -> tuple[str, ...]:
    """Return the defects and slowdowns of a live lease's GPUs, for its owner."""
    if lease.state not in lease_states.LIVE:
        return ()
    return gpu_health.list_lease_problems(core.capacity.inventory.nodes, {gpu.uuid: gpu.node for gpu in lease.held})


def view_idle(core: BrokerState, lease: LeaseRow) -> IdleView | None:
    """Return an idle notebook as its owner sees it; None for a lease that is not idle, or is not stopped for that."""
    limits = core.idle.find_limits(lease)
    assessment = None if limits is None else core.idle.assess(lease, limits)
    if limits is None or assessment is None:
        return None
    now = core.clock.now()
    since = now - assessment.idle_s
    is_kept = lease.kept_until is not None and lease.kept_until > now
    return IdleView(
        reason=assessment.reason,
        text=idle_policy.describe_state(assessment.reason, assessment.idle_s, limits),
        since=serializers.to_datetime(since),
        stops_at=serializers.to_datetime(now + assessment.stops_in_s),
        is_warned=assessment.is_warned,
        kept_until=serializers.to_optional_datetime(lease.kept_until) if is_kept else None,
        keep_s=idle_policy.find_keep_s(lease, limits, since, now),
    )


async def view_job(core: BrokerState, job: JobRow) -> JobView:
    """Return a job, as shown to its owner.

    Raises:
        NotFound: its lease does not exist.
    """
    [view] = await view_jobs(core, [(job, await read_job_lease(core, job))])
    return view


async def view_jobs(core: BrokerState, rows: Sequence[tuple[JobRow, LeaseRow]]) -> Iterator[JobView]:
    """Return jobs, each of which is built when it is taken from the iterator."""
    costs = await core.costs.find([job.id for job, _ in rows if not job.is_open])
    return (build_job(core, job, lease, costs.get(job.id)) for job, lease in rows)


async def read_job_lease(core: BrokerState, job: JobRow) -> LeaseRow:
    """Return a job's lease from the ledger or the store.

    Raises:
        NotFound: its lease does not exist.
    """
    lease = core.ledger.snapshot.leases.get(job.lease_id) if job.is_open else None
    lease = lease or core.ledger.ended_leases.get(job.lease_id)
    if lease is None:
        lease = await asyncio.to_thread(core.store.get_lease, job.lease_id)
    if lease is None:
        raise NotFound(f"there is no job {job.id!r}")
    return lease


async def read_ended_jobs(core: BrokerState, caller: Identity, limit: int) -> list[tuple[JobRow, LeaseRow]]:
    """Return jobs that ended within `[jobs] remember`, newest first: the caller's own, or all for an administrator."""
    since = core.clock.now() - core.cluster.jobs.remember
    owner = None if caller.sees_all else caller.name
    return await asyncio.to_thread(core.store.list_ended_jobs, owner, since, limit)


def build_job(core: BrokerState, job: JobRow, lease: LeaseRow, costs: CostRecord | None = None) -> JobView:
    """Return a job with its lease, and for an ended one with what it used, as shown to its owner."""
    version = max(job.version, core.queue_positions.find_version(lease))
    place = core.queue_positions.refresh().get(lease.id)
    problems, renew_within_s = list_gpu_problems(core, lease), float(core.cluster.jobs.renew_within)
    nodes = core.capacity.inventory.nodes
    return serializers.build_job(
        job,
        lease,
        version,
        place,
        renew_within_s,
        gpu_problems=problems,
        costs=costs,
        suspension=view_suspension(core, lease),
        unreachable=[node for node in lease.nodes if job.is_open and (node not in nodes or not nodes[node].is_up)],
    )


def view_cluster(core: BrokerState, backend: SchedulingBackend, caller: Identity | None) -> ClusterView:
    """Return the whole cluster, as shown to the caller, or to all users where that is None."""
    return cluster_view.build_cluster(_collect_inputs(core, backend, caller))


def view_nodes(core: BrokerState, backend: SchedulingBackend, caller: Identity | None) -> tuple[NodeView, ...]:
    """Return all nodes, as shown to the caller, or to all users where that is None."""
    return cluster_view.build_nodes(_collect_inputs(core, backend, caller))


def view_node(core: BrokerState, backend: SchedulingBackend, node: str) -> NodeView:
    """Return one node, as shown to all users."""
    return cluster_view.build_one_node(_collect_inputs(core, backend, None), node)


def _collect_inputs(core: BrokerState, backend: SchedulingBackend, caller: Identity | None) -> ClusterViewInput:
    external = backend.external_usage(core.clock.now())
    return ClusterViewInput(
        cluster=core.cluster,
        leases=core.ledger.snapshot.leases,
        places=core.queue_positions.refresh(),
        inventory=core.capacity.inventory,
        cordons=core.capacity.cordons,
        lease_statuses=core.capacity.lease_flags.by_uuid,
        job_names={job.lease_id: job.name for job in core.ledger.snapshot.jobs.values() if job.name},
        bench=core.capacity.bench,
        idle_times=core.idle.find_idle_times(external.waiting),
        reservations=[reservation_rules.build_reservation_view(row) for row in core.capacity.current_reservations],
        scheduler=core.scheduler,
        external=external,
        capabilities=backend.capabilities,
        build_partitions=backend.build_partitions,
        now=core.clock.now(),
        monotonic=core.clock.monotonic(),
        owner="" if caller is None or not caller.is_user else caller.name,
        groups=frozenset() if caller is None else _find_groups(core, caller),
    )


def _find_groups(core: BrokerState, caller: Identity) -> frozenset[str]:
    """Return a user's groups in the hub and in the settings; of a service those that it asked with."""
    return owner_limits.list_groups(core.cluster, caller.name, caller.groups) if caller.is_user else caller.groups


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
        holders = {lease.owner for lease in core.ledger.snapshot.leases.values()}
        names = sorted(usage.keys() | holders | core.scheduler_sync.own_limits.keys())
    index, jobs = core.ledger.index, core.ledger.snapshot.jobs
    return [
        serializers.build_usage(
            name,
            usage.get(name, OwnerUsage()),
            limits.count_requests(index, jobs, "waiting of", name),
            core.scheduler_sync.get_quota(name).per_user,
            core.scheduler_sync.own_limits.get(name),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedView:
    text: bytes
    #: Objects that it was built from, which are replaced at every change, never edited.
    inputs: tuple[object, ...]
    #: When it was built; monotonic.
    built_at: float
    #: Processor time to build it, so that other load on the machine does not count; seconds.
    build_s: float


class ClusterViewCache:
    """Keeps the last view that was built for all users, and those of the last callers who see another one."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend) -> None:
        self._core = core
        self._backend = backend
        self._access_groups = core.cluster.access_groups
        #: Views by caller, the most recent last; None for all users.
        self._built: OrderedDict[Identity | None, _CachedView] = OrderedDict()

    def render(self, caller: Identity) -> bytes:
        """Return the cluster as JSON, as shown to the caller."""
        return self._render(self._find_viewer(caller))

    def render_shared(self, caller: Identity) -> bytes:
        """Return the cluster as JSON, as shown to all who are in the same groups as the caller."""
        return self._render(self._find_group_viewer(caller))

    def _render(self, viewer: Identity | None) -> bytes:
        core, now = self._core, self._core.clock.monotonic()
        inputs = (core.ledger.snapshot, core.capacity.inventory, core.capacity.cordons, core.capacity.reservations)
        built = self._built.get(viewer)
        if built is None or not self._is_current(built, inputs, now):
            began = time.thread_time()
            text = self._build(viewer)
            built = _CachedView(text=text, inputs=inputs, built_at=now, build_s=time.thread_time() - began)
            self._built[viewer] = built
            self._built.move_to_end(viewer)
            while len(self._built) > MAX_VIEWS:
                self._built.popitem(last=False)
        return built.text

    def _find_viewer(self, caller: Identity) -> Identity | None:
        """Return whose view the caller sees: None for that of all users, or one for all members of the same groups."""
        if not self._sees_common_view(caller):
            return caller
        return self._find_group_viewer(caller)

    def _find_group_viewer(self, caller: Identity) -> Identity | None:
        groups = _find_groups(self._core, caller) & self._access_groups
        return Identity(name="", is_user=False, groups=groups) if groups else None

    def _sees_common_view(self, caller: Identity) -> bool:
        """Return whether the caller sees what others in the same groups see, without own limits, reservations or
        positions.
        """
        core = self._core
        if core.capacity.current_reservations or (
            caller.is_user and _is_limited(core.scheduler_sync.get_quota(caller.name))
        ):
            return False
        index = core.ledger.index
        return len(index.find("waiting")) <= MAX_STARTS_SHOWN or not index.find("waiting of", caller.name)

    def _is_current(self, built: _CachedView, inputs: tuple[object, ...], now: float) -> bool:
        age_s = now - built.built_at
        if all(old is new for old, new in zip(built.inputs, inputs, strict=True)):
            return age_s <= MAX_VIEW_AGE_S
        # Cordons and reservations are decisions of administrators, who should see them at once.
        is_decided = any(old is not new for old, new in zip(built.inputs[2:], inputs[2:], strict=True))
        return not is_decided and built.build_s > FAST_BUILD_S and age_s <= AGE_PER_BUILD_TIME * built.build_s

    def _build(self, caller: Identity | None) -> bytes:
        # With thousands of GPUs, pydantic's own JSON takes a tenth of the time of json.dumps.
        return view_cluster(self._core, self._backend, caller).model_dump_json().encode()


def _is_limited(quota: Quota) -> bool:
    """Return whether limits may decide if a request of this user would start at once."""
    limits = (quota.per_user, *quota.per_group.values())
    return any(limit.max_gpus is not None or limit.gpu_hours_per_week is not None for limit in limits)
