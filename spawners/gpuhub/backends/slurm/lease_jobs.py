"""The Slurm jobs of leases: their submission, one for each lease as its owner, and updates while they run."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from gpuhub.backends.interface import BackendHost, LeaseRejected
from gpuhub.backends.slurm import lease_outcomes
from gpuhub.backends.slurm.scheduler import SlurmScheduler
from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, Unavailable
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain.models import LeaseRow
from gpuhub.domain.scheduler_input import build_request
from gpuhub.slurm_client.gpu_selection import build_submission
from gpuhub.slurm_client.interface import SlurmClient, SlurmRefused
from gpuhub.slurm_client.job_control import build_submitter, find_lease_job
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, SlurmSite, SlurmSnapshot, SlurmSubmission, Submitter
from gpuhub.slurm_jobs.scripts import WorkerScriptSpec, build_worker_script
from gpuhub.storage.homes import resolve_identity

log = logging.getLogger(__name__)
#: Returns the account of a user. Raises `Unavailable` where the accounts cannot be read now, and another GpuhubError
#: where the user can have no job.
FindSubmitter = Callable[[str], Awaitable[Submitter]]
#: First pause before a refused update is repeated, seconds; doubled each time.
_FIRST_RETRY_S = 0.5
#: Maximum pause, seconds.
_MAX_RETRY_S = 60.0


async def find_submitter(cluster: ClusterSettings, paths: Paths, owner: str) -> Submitter:
    """Return a user's account on this head node; Slurm's machines must know it by the same numbers.

    Raises:
        StorageUnavailable: The accounts cannot be read.
        InvalidRequest, NotAllowed, SetupError: There is no such account, or it may not have a job.
    """
    return build_submitter(await resolve_identity(cluster.users, cluster.storage, paths.state, owner))


class Submissions:
    """Submits leases, and recognises jobs that were submitted for them before."""

    def __init__(
        self,
        cluster: ClusterSettings,
        api: SlurmClient,
        scheduler: SlurmScheduler,
        *,
        instance: str,
        find_submitter: FindSubmitter,
        has_containers: bool,
    ) -> None:
        """Begin with no submission; `has_containers`: jobs only hold GPUs for containers, else they are what runs."""
        self._cluster = cluster
        self._api = api
        self._scheduler = scheduler
        self._instance = instance
        self._find_submitter = find_submitter
        self._has_containers = has_containers

    async def find_submitted(self, snapshot: SlurmSnapshot, leases: Mapping[str, LeaseRow]) -> dict[str, int]:
        """Return jobs of leases for which the ledger has none.

        The broker was restarted before it could store the number, or did not learn whether a submission was accepted;
        or the hub's spawner submitted the job itself.

        Raises:
            Unavailable: The accounts cannot be read.
        """
        named: defaultdict[str, list[SlurmJob]] = defaultdict(list)
        for job in snapshot.jobs:
            named[job.name].append(job)
        submitted: dict[str, int] = {}
        for lease in filter(_is_unsubmitted, leases.values()):
            name = names.slurm_job_name(self._instance, lease.id)
            own = find_lease_job(named[name], name, await self._find_uid(lease.owner)) if name in named else None
            if own is not None:
                submitted[lease.id] = own.id
        return submitted

    async def submit(self, lease: LeaseRow, host: BackendHost, site: SlurmSite | None) -> int | None:
        """Submit one lease; see `SchedulingBackend.submit`."""
        request = build_request(lease)
        choice = self._scheduler.choose(request)
        if choice is None:
            return None
        try:
            submitter = await self._find_submitter(lease.owner)
        except Unavailable:
            raise
        except GpuhubError as error:
            raise LeaseRejected(str(error)) from error
        current = host.leases().get(lease.id)
        if current is None or not _is_unsubmitted(current):
            return None
        submission = build_submission(
            request,
            choice,
            name=names.slurm_job_name(self._instance, lease.id),
            submitter=submitter,
            table=self._cluster.slurm,
            profile=self._cluster.profile(lease.profile or ""),
            site=site,
        )
        if not self._has_containers:
            submission = replace(submission, script=self._build_script(current, submission, host))
        try:
            return await self._api.submit(submission)
        except SlurmRefused as error:
            raise LeaseRejected(f"Slurm refused it: {error}") from error

    async def _find_uid(self, owner: str) -> int | None:
        """None for a user who can have no job."""
        try:
            return (await self._find_submitter(owner)).uid
        except Unavailable:
            raise
        except GpuhubError:
            return None

    def _build_script(self, lease: LeaseRow, submission: SlurmSubmission, host: BackendHost) -> str:
        job = host.jobs()[lease.subject]
        workers = WorkerScriptSpec(
            cluster=self._cluster,
            user=lease.owner,
            run_id=job.joins or job.run_id,
            first_worker=job.first_worker,
            has_gpus=submission.gpus_per_node > 0,
            cpus=submission.cpus,
            survives_nodes=submission.survives_nodes,
            is_detached=job.detached,
        )
        return build_worker_script(workers)


def _is_unsubmitted(lease: LeaseRow) -> bool:
    return lease.state is LeaseState.REQUESTED and lease.slurm_job is None


@dataclass(frozen=True, slots=True)
class RefusedShrink:
    """Slurm did not accept that a job keeps these nodes only: how often, and when (monotonic) to try again."""

    kept: tuple[str, ...]
    times: int
    again_at: float


class JobUpdater:
    """Sends each update once, and repeats what Slurm refused."""

    def __init__(self, api: SlurmClient, host: BackendHost, *, instance: str, node_names: dict[str, str]) -> None:
        self._api, self._host, self._instance, self._node_names = api, host, instance, node_names
        #: Jobs that slurmctld was asked to store.
        self._stored: set[int] = set()
        #: Slurm job → the update that Slurm refused.
        self._refused: dict[int, RefusedShrink] = {}

    async def shrink(self, snapshot: SlurmSnapshot) -> None:
        """Release in Slurm the nodes that elastic leases have released; otherwise their jobs keep them to the end."""
        leases, now = self._host.leases(), self._host.clock.monotonic()
        refused: dict[int, RefusedShrink] = {}
        for job in snapshot.jobs:
            lease = leases.get(job.name.removeprefix(self._job_name("")))
            if lease is None or lease.slurm_job != job.id:
                continue
            kept = lease_outcomes.find_kept_nodes(lease, job, self._node_names)
            if kept is None:
                continue
            last = self._refused.get(job.id)
            if last is None or last.kept != kept:
                last = RefusedShrink(kept, times=0, again_at=now)
            if now >= last.again_at:
                last = await self._shrink_job(job, last, now)
            if last is not None:
                refused[job.id] = last
        self._refused = refused

    async def store(self, snapshot: SlurmSnapshot) -> None:
        """Let slurmctld store that the jobs of leases run, once each."""
        of_leases = {(lease.slurm_job, self._job_name(lease.id)) for lease in self._host.leases().values()}
        for job in snapshot.jobs:
            if job.state is SlurmJobState.RUNNING and (job.id, job.name) in of_leases and job.id not in self._stored:
                try:
                    await self._api.persist_job(job.id, name=job.name)
                except SlurmRefused as error:
                    log.warning("Slurm does not store the state of job %s: %s", job.id, error)
                self._stored.add(job.id)
        self._stored &= {job.id for job in snapshot.jobs}

    async def _shrink_job(self, job: SlurmJob, last: RefusedShrink, now: float) -> RefusedShrink | None:
        try:
            await self._api.shrink(job.id, last.kept, name=job.name)
        except SlurmRefused as error:
            if not last.times:
                log.info("Slurm does not shrink job %s (yet): %s", job.id, error)
            again_at = now + min(_FIRST_RETRY_S * 2**last.times, _MAX_RETRY_S)
            return RefusedShrink(last.kept, times=last.times + 1, again_at=again_at)
        return None

    def _job_name(self, lease_id: str) -> str:
        return names.slurm_job_name(self._instance, lease_id)
