"""Updates of running jobs in Slurm: that they must be stored, and which nodes their leases have released."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gpuhub.backends.interface import BackendHost
from gpuhub.backends.slurm import rules
from gpuhub.common import names
from gpuhub.slurm_client.interface import SlurmClient, SlurmRefused
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, SlurmSnapshot

log = logging.getLogger(__name__)

#: Before a refused update is repeated, seconds: twice as long each time.
FIRST_S, MOST_S = 0.5, 60.0


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
        #: By job.
        self._refused: dict[int, RefusedShrink] = {}

    async def shrink(self, look: SlurmSnapshot) -> None:
        """Release in Slurm the nodes that elastic leases have released; otherwise their jobs keep them to the end."""
        leases, now = self._host.leases(), self._host.clock.monotonic()
        refused: dict[int, RefusedShrink] = {}
        for job in look.jobs:
            lease = leases.get(job.name.removeprefix(self._job_name("")))
            if lease is None or lease.slurm_job != job.id:
                continue
            kept = rules.kept_nodes(lease, job, self._node_names)
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

    async def store(self, look: SlurmSnapshot) -> None:
        """Let slurmctld store that the jobs of leases run, once each."""
        of_leases = {(lease.slurm_job, self._job_name(lease.id)) for lease in self._host.leases().values()}
        for job in look.jobs:
            if job.state is SlurmJobState.RUNNING and (job.id, job.name) in of_leases and job.id not in self._stored:
                try:
                    await self._api.persist_job(job.id, name=job.name)
                except SlurmRefused as error:
                    log.warning("Slurm does not store that job %s runs: %s", job.id, error)
                self._stored.add(job.id)
        self._stored &= {job.id for job in look.jobs}

    async def _shrink_job(self, job: SlurmJob, last: RefusedShrink, now: float) -> RefusedShrink | None:
        try:
            await self._api.shrink(job.id, last.kept, name=job.name)
        except SlurmRefused as error:
            if not last.times:
                log.info("Slurm does not take back nodes of job %s (yet): %s", job.id, error)
            again_at = now + min(FIRST_S * 2**last.times, MOST_S)
            return RefusedShrink(last.kept, times=last.times + 1, again_at=again_at)
        return None

    def _job_name(self, lease_id: str) -> str:
        return names.slurm_job_name(self._instance, lease_id)
