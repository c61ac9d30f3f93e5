"""What Slurm is told of jobs that go on: that they run, and which nodes their leases have given back."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gpuhub import names
from gpuhub.broker import slurm_rules
from gpuhub.broker.core import Core
from gpuhub.slurm.api import SlurmApi, SlurmRefused
from gpuhub.slurm.values import Job, Look, State

log = logging.getLogger(__name__)

#: Before Slurm is asked again for what it refused, seconds: twice as long each time.
FIRST_S, MOST_S = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Slurm would not take nodes back: what the job was to keep, how often that was asked, and when again."""

    kept: tuple[str, ...]
    times: int
    again_at: float


class Upkeep:
    """Remembers what has been said; `ours` are the cluster's nodes by Slurm's names."""

    def __init__(self, core: Core, api: SlurmApi, *, instance: str, ours: dict[str, str]) -> None:
        self._core, self._api, self._instance, self._ours = core, api, instance, ours
        #: Jobs of which slurmctld was told to store that they run.
        self._kept: set[int] = set()
        #: By job.
        self._refused: dict[int, Refusal] = {}

    async def shrink(self, look: Look) -> None:
        """Give Slurm back what elastic leases have given back, which it would keep for them until their ends."""
        leases, now = self._core.ledger.snapshot.leases, self._core.clock.monotonic()
        refused: dict[int, Refusal] = {}
        for job in look.jobs:
            lease = leases.get(job.name.removeprefix(self._name("")))
            if lease is None or lease.slurm_job != job.id:
                continue
            kept = slurm_rules.kept_nodes(lease, job, self._ours)
            if kept is None:
                continue
            asked = self._refused.get(job.id)
            if asked is None or asked.kept != kept:
                asked = Refusal(kept, times=0, again_at=now)
            if now >= asked.again_at:
                asked = await self._take_back(job, asked, now)
            if asked is not None:
                refused[job.id] = asked
        self._refused = refused

    async def keep(self, look: Look) -> None:
        """Let slurmctld store that the jobs of leases run, once each."""
        of_leases = {(lease.slurm_job, self._name(lease.id)) for lease in self._core.ledger.snapshot.leases.values()}
        for job in look.jobs:
            if job.state is State.RUNNING and (job.id, job.name) in of_leases and job.id not in self._kept:
                try:
                    await self._api.keep(job.id, name=job.name)
                except SlurmRefused as error:
                    log.warning("Slurm does not store that job %s runs: %s", job.id, error)
                self._kept.add(job.id)
        self._kept &= {job.id for job in look.jobs}

    async def _take_back(self, job: Job, asked: Refusal, now: float) -> Refusal | None:
        try:
            await self._api.shrink(job.id, asked.kept, name=job.name)
        except SlurmRefused as error:
            if not asked.times:
                log.info("Slurm does not take back nodes of job %s (yet): %s", job.id, error)
            again_at = now + min(FIRST_S * 2**asked.times, MOST_S)
            return Refusal(asked.kept, times=asked.times + 1, again_at=again_at)
        return None

    def _name(self, lease_id: str) -> str:
        return names.slurm_job(self._instance, lease_id)
