"""Live views: the cluster and the caller's own leases and jobs, again whenever they change, at most once a second.

The view of the cluster is the same for all users in the same groups, and is built once for all of them. The caller's
own part has a bounded number of leases and jobs, however many the caller has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from gpuhub.broker.admission import access
from gpuhub.broker.operations.cluster import ClusterOperations
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import serializers, slices, views
from gpuhub.broker_api.schemas import LeaseState
from gpuhub.broker_api.schemas.live import JobSummaryView, OwnView
from gpuhub.common.errors import NotAllowed
from gpuhub.domain.models import Identity, JobRow, LeaseRow, OutputShareRow

#: Minimum time between two views of a stream, seconds.
PERIOD_S = 1.0
#: Maximum rate of a stream, bytes per second: the view of a large cluster is sent less often.
MAX_BYTES_PER_S = 1024 * 1024
#: Time after which a caller's own part is built again although no lease changed: usage and idle times grow. Seconds.
REFRESH_S = 5.0
#: Maximum number of a caller's leases with GPUs, of waiting requests, of jobs that run or wait, and of ended ones.
MAX_HELD, MAX_WAITING, MAX_OPEN_JOBS, MAX_ENDED_JOBS = 50, 20, 40, 10
#: Maximum number of output shares, given and received.
MAX_LISTED_SHARES = 40
STREAMS = access.StreamKind(description="live views", per_owner=12, total=2048)
#: The last field of the view, which alone always differs.
_TIME_FIELD = b',"now":'


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnRows:
    """The rows of a caller's own part, and what changes with each of their changes."""

    leases: tuple[LeaseRow, ...]
    jobs: tuple[JobRow, ...]
    more_leases: int
    more_jobs: int
    versions: tuple[object, ...]


@dataclass(slots=True)
class _EndedJobs:
    """The caller's jobs that ended last, which are read from the store again only after another one has ended."""

    jobs: tuple[JobSummaryView, ...] = ()
    #: The caller's jobs that had not ended when they were read; None before.
    open_ids: frozenset[str] | None = field(default=None)


class LiveViews:
    """Builds what live views send."""

    def __init__(self, core: BrokerState, operations: BrokerOperations, cluster: ClusterOperations) -> None:
        self._core = core
        self._operations = operations
        self._cluster = cluster
        self._streams = access.ConcurrencyLimiter()

    def acquire(self, caller: Identity) -> AbstractContextManager[None]:
        """Count one stream of the caller for the duration of the context; the hub's own have no limit.

        Raises:
            TooManyStreams: the caller has too many.
        """
        return self._streams.acquire(STREAMS, caller.name) if caller.is_user else nullcontext()

    def check_groups(self, caller: Identity, groups: Collection[str]) -> None:
        """Refuse callers who name groups and cannot ask for other users.

        Raises:
            NotAllowed: they are such a caller.
        """
        if groups and not caller.any_owner:
            raise NotAllowed(f"{caller.name} may not set the groups of a user")

    async def watch_cluster(self, caller: Identity, groups: Collection[str]) -> AsyncIterator[str]:
        """Yield the cluster as JSON, as all users in the caller's groups, or in `groups`, see it."""
        sent = b""
        while True:
            text = self._cluster.shared_cluster_json(replace(caller, groups=frozenset(groups)) if groups else caller)
            content = text.rpartition(_TIME_FIELD)[0]
            if content != sent:
                sent = content
                yield text.decode()
            await asyncio.sleep(max(PERIOD_S, len(text) / MAX_BYTES_PER_S))

    async def watch_own(self, caller: Identity) -> AsyncIterator[str]:
        """Yield the caller's own part as JSON."""
        sent, versions, ended, built_at = "", None, _EndedJobs(), 0.0
        clock = self._core.clock
        while True:
            rows = self._select_rows(caller)
            if rows.versions != versions or clock.monotonic() - built_at >= REFRESH_S:
                versions, built_at = rows.versions, clock.monotonic()
                text = (await self._build_own(caller, rows, ended)).model_dump_json()
                if text != sent:
                    sent = text
                    yield text
            await asyncio.sleep(PERIOD_S)

    def _select_rows(self, caller: Identity) -> _OwnRows:
        ledger, positions = self._core.ledger, self._core.queue_positions
        own = ledger.find_leases("owner", caller.name) if caller.is_user else []
        own.sort(key=lambda row: row.seq)
        held = [row for row in own if row.state is not LeaseState.REQUESTED][:MAX_HELD]
        waiting = [row for row in own if row.state is LeaseState.REQUESTED][:MAX_WAITING]
        open_jobs = ledger.find_jobs("jobs of owner", caller.name) if caller.is_user else []
        open_jobs.sort(key=lambda row: (row.created_at, row.run_id), reverse=True)
        jobs = open_jobs[:MAX_OPEN_JOBS]
        leases = (*held, *waiting)
        all_leases = ledger.snapshot.leases
        of_jobs = [all_leases[job.lease_id] for job in jobs if job.lease_id in all_leases]
        return _OwnRows(
            leases=leases,
            jobs=tuple(jobs),
            more_leases=len(own) - len(leases),
            more_jobs=len(open_jobs) - len(jobs),
            versions=(
                ledger.is_writing,
                self._core.shares.version,
                len(own),
                len(open_jobs),
                *(positions.find_version(row) for row in (*leases, *of_jobs)),
                *(job.version for job in jobs),
            ),
        )

    async def _build_own(self, caller: Identity, rows: _OwnRows, ended: _EndedJobs) -> OwnView:
        core, jobs = self._core, []
        for job in rows.jobs:
            lease = core.ledger.snapshot.leases.get(job.lease_id)
            if lease is not None:
                jobs.append(serializers.build_job_summary(job, lease, core.queue_positions.refresh().get(lease.id)))
        leases = tuple(views.view_lease(core, lease) for lease in rows.leases)
        await self._refresh_ended(caller, ended)
        as_user = replace(caller, is_admin=False, any_owner=False)
        usage = await self._cluster.usage(as_user, caller.name) if caller.is_user else []
        shares = self._select_shares(caller) if caller.is_user else []
        return OwnView(
            leases=leases,
            more_leases=rows.more_leases,
            jobs=(*jobs, *ended.jobs),
            more_jobs=rows.more_jobs,
            usage=usage[0] if usage else None,
            all_usage=tuple(await self._cluster.usage(caller, None)) if caller.is_admin else (),
            shares=tuple(serializers.build_output_share(row, caller.name) for row in shares[:MAX_LISTED_SHARES]),
            more_shares=max(0, len(shares) - MAX_LISTED_SHARES),
            quarantined=tuple(await slices.collect(self._operations.leases(caller, state=LeaseState.QUARANTINED)))
            if caller.is_admin
            else (),
        )

    def _select_shares(self, caller: Identity) -> list[OutputShareRow]:
        """Return the caller's shares and those with the caller, the newest first."""
        rows = [*self._core.shares.select(owner=caller.name), *self._core.shares.select(viewer=caller.name)]
        return sorted(rows, key=lambda row: row.created_at, reverse=True)

    async def _refresh_ended(self, caller: Identity, ended: _EndedJobs) -> None:
        if not caller.is_user:
            return
        core = self._core
        # While a transaction is being written, the index is ahead of the snapshot and of the store.
        jobs, known = core.ledger.snapshot.jobs, ended.open_ids
        ended.open_ids = frozenset(core.ledger.index.find("jobs of owner", caller.name)) & jobs.keys()
        if known is not None:
            ended.open_ids |= known & jobs.keys()
            if known <= jobs.keys():
                return
        since = core.clock.now() - core.cluster.jobs.remember
        rows = await asyncio.to_thread(core.store.list_ended_jobs, caller.name, since, MAX_ENDED_JOBS)
        ended.jobs = tuple(serializers.build_job_summary(job, lease, None) for job, lease in rows)
