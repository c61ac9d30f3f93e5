"""Submission of waiting leases to Slurm: one job each, as the lease's owner."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from gpuhub.backends.interface import BackendHost, LeaseRejected
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
from gpuhub.slurm_client.jobs import build_submitter, find_lease_job
from gpuhub.slurm_client.models import SlurmJob, SlurmSite, SlurmSnapshot, SlurmSubmission, Submitter
from gpuhub.slurm_jobs.worker_script import WorkerScriptSpec, build_worker_script
from gpuhub.storage.preparation import resolve_identity

log = logging.getLogger(__name__)

#: Returns the account of a user. Raises `Unavailable` where the accounts cannot be read now, and another GpuhubError
#: where the user can have no job.
FindSubmitter = Callable[[str], Awaitable[Submitter]]


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

    async def find_submitted(self, look: SlurmSnapshot, leases: Mapping[str, LeaseRow]) -> dict[str, int]:
        """Return jobs of leases for which the ledger has none.

        The broker was restarted before it could store the number, or did not learn whether a submission was accepted;
        or the hub's spawner submitted the job itself.

        Raises:
            Unavailable: The accounts cannot be read.
        """
        named: defaultdict[str, list[SlurmJob]] = defaultdict(list)
        for job in look.jobs:
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
