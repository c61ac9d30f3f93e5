"""Hands waiting leases to Slurm: one job each, as its owner."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from gpuhub import names
from gpuhub.batch.workers import Workers, build_workers_script
from gpuhub.broker import edits, schedule
from gpuhub.broker.core import Core
from gpuhub.broker.rows import LeaseRow
from gpuhub.broker.schemas import LeaseState, Purpose
from gpuhub.broker.usage_history import build_rules
from gpuhub.engines.slurm import SlurmEngine
from gpuhub.errors import GpuhubError, Unavailable
from gpuhub.paths import Paths
from gpuhub.settings import Cluster
from gpuhub.slurm.api import SlurmApi, SlurmRefused, SlurmUnreachable
from gpuhub.slurm.choice import build_submission
from gpuhub.slurm.owners import build_submitter, find_own
from gpuhub.slurm.values import Job, Look, Submission, Submitter
from gpuhub.storage.preparing import look_up

log = logging.getLogger(__name__)

#: Who a user is, for Slurm. Raises what stands in the way, `Unavailable` where nobody answers at present.
FindSubmitter = Callable[[str], Awaitable[Submitter]]
#: So many submissions are made side by side.
AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSide:
    """How Slurm is asked, and for whom."""

    api: SlurmApi
    find_submitter: FindSubmitter


def build_engine(cluster: Cluster, instance: str) -> SlurmEngine:
    """The engine of a cluster whose queue is Slurm's."""
    return SlurmEngine(
        build_rules(cluster.scheduling),
        instance=instance,
        node_names={node.slurm_name: node.name for node in cluster.nodes},
        table=cluster.slurm,
    )


async def find_submitter(cluster: Cluster, paths: Paths, owner: str) -> Submitter:
    """Who a user is on this head node, which Slurm's machines must know by the same numbers.

    Raises:
        StorageUnavailable: the accounts do not answer.
        InvalidRequest, NotAllowed, SetupError: there is no such account, or none that may have a job.
    """
    return build_submitter(await look_up(cluster.users, cluster.storage, paths.state, owner))


class Submissions:
    """Submits, and remembers which job stands for which lease."""

    def __init__(
        self, *, core: Core, engine: SlurmEngine, api: SlurmApi, instance: str, find_submitter: FindSubmitter
    ) -> None:
        self._core = core
        self._engine = engine
        self._api = api
        self._instance = instance
        self._find_submitter = find_submitter
        #: Jobs only hold what containers use; else they are what runs.
        self._is_holding = core.cluster.has_docker
        #: By lease: of all that are open, and of those that ended and whose job was not cancelled yet.
        self.jobs: dict[str, int] = {}
        #: Leases whose submission was tried last.
        self._tried: frozenset[str] = frozenset()

    async def adopt(self, look: Look) -> None:
        """Take jobs for leases that know of none: the broker was restarted before it could store the number, nobody
        knew whether a submission went through, or the hub's spawner submits by itself.
        """
        named: defaultdict[str, list[Job]] = defaultdict(list)
        for job in look.jobs:
            named[job.name].append(job)
        found: dict[str, int] = {}
        for lease in filter(_is_due, self._core.ledger.snapshot.leases.values()):
            name = names.slurm_job(self._instance, lease.id)
            own = find_own(named[name], name, await self._find_uid(lease.owner)) if name in named else None
            if own is not None:
                found[lease.id] = own.id
        if found:
            await self._core.ledger.change(edits.set_slurm_jobs(found))

    async def _find_uid(self, owner: str) -> int | None:
        """None for somebody who may have no job."""
        try:
            return (await self._find_submitter(owner)).uid
        except Unavailable:
            raise
        except GpuhubError:
            return None

    def due(self) -> list[LeaseRow]:
        """Waiting leases without a job, the oldest first. Without Docker the spawner submits those of notebooks."""
        rows = self._core.ledger.snapshot.leases
        waiting = [rows[lease] for lease in self._core.ledger.index.find("waiting") if lease in rows]
        mine = [row for row in waiting if _is_due(row) and (self._is_holding or row.purpose is Purpose.JOB)]
        return sorted(mine, key=lambda row: row.seq)

    def is_new(self) -> bool:
        """Whether there is one that was not tried yet."""
        return any(lease.id not in self._tried for lease in self.due())

    async def submit_all(self) -> None:
        """Submit what is due; to be called right after a look in which jobs were found by their names.

        Raises:
            SlurmUnreachable: it is unknown whether some of them were submitted.
        """
        due = self.due()
        self._tried = frozenset(lease.id for lease in due)
        for start in range(0, len(due), AT_ONCE):
            outcomes = await asyncio.gather(*map(self._submit, due[start : start + AT_ONCE]), return_exceptions=True)
            raise_first(outcomes)

    async def _submit(self, lease: LeaseRow) -> None:
        request = schedule.build_request(lease)
        choice = self._engine.choose(request)
        if choice is None:
            return
        try:
            submitter = await self._find_submitter(lease.owner)
        except Unavailable as error:
            log.warning("lease %s is handed to Slurm later: %s", lease.id, error)
            return
        except GpuhubError as error:
            await self._core.end_leases({lease.id: str(error)})
            return
        current = self._core.ledger.snapshot.leases.get(lease.id)
        if current is None or not _is_due(current):
            return
        cluster = self._core.cluster
        submission = build_submission(
            request,
            choice,
            name=names.slurm_job(self._instance, lease.id),
            submitter=submitter,
            table=cluster.slurm,
            profile=cluster.profile(lease.profile or ""),
            site=self._engine.site,
        )
        if not self._is_holding:
            submission = replace(submission, script=self._build_script(current, submission))
        try:
            job = await self._api.submit(submission)
        except SlurmRefused as error:
            await self._core.end_leases({lease.id: f"Slurm refused it: {error}"})
            return
        # Should it end before the number is stored, the job is cancelled by this.
        self.jobs[lease.id] = job
        await self._core.ledger.change(edits.set_slurm_jobs({lease.id: job}))

    def _build_script(self, lease: LeaseRow, submission: Submission) -> str:
        """What a job's workers are started by."""
        snapshot = self._core.ledger.snapshot
        job = snapshot.jobs[lease.subject]
        workers = Workers(
            cluster=self._core.cluster,
            user=lease.owner,
            run_id=job.joins or job.run_id,
            first_worker=job.first_worker,
            has_gpus=submission.gpus_per_node > 0,
            cpus=submission.cpus,
            survives_nodes=submission.survives_nodes,
            is_detached=job.detached,
        )
        return build_workers_script(workers)


def _is_due(lease: LeaseRow) -> bool:
    return lease.state is LeaseState.REQUESTED and lease.slurm_job is None


def raise_first(outcomes: Sequence[BaseException | None]) -> None:
    """Slurm's silence before all other errors: nothing more is asked then."""
    errors = [one for one in outcomes if one is not None]
    for error in sorted(errors, key=lambda one: not isinstance(one, SlurmUnreachable)):
        raise error
