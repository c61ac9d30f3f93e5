"""Keeps leases and their Slurm jobs one: looks at all jobs again and again, and acts on what is found.

Everything follows from a look and the ledger, so that a broker that was restarted anywhere between goes on where the
other one ended. While Slurm does not answer nothing is concluded. A job that cannot be found any more is over only when
Slurm, asked for that one job, does not know it either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import starmap

from gpuhub import names
from gpuhub.broker import edits, job_rules, schedule, slurm_rules
from gpuhub.broker import leases as rules
from gpuhub.broker.clock import wait_event
from gpuhub.broker.core import Core
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import LeaseState, Purpose
from gpuhub.broker.slurm_bare import BareNodes
from gpuhub.broker.slurm_submitting import AT_ONCE, FindSubmitter, Submissions, raise_first
from gpuhub.broker.slurm_upkeep import Upkeep
from gpuhub.engines.slurm import SlurmEngine
from gpuhub.errors import Conflict, GpuhubError
from gpuhub.slurm.api import SlurmApi, SlurmRefused, SlurmUnreachable
from gpuhub.slurm.choice import limit_for
from gpuhub.slurm.values import LIVE, Job, Look, State

log = logging.getLogger(__name__)

#: Between two looks at the least, and while a job may start at any moment, seconds.
LEAST_S = 0.1
EAGER_S = 0.5
#: A job counts as about to start for so long after it was submitted, seconds.
YOUNG_S = 15.0
#: Between two looks at what administrators of Slurm set up, seconds.
SITE_S = 60.0
#: Before a notebook's container starts, and a worker's, Slurm may keep silent for so long, seconds.
PATIENCE_S, WORKERS_PATIENCE_S = 6.0, 60.0


class SlurmQueue:
    """Talks with Slurm about leases until cancelled."""

    def __init__(
        self, core: Core, engine: SlurmEngine, api: SlurmApi, *, instance: str, find_submitter: FindSubmitter
    ) -> None:
        self._core = core
        self._engine = engine
        self._api = api
        self._instance = instance
        self._ours = {node.slurm_name: node.name for node in core.cluster.nodes}
        self._submissions = Submissions(
            core=core, engine=engine, api=api, instance=instance, find_submitter=find_submitter
        )
        self._upkeep = Upkeep(core, api, instance=instance, ours=self._ours)
        #: Slurm did not answer last time; all went well then.
        self._is_silent = False
        self._is_well = True
        self._site_at = float("-inf")
        #: Jobs keep GPUs for containers, which gpuhub makes; else they are what runs, and Slurm alone tells of nodes.
        self._is_holding = core.cluster.has_docker
        self._bare = None if self._is_holding else BareNodes(core)

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look, act, wait."""
        while True:
            began = self._core.clock.monotonic()
            await self.step()
            await asyncio.sleep(LEAST_S)
            await self._until_due(began + self._period())

    async def step(self) -> None:
        """One look and all that follows from it; errors are logged, and what they left undone is done next time."""
        self._is_well = False
        try:
            look = await self._api.look()
        except SlurmUnreachable as error:
            self._note_silence(error)
            return
        except Exception:
            log.exception("Slurm's jobs could not be read")
            return
        self._note_answer()
        self._is_well = True
        if self._bare is not None:
            await self._try(self._bare.follow, look)
        is_known = await self._try(self._submissions.adopt, look)
        await self._try(self._judge, look)
        await self._try(self._serve, look)
        if is_known:
            # Else a job that is there already might be submitted again.
            await self._try(self._submit, look)
        await self._try(self._cancel, look)
        await self._try(self._upkeep.shrink, look)
        await self._try(self._upkeep.keep, look)
        await self._try(self._look_at_site, look)

    async def _try(self, act: Callable[[Look], Awaitable[None]], look: Look) -> bool:
        """Whether it went well; once Slurm is silent nothing more is tried."""
        if self._is_silent:
            return False
        try:
            await act(look)
        except SlurmUnreachable as error:
            self._note_silence(error)
        except GpuhubError as error:
            log.warning("Slurm: %s", error)
        except Exception:
            log.exception("talking with Slurm failed unexpectedly")
        else:
            return True
        self._is_well = False
        return False

    async def _until_due(self, deadline: float) -> None:
        """Until the deadline, or until there is something new to submit or to cancel."""
        while (left := deadline - self._core.clock.monotonic()) > 0:
            changed = self._core.ledger.changed
            if self._is_well and (self._submissions.is_new() or self._ended()):
                return
            await wait_event(changed, left)

    def _period(self) -> float:
        """Until the next look: sooner while a job is young, for then somebody waits before a browser."""
        poll = float(self._core.cluster.slurm.poll)
        now = self._core.clock.now()
        rows = self._core.ledger.snapshot.leases
        waiting = [rows[lease] for lease in self._core.ledger.index.find("waiting") if lease in rows]
        is_young = any(lease.slurm_job is not None and now - lease.created_at < YOUNG_S for lease in waiting)
        return min(poll, EAGER_S) if is_young and self._is_well else poll

    # -- what a look shows ----------------------------------------------------------------------------------------

    async def _judge(self, look: Look) -> None:
        """End leases whose jobs are over, and follow what has changed of the others."""
        listed = {(job.id, job.name): job for job in look.jobs}
        ends: dict[str, str] = {}
        changes: list[tuple[str, Callable[[LeaseRow], LeaseRow]]] = []
        exits: list[tuple[str, Callable[[JobRow, float], JobRow]]] = []
        for lease in list(self._core.ledger.snapshot.leases.values()):
            if lease.slurm_job is None:
                continue
            self._submissions.jobs[lease.id] = lease.slurm_job
            job = listed.get((lease.slurm_job, self._name(lease.id)))
            if lease.state in rules.ENDING:
                continue
            if job is None:
                job = await self._api.job(lease.slurm_job, name=self._name(lease.id))
            why = self._why_over(lease, job)
            launch = None if why is None else self._launch_of(lease)
            if launch is not None and slurm_rules.awaits_exit(launch, job):
                continue
            if why is None and job is not None:
                why = self._misfit(lease, job)
                lost = slurm_rules.lost_nodes(lease, job, self._ours)
                if lost:
                    await self._core.ledger.change(edits.give_back(lease.id, lost))
                changes += [(lease.id, change) for change in slurm_rules.find_changes(lease, job)]
            if why is not None:
                ends[lease.id] = why if launch is None else slurm_rules.say_where(launch, job, why)
                if launch is not None and (code := slurm_rules.find_exit(launch, job)) is not None:
                    exits.append((launch.id, partial(job_rules.leader_exited, exit_code=code)))
        if exits:
            await self._core.edit_jobs(exits)
        if ends:
            log.info("leases end with their Slurm jobs: %s", ends)
            await self._core.end_leases(ends)
        if changes:
            await self._core.ledger.change(edits.change_leases(changes))

    def _why_over(self, lease: LeaseRow, job: Job | None) -> str | None:
        return slurm_rules.why_over(lease, job, self._ours, self._engine.began_at(lease.id))

    def _launch_of(self, lease: LeaseRow) -> JobRow | None:
        """What a lease's Slurm job runs; None for a notebook, and where the job only holds."""
        is_launch = not self._is_holding and lease.purpose is Purpose.JOB
        return self._core.ledger.snapshot.jobs.get(lease.subject) if is_launch else None

    def _misfit(self, lease: LeaseRow, job: Job) -> str | None:
        is_new = lease.state is LeaseState.REQUESTED and job.state is State.RUNNING
        return self._engine.misfit(schedule.build_request(lease), job) if is_new else None

    # -- what is done ---------------------------------------------------------------------------------------------

    async def _serve(self, look: Look) -> None:
        self._engine.observe(look)
        if self._core.ledger.index.find("waiting"):
            await self._core.ledger.change(lambda _: None)

    async def _submit(self, _look: Look) -> None:
        await self._submissions.submit_all()

    async def _cancel(self, look: Look) -> None:
        """Cancel jobs of leases that have ended: the containers there were are proven gone by then."""
        leases = self._core.ledger.snapshot.leases
        unwanted = slurm_rules.find_unwanted(look.jobs, leases, instance=self._instance, is_holding=self._is_holding)
        ended = self._ended()
        of_ended = {self._submissions.jobs[lease]: self._name(lease) for lease in ended}
        named = {job.id: job.name for job in look.jobs if job.id in unwanted} | of_ended
        jobs = sorted(named.items())
        for start in range(0, len(jobs), AT_ONCE):
            some = starmap(self._cancel_one, jobs[start : start + AT_ONCE])
            raise_first(await asyncio.gather(*some, return_exceptions=True))
        for lease in ended:
            del self._submissions.jobs[lease]

    async def _cancel_one(self, job: int, name: str) -> None:
        try:
            await self._api.cancel(job, name=name, at_once=self._is_holding)
        except SlurmRefused as error:
            log.warning("Slurm does not cancel job %s: %s", job, error)

    def _ended(self) -> list[str]:
        """Leases that have ended, and whose job was not cancelled yet."""
        leases = self._core.ledger.snapshot.leases
        return [lease for lease in self._submissions.jobs if lease not in leases]

    async def _look_at_site(self, _look: Look) -> None:
        now = self._core.clock.monotonic()
        if now - self._site_at >= SITE_S:
            self._engine.site = await self._api.site()
            self._site_at = now

    # -- silence --------------------------------------------------------------------------------------------------

    def _note_silence(self, error: SlurmUnreachable) -> None:
        self._engine.note_silence(f"no answer at present ({error})")
        if not self._is_silent:
            log.warning("Slurm does not answer: %s", error)
            self._core.note_event("slurm.unreachable", f"Slurm does not answer: {error}; what runs goes on")
        self._is_silent = True

    def _note_answer(self) -> None:
        if self._is_silent:
            log.info("Slurm answers again")
            self._core.note_event("slurm.answers", "Slurm answers again")
        self._is_silent = False

    # -- asked by others ------------------------------------------------------------------------------------------

    async def refuse_ended(self, lease: LeaseRow, *, patience_s: float = PATIENCE_S) -> None:
        """Refuse to start a container of a lease whose job does not run any more, or elsewhere; to be asked when the
        container is there, so that from then on the job's end finds it. Slurm may keep silent for `patience_s`.

        Raises:
            Conflict: it is over.
            SlurmUnreachable: nobody can tell at present.
        """
        job = await self._ask(lease, patience_s)
        why = self._why_over(lease, job)
        if why is None and job is not None and job.state is not State.RUNNING:
            why = slurm_rules.SUSPENDED
        if why is not None:
            raise Conflict(f"lease {lease.id} cannot start anything: {why}")

    async def extend(self, lease: LeaseRow, seconds: int) -> None:
        """Let the job of a lease go on for so many seconds from now.

        Raises:
            Conflict: it has ended.
            SlurmRefused: with Slurm's word for it.
            SlurmUnreachable: nothing was changed, or nobody knows.
        """
        job = await self._ask(lease, 0)
        if job is None or job.state not in LIVE or job.started_at is None:
            raise Conflict(f"lease {lease.id} cannot be extended: its Slurm job does not run")
        lasted = max(0.0, self._core.clock.now() - job.started_at)
        await self._api.set_time_limit(job.id, limit_for(lasted + seconds), name=job.name)

    def _name(self, lease_id: str) -> str:
        return names.slurm_job(self._instance, lease_id)

    async def _ask(self, lease: LeaseRow, patience_s: float) -> Job | None:
        if lease.slurm_job is None:
            return None
        end = self._core.clock.monotonic() + patience_s
        while True:
            try:
                return await self._api.job(lease.slurm_job, name=self._name(lease.id))
            except SlurmUnreachable:
                if self._core.clock.monotonic() >= end:
                    raise
            await asyncio.sleep(EAGER_S)
