"""The same rules with Slurm as the backend, and actions of Slurm, its administrators and its other users."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState
from tests.integration.gpuhub.broker.stateful.machine import (
    INDEX,
    NODES,
    OWNERS,
    SERVERS,
    SHAPES,
    WAYS,
    BrokerMachine,
    pick,
)
from tests.integration.gpuhub.broker.stateful.slurm_system import PREFIX, SlurmSystem
from tests.integration.gpuhub.broker.stateful.world import SLURM_PROFILES

ENDS = st.sampled_from(
    (SlurmJobState.CANCELLED, SlurmJobState.TIMEOUT, SlurmJobState.PREEMPTED, SlurmJobState.NODE_FAIL)
)
PROFILE_NAMES = st.sampled_from(tuple(profile.name for profile in SLURM_PROFILES))


class SlurmBrokerMachine(BrokerMachine):
    """Users wait in Slurm's queue, among jobs that are not gpuhub's."""

    backend = "slurm"

    @property
    def slurm(self) -> SlurmSystem:
        assert self.world.slurm is not None
        return self.world.slurm

    def jobs(self, *states: SlurmJobState) -> list[SlurmJob]:
        """Return the jobs of all users in these states."""
        return [job for job in self.slurm.jobs.values() if job.state in states]

    def excuse(self, job: SlurmJob, why: str) -> None:
        self.people.excuse_lease(job.name.removeprefix(PREFIX), why)

    # -- rules that are others with Slurm -------------------------------------------------------------------------

    @rule(owner=OWNERS, server=SERVERS, profile=PROFILE_NAMES, wait_s=st.sampled_from((1, 3)))
    def start_server(self, owner: str, server: str, profile: str, wait_s: int) -> None:
        super().start_server(owner, server, profile, wait_s)

    @rule(owner=OWNERS, shape=SHAPES, way=WAYS, exclusive=st.booleans())
    def launch(self, owner: str, shape: dict[str, int], way: dict[str, bool], exclusive: bool) -> None:
        self.people.launch(owner, exclusive=exclusive, **way, **shape)
        self.world.advance(1)

    @rule(node=NODES, is_drained=st.booleans())
    def administrator(self, node: str, is_drained: bool) -> None:
        """Run `scontrol update state=drain` or `state=resume`."""
        (self.slurm.drained.add if is_drained else self.slurm.drained.discard)(node)

    # -- Slurm, its administrators and other users ----------------------------------------------------------------

    @rule(gpus=st.integers(1, 2), nice=st.integers(-1, 1))
    def sbatch(self, gpus: int, nice: int) -> None:
        self.slurm.sbatch(gpus, nice)

    @precondition(lambda self: self.slurm.live())
    @rule(index=INDEX, state=ENDS, is_given_on=st.booleans())
    def job_ends(self, index: int, state: SlurmJobState, is_given_on: bool) -> None:
        """End a job; its GPUs may be given to another job at once."""
        job = pick(self.slurm.live(), index)
        self.excuse(job, "its Slurm job was ended")
        self.slurm.end(job.id, state)
        if is_given_on:
            self.slurm.clean(job.id)
            self.slurm.start()

    @rule(index=INDEX)
    def job_is_forgotten(self, index: int) -> None:
        """Let Slurm forget a job that ended long ago."""
        ended = [job for job in self.slurm.jobs.values() if job.state not in LIVE_STATES]
        if ended:
            self.slurm.forget(pick(ended, index).id)

    @rule(index=INDEX, first=st.none() | INDEX)
    def job_is_requeued(self, index: int, first: int | None) -> None:
        """Run `scontrol requeue`; the job may start again at once, or after another one."""
        running = self.jobs(SlurmJobState.RUNNING, SlurmJobState.SUSPENDED)
        if not running:
            return
        job = pick(running, index)
        self.excuse(job, "its Slurm job was requeued")
        self.slurm.requeue(job.id)
        pending = self.jobs(SlurmJobState.PENDING)
        if first is not None and pending:
            self.slurm.start(pick(pending, first).id)
            self.slurm.start(job.id)

    @rule(index=INDEX)
    def job_is_suspended(self, index: int) -> None:
        """Run `scontrol suspend` or `scontrol resume`."""
        jobs = self.jobs(SlurmJobState.RUNNING, SlurmJobState.SUSPENDED)
        if jobs:
            job = pick(jobs, index)
            is_running = job.state is SlurmJobState.RUNNING
            self.slurm.change(job.id, state=SlurmJobState.SUSPENDED if is_running else SlurmJobState.RUNNING)

    @rule(is_silent=st.booleans())
    def slurm_falls_silent(self, is_silent: bool) -> None:
        self.slurm.is_silent = is_silent

    @rule(is_late=st.booleans())
    def answer_is_lost(self, is_late: bool) -> None:
        """Lose the response to the next submission, which succeeds now or later."""
        if is_late:
            self.slurm.late = 1
        else:
            self.slurm.lost_answers = 1

    @rule()
    def late_submissions_arrive(self) -> None:
        self.slurm.arrive()
