"""Whatever happens at whatever moment: no GPU is used twice, no job outlives its lease, and no lease its job.

Users, Slurm, its administrator, other users' jobs and the broker's deaths act in any order. A node's Epilog removes
containers by their label before Slurm gives their GPUs on, as the real one does.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuhub import names
from gpuhub.broker import leases as rules
from gpuhub.broker.auth import Identity
from gpuhub.broker.rows import LeaseRow
from gpuhub.broker.schemas import Activation, LeaseState, Purpose
from gpuhub.errors import GpuhubError
from gpuhub.slurm.values import LIVE, Job, State, Submission
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.slurm_brokers import INSTANCE, Desk, Site, find_submitter, slurm_cluster

T = TypeVar("T")
CARDS = {
    "rig1": [("NVIDIA GeForce RTX 5090", 32607), ("NVIDIA GeForce RTX 5090", 32607)],
    "rig2": [("NVIDIA GeForce RTX 5070", 12227), ("NVIDIA GeForce RTX 5090", 32607)],
}
TYPES = {"rig1": ("rtx5090", "rtx5090"), "rig2": ("rtx5090", "rtx5070")}
#: GPUs by node and Slurm's number.
UUIDS = {
    ("rig1", 0): "GPU-rig1-0",
    ("rig1", 1): "GPU-rig1-1",
    ("rig2", 0): "GPU-rig2-1",
    ("rig2", 1): "GPU-rig2-0",
}
PREFIX = names.slurm_job(INSTANCE, "")
_PICK = st.integers(min_value=0, max_value=30)


class SlurmMachine(RuleBasedStateMachine):
    """A broker on a scripted Slurm, and everybody who acts on either."""

    @initialize()
    def begin(self) -> None:
        """Nobody has anything."""
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-machine-"))
        self.slurm = ScriptedSlurm(TYPES)
        self.site = Site(self.folder, cluster=slurm_cluster(CARDS), cards=CARDS, slurm=self.slurm)
        self.desk: Desk = self.run(self.site.start())
        #: Containers that run: the job on their label and their GPUs, by lease.
        self.containers: dict[str, tuple[int, frozenset[str]]] = {}
        self.asked: list[str] = []

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Let something happen, and all that follows at once."""
        return self.loop.run_until_complete(what)

    def pick(self, found: list[T], at: int) -> T | None:
        """One of them, if there is one."""
        return found[at % len(found)] if found else None

    def leases(self, *states: LeaseState) -> list[LeaseRow]:
        """Open leases in these states, the oldest first."""
        rows = self.desk.core.ledger.snapshot.leases.values()
        return sorted((row for row in rows if row.state in states), key=lambda row: row.seq)

    def jobs(self, *states: State) -> list[Job]:
        """Jobs in these states, anybody's."""
        return [job for job in self.slurm.jobs.values() if job.state in states]

    # -- users ----------------------------------------------------------------------------------------------------

    @rule(
        owner=st.sampled_from(["ada", "ben"]), profile=st.sampled_from(["rtx5090", "any", "cpu"]), far=st.integers(0, 3)
    )
    def ask(self, owner: str, profile: str, far: int) -> None:
        """Somebody wants a notebook, and gets so far with it."""
        self.asked.append(self.run(self.desk.ask(owner, profile)).id)
        self.go(far)

    @rule(least=st.integers(1, 2), gpus=st.integers(1, 2), far=st.integers(0, 3))
    def launch(self, least: int, gpus: int, far: int) -> None:
        """Somebody wants workers on two nodes, or on as many as there are, and gets so far with them."""
        self.asked.append(self.run(self.desk.launch(nnodes=2, min_nnodes=least, nproc_per_node=gpus)).id)
        self.go(far)

    def go(self, far: int) -> None:
        """Submitted, started, granted."""
        for act in (self.step, self.slurm.start, self.step)[:far]:
            act()

    @rule(at=_PICK)
    def give_up(self, at: int) -> None:
        """Somebody stops what waits or runs."""
        lease = self.pick(self.leases(LeaseState.REQUESTED, LeaseState.GRANTED, LeaseState.ACTIVE), at)
        if lease is not None:
            self.run(self.desk.core.end_leases({lease.id: "stopped"}))

    @rule(at=_PICK, meanwhile=st.sampled_from(["", "", "ended", "given on", "moved"]))
    def open(self, at: int, meanwhile: str) -> None:
        """A container of a granted lease is started, if the broker lets it; its job may have ended since."""
        granted = [row for row in self.leases(LeaseState.GRANTED, LeaseState.ACTIVE) if row.id not in self.containers]
        lease = self.pick(granted, at)
        if lease is None:
            return
        assert lease.slurm_job is not None
        if meanwhile == "moved" and self.slurm.jobs[lease.slurm_job].state is State.RUNNING:
            self.epilog(lease.slurm_job)
            self.slurm.requeue(lease.slurm_job)
            self.sbatch(gpus=1, nice=-1)
            self.slurm.start()
        elif meanwhile and lease.slurm_job in self.slurm.jobs:
            self.finish(lease.slurm_job, State.TIMEOUT, is_given_on=meanwhile == "given on")
        try:
            if lease.purpose is Purpose.NOTEBOOK:
                who = Identity(name=lease.owner)
                self.run(self.desk.broker.activate(who, lease.id, Activation(container_id="c" * 64)))
            else:
                self.run(self.desk.queue.refuse_ended(lease, patience_s=0))
        except GpuhubError:
            return
        self.containers[lease.id] = lease.slurm_job, frozenset(gpu.uuid for gpu in lease.held)

    @rule()
    def keep_nodes(self) -> None:
        """The keeper removes containers of ending leases, and proves that they are gone."""
        for lease in self.leases(*rules.ENDING):
            self.containers.pop(lease.id, None)
            self.run(self.desk.prove_gone(lease.id))

    # -- Slurm ----------------------------------------------------------------------------------------------------

    @rule()
    def start(self) -> None:
        """Slurm starts what fits."""
        self.slurm.start()

    @rule(gpus=st.integers(1, 2), nice=st.integers(-1, 1))
    def sbatch(self, gpus: int, nice: int) -> None:
        """Another user submits a job beside gpuhub."""
        eve = self.run(find_submitter("eve"))
        self.slurm.add(Submission(name="train", submitter=eve, script="", gpus_per_node=gpus, nice=nice))

    @rule(
        at=_PICK,
        state=st.sampled_from([State.CANCELLED, State.TIMEOUT, State.PREEMPTED, State.NODE_FAIL]),
        is_given_on=st.booleans(),
    )
    def end(self, at: int, state: State, is_given_on: bool) -> None:
        """A job ends from outside; what it had may be given on at once."""
        job = self.pick(self.slurm.live(), at)
        if job is not None:
            self.finish(job.id, state, is_given_on=is_given_on)

    def finish(self, job_id: int, state: State, *, is_given_on: bool) -> None:
        """A job is over; its nodes may be cleaned and given on at once."""
        self.slurm.end(job_id, state)
        if is_given_on:
            self.epilog(job_id)
            self.slurm.clean(job_id)
            self.slurm.start()

    @rule(at=_PICK)
    def clean(self, at: int) -> None:
        """The Epilog runs on a job's nodes; later Slurm forgets the job."""
        ended = [job for job in self.slurm.jobs.values() if job.state not in LIVE]
        job = self.pick(ended, at)
        if job is not None:
            self.epilog(job.id)
            if job.is_completing:
                self.slurm.clean(job.id)
            else:
                self.slurm.forget(job.id)

    @rule(at=_PICK, first=st.none() | _PICK)
    def requeue(self, at: int, first: int | None) -> None:
        """`scontrol requeue`; it may start anew at once, after another one."""
        job = self.pick(self.jobs(State.RUNNING, State.SUSPENDED), at)
        if job is not None:
            self.epilog(job.id)
            self.slurm.requeue(job.id)
            other = None if first is None else self.pick(self.jobs(State.PENDING), first)
            if other is not None:
                self.slurm.start(other.id)
                self.slurm.start(job.id)

    @rule(at=_PICK)
    def suspend(self, at: int) -> None:
        """`scontrol suspend`, or `resume`."""
        job = self.pick(self.jobs(State.RUNNING, State.SUSPENDED), at)
        if job is not None:
            other = State.SUSPENDED if job.state is State.RUNNING else State.RUNNING
            self.slurm.change(job.id, state=other)

    @rule(is_short=st.booleans())
    def fall_silent(self, is_short: bool) -> None:
        """Slurmctld stops answering, for a look or for longer."""
        self.slurm.is_silent = True
        self.step()
        self.slurm.is_silent = not is_short

    @precondition(lambda self: self.slurm.is_silent)
    @rule()
    def answer(self) -> None:
        """It answers again."""
        self.slurm.is_silent = False

    @rule(is_late=st.booleans())
    def lose_answer(self, is_late: bool) -> None:
        """The next submission goes through, now or later, and nobody hears of it."""
        if is_late:
            self.slurm.late = 1
        else:
            self.slurm.lost_answers = 1

    @rule()
    def arrive(self) -> None:
        """What went unanswered goes through."""
        self.slurm.arrive()

    def epilog(self, job_id: int) -> None:
        """Containers with a job's number on their label are removed."""
        self.containers = {lease: one for lease, one in self.containers.items() if one[0] != job_id}

    # -- the broker -----------------------------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        """It looks."""
        self.run(self.desk.queue.step())
        for job, at_once in self.slurm.cancelled:
            # What is cancelled at once is cleaned at once.
            if at_once:
                self.epilog(job)
        self.slurm.cancelled.clear()

    @rule(saves=st.integers(0, 3))
    def die(self, saves: int) -> None:
        """It dies within a look, after it has stored so much, and is started anew."""
        store, save = self.desk.core.store, self.desk.core.store.save
        left = [saves]

        def save_some(changes: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("killed")
            save(changes)

        store.save = save_some  # type: ignore[method-assign]
        self.step()
        self.run(self.site.stop(self.desk))
        self.desk = self.run(self.site.start())

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    @precondition(lambda self: hasattr(self, "desk"))
    def no_gpu_is_used_twice(self) -> None:
        """What a container has, the job on its label has in Slurm, and no other container."""
        seen: set[str] = set()
        for job, uuids in self.containers.values():
            has = {UUIDS[node, number] for node, gpus in self.slurm.held.get(job, {}).items() for number in gpus}
            assert uuids <= has
            assert not uuids & seen
            seen |= uuids

    @invariant()
    @precondition(lambda self: hasattr(self, "desk"))
    def what_is_granted_has_a_job(self) -> None:
        """And nothing is held twice in the ledger."""
        held: list[str] = []
        for lease in self.leases(LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.RELEASING):
            assert lease.slurm_job is not None
            held += [gpu.uuid for gpu in lease.held]
        assert len(held) == len(set(held))

    def teardown(self) -> None:
        """When all have calmed down, leases and jobs are the same things."""
        if not hasattr(self, "desk"):
            return
        try:
            self.settle()
        finally:
            self.run(self.site.stop(self.desk))
            self.loop.close()
            shutil.rmtree(self.folder)

    def settle(self) -> None:
        """Slurm answers, what is late arrives, and the broker looks some more times."""
        self.slurm.is_silent = False
        self.slurm.late = self.slurm.lost_answers = 0
        self.slurm.arrive()
        for _ in range(4):
            self.step()
            self.keep_nodes()
        open_leases = self.desk.core.ledger.snapshot.leases
        ours = {job.name.removeprefix(PREFIX): job for job in self.slurm.live() if job.name.startswith(PREFIX)}
        assert len(ours) == sum(job.name.startswith(PREFIX) for job in self.slurm.live())
        assert {lease: job.id for lease, job in ours.items()} == {
            lease.id: lease.slurm_job for lease in open_leases.values()
        }
        for lease_id in self.asked:
            lease = self.desk.lease(lease_id)
            assert lease.is_open == (lease_id in ours)
            assert lease.is_open or lease.reason


class TestSlurmMachine(SlurmMachine.TestCase):  # type: ignore[misc, name-defined]
    """Found by pytest."""

    settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
