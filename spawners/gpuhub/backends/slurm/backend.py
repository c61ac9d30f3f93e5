"""The Slurm backend: every lease is a Slurm job, which Slurm starts and ends.

All conclusions follow from a poll and the ledger, so that a restarted broker continues where the last one ended. While
Slurm does not answer nothing is concluded. A job that a poll does not list is over only when Slurm, asked for that one
job, does not know it either.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import starmap

from gpuhub.backends.interface import (
    NOTEBOOK_TIMEOUT_S,
    AccountedHours,
    BackendHost,
    EndedLease,
    ExternalUsage,
    Observation,
    SchedulingBackend,
    raise_first,
)
from gpuhub.backends.slurm import admission, bare_nodes, external_jobs, lease_outcomes
from gpuhub.backends.slurm.accounting import SlurmAccounting
from gpuhub.backends.slurm.gpu_drains import GpuDrains
from gpuhub.backends.slurm.lease_jobs import FindSubmitter, JobUpdater, Submissions
from gpuhub.backends.slurm.node_power import find_power
from gpuhub.backends.slurm.scheduler import SlurmScheduler
from gpuhub.backends.slurm.user_programs import UserPrograms
from gpuhub.broker_api.schemas import (
    Capabilities,
    JobRequest,
    LeaseRequest,
    LeaseState,
    NodeView,
    PartitionView,
    Purpose,
    UsageView,
)
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, SchedulerUnreachable
from gpuhub.common.program_session import ProgramSession
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.containers.user_containers import WorkerSpec
from gpuhub.domain import lease_states
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.domain.scheduler_input import build_request
from gpuhub.scheduler.interface import build_parameters
from gpuhub.slurm_client.gpu_selection import build_time_limit
from gpuhub.slurm_client.interface import SlurmClient, SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState, SlurmSite, SlurmSnapshot

log = logging.getLogger(__name__)

#: Interval between two queries of what Slurm's administrators set up, seconds.
SITE_S = 60.0
#: Interval between two queries for one job while Slurm is not reachable, seconds.
RETRY_S = 0.5
#: Cancellations that are made at the same time.
_CONCURRENCY = 8
#: Unwanted jobs of one user that are cancelled after a poll: users can submit any number of jobs with leases' names.
_MAX_UNWANTED = 32


def build_capabilities(cluster: ClusterSettings) -> Capabilities:
    """Return what gpuhub offers with Slurm; without Docker on the nodes, jobs are what runs."""
    return Capabilities(
        scheduler="Slurm",
        immediate_grants=False,
        external_jobs=True,
        containers=cluster.slurm.runtime == "docker",
        gpu_shares=False,
        cordons=False,
        reservations=False,
        fair_share=False,
        priorities=False,
        preemption=False,
        persistent_notebooks=False,
    )


class SlurmBackend(SchedulingBackend):
    """One Slurm cluster, whose nodes are those of cluster.toml."""

    name = "slurm"
    title = "Slurm"

    def __init__(
        self, cluster: ClusterSettings, api: SlurmClient, *, instance: str, find_submitter: FindSubmitter
    ) -> None:
        self._cluster = cluster
        self._api = api
        self._instance = instance
        self._capabilities = build_capabilities(cluster)
        self._node_names = {node.slurm_name: node.name for node in cluster.nodes}
        self._programs = UserPrograms(cluster, find_submitter)
        self._scheduler = SlurmScheduler(
            build_parameters(cluster.scheduling), instance=instance, node_names=self._node_names, table=cluster.slurm
        )
        self._submissions = Submissions(
            cluster,
            api,
            self._scheduler,
            instance=instance,
            find_submitter=find_submitter,
            has_containers=self._capabilities.containers,
        )
        self.poll_s = float(cluster.slurm.poll)
        #: What Slurm's administrators set up; None before it was read.
        self.site: SlurmSite | None = None
        self._site_at = float("-inf")
        self._snapshot = SlurmSnapshot(jobs=(), nodes=())
        #: Jobs that were cancelled since the last poll.
        self._cancelled: set[int] = set()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def scheduler(self) -> SlurmScheduler:
        return self._scheduler

    async def setup(self, host: BackendHost) -> None:
        self._host = host
        self._accounting = SlurmAccounting(self._api, host.clock)
        self._updater = JobUpdater(self._api, host, instance=self._instance, node_names=self._node_names)
        self._drains = GpuDrains(self._api, host, node_names=self._node_names)

    # -- admission ------------------------------------------------------------------------------------------------

    def validate_request(self, request: LeaseRequest | JobRequest) -> None:
        if isinstance(request, LeaseRequest):
            admission.refuse_notebook(self._cluster, request.profile)
        else:
            admission.refuse_job(self._cluster, request)

    def admit(self, lease: LeaseRow) -> None:
        admission.refuse_lease(self._cluster, self.site, lease)

    def describe_cordon(self, node: str) -> str:
        return admission.describe_cordon(self._cluster, node)

    def describe_reservation(self) -> str:
        return admission.RESERVATIONS

    # -- polling --------------------------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        snapshot = await self._api.read_snapshot()
        leases = self._host.leases()
        submitted = await self._find_submitted(snapshot, leases)
        known = {
            lease.id: lease.evolve(slurm_job=submitted[lease.id]) if submitted and lease.id in submitted else lease
            for lease in leases.values()
        }
        observation = await self._compare(snapshot, known, submitted)
        self._scheduler.observe(snapshot)
        self._snapshot = snapshot
        self._cancelled.clear()
        return observation

    async def _find_submitted(self, snapshot: SlurmSnapshot, leases: Mapping[str, LeaseRow]) -> dict[str, int] | None:
        """Return jobs of leases that have none in the ledger; None where that is not known."""
        try:
            return await self._submissions.find_submitted(snapshot, leases)
        except GpuhubError as error:
            log.warning("Slurm: %s", error)
        except Exception:
            log.exception("jobs could not be assigned to leases")
        return None

    async def _compare(
        self, snapshot: SlurmSnapshot, leases: Mapping[str, LeaseRow], submitted: dict[str, int] | None
    ) -> Observation:
        """Compare the leases that have jobs with a poll."""
        listed = {(job.id, job.name): job for job in snapshot.jobs}
        ended: dict[str, EndedLease] = {}
        lost_nodes: dict[str, frozenset[str]] = {}
        ends_at: dict[str, float | None] = {}
        notes: dict[str, str | None] = {}
        for lease in leases.values():
            if lease.slurm_job is None or lease.state in lease_states.ENDING:
                continue
            job = listed.get((lease.slurm_job, self._job_name(lease.id)))
            if job is None:
                job = await self._api.find_job(lease.slurm_job, name=self._job_name(lease.id))
            end = self._find_end(lease, job)
            if end is not None:
                ended[lease.id] = end
            if job is None or self._explain_over(lease, job) is not None:
                continue
            if lost := lease_outcomes.find_lost_nodes(lease, job, self._node_names):
                lost_nodes[lease.id] = lost
            if lease_outcomes.has_new_end(lease, job):
                ends_at[lease.id] = job.ends_at
            if lease_outcomes.has_new_note(lease, job):
                notes[lease.id] = lease_outcomes.SUSPENDED if job.state is SlurmJobState.SUSPENDED else None
        has_daemons = self._capabilities.containers
        clock = self._host.clock
        return Observation(
            jobs=submitted or {},
            ended=ended,
            lost_nodes=lost_nodes,
            ends_at=ends_at,
            notes=notes,
            nodes=()
            if has_daemons
            else bare_nodes.build_nodes(self._cluster, self._host.nodes(), snapshot, clock.monotonic()),
            cleared={} if has_daemons else bare_nodes.find_cleared(snapshot, leases),
            power=find_power(snapshot, self._node_names),
            may_submit=submitted is not None,
        )

    def _find_end(self, lease: LeaseRow, job: SlurmJob | None) -> EndedLease | None:
        reason = self._explain_over(lease, job)
        if reason is None:
            misfit = None if job is None else self._explain_misfit(lease, job)
            return None if misfit is None else EndedLease(reason=misfit)
        launch = self._find_launch(lease)
        if launch is None:
            return EndedLease(reason=reason)
        if lease_outcomes.awaits_exit(launch, job):
            return None
        return EndedLease(
            reason=lease_outcomes.name_log(launch, job, reason), exit_code=lease_outcomes.find_exit(launch, job)
        )

    def _explain_over(self, lease: LeaseRow, job: SlurmJob | None) -> str | None:
        return lease_outcomes.explain_over(lease, job, self._node_names, self._scheduler.find_start(lease.id))

    def _explain_misfit(self, lease: LeaseRow, job: SlurmJob) -> str | None:
        is_new = lease.state is LeaseState.REQUESTED and job.state is SlurmJobState.RUNNING
        return self._scheduler.explain_misfit(build_request(lease), job) if is_new else None

    def _find_launch(self, lease: LeaseRow) -> JobRow | None:
        """Return the launch that a lease's Slurm job runs; None for notebooks, and where jobs only hold GPUs."""
        is_launch = not self._capabilities.containers and lease.purpose is Purpose.JOB
        return self._host.jobs().get(lease.subject) if is_launch else None

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def submit(self, lease: LeaseRow) -> int | None:
        return await self._submissions.submit(lease, self._host, self.site)

    async def cancel(self, jobs: Mapping[str, int]) -> None:
        await self._cancel({job: self._job_name(lease) for lease, job in jobs.items()})

    async def reconcile(self) -> None:
        failures: list[GpuhubError] = []
        for act in (self._cancel_unwanted, self._release_nodes, self._store_jobs, self._drain_failed, self._read_site):
            try:
                await act()
            except SlurmUnreachable:
                raise
            except GpuhubError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _cancel_unwanted(self) -> None:
        leases = self._host.leases()
        has_containers = self._capabilities.containers
        unwanted = lease_outcomes.find_unwanted(
            self._snapshot.jobs, leases, instance=self._instance, has_containers=has_containers
        )
        listed: dict[int, str] = {}
        counts: Counter[int] = Counter()
        for job in sorted(self._snapshot.jobs, key=lambda job: job.id):
            if job.id in unwanted - self._cancelled and counts[job.user_id] < _MAX_UNWANTED:
                counts[job.user_id] += 1
                listed[job.id] = job.name
        await self._cancel(listed)

    async def _release_nodes(self) -> None:
        await self._updater.shrink(self._snapshot)

    async def _store_jobs(self) -> None:
        await self._updater.store(self._snapshot)

    async def _drain_failed(self) -> None:
        # Without Docker there are no agents, and `health.sh` drains the nodes.
        if self._cluster.slurm.drain_failed and self._capabilities.containers:
            await self._drains.update(self._snapshot)

    async def _read_site(self) -> None:
        now = self._host.clock.monotonic()
        if now - self._site_at >= SITE_S:
            self.site = await self._api.read_site()
            self._site_at = now

    async def _cancel(self, names_of: Mapping[int, str]) -> None:
        jobs = sorted(names_of.items())
        for start in range(0, len(jobs), _CONCURRENCY):
            batch = starmap(self._cancel_one, jobs[start : start + _CONCURRENCY])
            raise_first(await asyncio.gather(*batch, return_exceptions=True))

    async def _cancel_one(self, job: int, name: str) -> None:
        try:
            await self._api.cancel(job, name=name, at_once=self._capabilities.containers)
        except SlurmRefused as error:
            log.warning("Slurm does not cancel job %s: %s", job, error)
        self._cancelled.add(job)

    async def confirm(self, lease: LeaseRow, *, timeout_s: float = NOTEBOOK_TIMEOUT_S) -> None:
        job = await self._query(lease, timeout_s)
        why = self._explain_over(lease, job)
        if why is None and job is not None and job.state is not SlurmJobState.RUNNING:
            why = lease_outcomes.SUSPENDED
        if why is not None:
            raise Conflict(f"lease {lease.id} cannot start anything: {why}")

    async def extend(self, lease: LeaseRow, seconds: int) -> None:
        job = await self._query(lease, 0)
        if job is None or job.state not in LIVE_STATES or job.started_at is None:
            raise Conflict(f"lease {lease.id} cannot be extended: its Slurm job is not running")
        lasted = max(0.0, self._host.clock.now() - job.started_at)
        await self._api.set_time_limit(job.id, build_time_limit(lasted + seconds), name=job.name)

    async def start_worker(self, spec: WorkerSpec) -> str:
        return bare_nodes.name_worker(spec)

    async def start_courier(self, owner: str, arguments: Sequence[str]) -> ProgramSession:
        return await self._programs.start_on_head(owner, arguments)

    async def start_courier_of_job(self, job: JobRow, node: str, arguments: Sequence[str]) -> ProgramSession:
        lease = self._host.leases().get(job.lease_id)
        if lease is None:
            raise Conflict(f"job {job.id} has ended")
        return await self._programs.start_in_job(lease, job, node, arguments)

    def note_unreachable(self, error: SchedulerUnreachable) -> None:
        self._scheduler.note_unreachable(f"no answer now ({error})")

    async def _query(self, lease: LeaseRow, timeout_s: float) -> SlurmJob | None:
        if lease.slurm_job is None:
            return None
        end = self._host.clock.monotonic() + timeout_s
        while True:
            try:
                return await self._api.find_job(lease.slurm_job, name=self._job_name(lease.id))
            except SlurmUnreachable:
                if self._host.clock.monotonic() >= end:
                    raise
            await asyncio.sleep(RETRY_S)

    def _job_name(self, lease_id: str) -> str:
        return names.slurm_job_name(self._instance, lease_id)

    # -- others ---------------------------------------------------------------------------------------------------

    def external_usage(self, now: float) -> ExternalUsage:
        return external_jobs.build_usage(self._scheduler, now)

    def build_partitions(self, nodes: Sequence[NodeView]) -> tuple[PartitionView, ...]:
        return external_jobs.build_partitions(self._cluster, self.site, nodes)

    async def count_usage(self, views: Sequence[UsageView], *, is_everybody: bool) -> list[UsageView]:
        return await self._accounting.fill(views, is_everybody=is_everybody)

    async def count_gpu_hours(self, since: float, until: float) -> AccountedHours | None:
        return await self._accounting.count_hours(since, until)

    async def close(self) -> None:
        await self._programs.close()
        await self._api.close()
