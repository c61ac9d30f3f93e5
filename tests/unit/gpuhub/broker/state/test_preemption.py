"""Jobs that give their GPUs back when others need them: the rules, and the whole way on simulated nodes."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker.state.effects import apply_decision, propagate
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import JobState, LeaseState, WorkerState
from gpuhub.config.settings import SchedulingSettings
from gpuhub.domain import job_states, lease_states, suspension
from gpuhub.domain.job_states import PREEMPTED
from gpuhub.domain.scheduler_input import HOST_SUFFIX, build_allocation, list_values
from gpuhub.scheduler.interface import Allocation, Preemption, SchedulingDecision
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.factories import build_running_job, build_transaction
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import build_cluster

JOB = {"run_id": "run-000001", "nproc_per_node": 1}


def decide(draft: Transaction, *nodes: str, is_whole: bool, allocation: str = "l1") -> None:
    preemption = Preemption(allocation_id=allocation, nodes=frozenset(nodes), is_whole=is_whole, for_request="l9")
    apply_decision(
        draft,
        SchedulingDecision(preemptions=(preemption,)),
        identity_of=lambda _: (None, None),
        grace_s=60.0,
        find_moved_mib=lambda *_: None,
    )


def test_a_preempted_job_has_time_for_its_checkpoint() -> None:
    """Its lease continues meanwhile, and the scheduler knows that it is ending; said again, the time does not begin anew."""
    draft = build_transaction(*build_running_job(), now=100.0)
    decide(draft, "rig1", "rig2", is_whole=True)
    job, lease = draft.jobs["j1"], draft.leases["l1"]
    assert (job.state, job.checkpoint_until, lease.state) == (JobState.PREEMPTING, 160.0, LeaseState.ACTIVE)
    holding = build_allocation(lease, job)
    assert (holding.is_ending, len(holding.node_allocations)) == (True, 2)
    draft.now = 110.0
    decide(draft, "rig1", "rig2", is_whole=True)
    assert draft.jobs["j1"].checkpoint_until == 160.0


def test_a_suspended_job_is_preempted_for_its_memory() -> None:
    """Who needs the memory that its container keeps gets it, but not while it is being moved."""
    job, lease = build_running_job(scavenge=True)
    waiting = suspension.prove(suspension.begin_job(lease, 8192, 2.0), 8192, 3.0)
    for suspended, state in (
        (suspension.begin_job(lease, 8192, 2.0), JobState.RUNNING),
        (suspension.regrant(waiting, 4.0), JobState.RUNNING),
        (waiting, JobState.PREEMPTING),
    ):
        draft = build_transaction(job, suspended, now=100.0)
        decide(draft, "rig1", is_whole=True, allocation=f"l1{HOST_SUFFIX}")
        assert draft.jobs["j1"].state is state
    values = list_values(waiting, draft.jobs["j1"])
    assert [value.is_ending for value in values if isinstance(value, Allocation)] == [True]
    assert len(values) == 1


def test_preempted_job_ends_with_its_workers_or_after_the_grace() -> None:
    """Whichever comes first; a worker's own end is no failure then."""
    job, _ = build_running_job()
    job = job_states.preempt(job, 160.0, 100.0)
    assert not job_states.is_checkpoint_done(job, 159.0)
    assert job_states.is_checkpoint_done(job, 160.0)
    for index in range(2):
        job = job_states.record_worker_exit(job, index, 143, "ended with exit code 143", 120.0)
    assert (job.state, job_states.is_checkpoint_done(job, 121.0)) == (JobState.PREEMPTING, True)


def test_preempted_request_is_requeued_with_its_age() -> None:
    """A new lease with the old one's demands, groups and age, once the old one's GPUs are proven free."""
    job, lease = build_running_job(scavenge=True)
    draft = build_transaction(job_states.preempt(job, 160.0, 100.0), lease, now=160.0)
    draft.put_lease(lease_states.release(lease, PREEMPTED, draft.now))
    step = propagate(draft, 0)
    assert draft.jobs["j1"].state is JobState.PREEMPTING
    for node in ("rig1", "rig2"):
        draft.put_lease(lease_states.prove_released(draft.leases["l1"], node, 161.0))
    propagate(draft, step)
    job = draft.jobs["j1"]
    again = draft.leases[job.lease_id]
    assert (job.state, job.preemptions, job.workers, job.checkpoint_until) == (JobState.WAITING, 1, (), None)
    assert (again.state, again.created_at, again.seq) == (LeaseState.REQUESTED, 1.0, 8)
    assert (again.resources, again.groups, again.time_limit_s) == (lease.resources, lease.groups, lease.time_limit_s)
    assert again.key != lease.key
    assert draft.leases["l1"].state is LeaseState.RELEASED


@pytest.mark.parametrize("reason", ["stopped", "its time limit was reached"])
def test_job_stopped_during_preemption_is_not_requeued(reason: str) -> None:
    """Who stops a job while it is preempted does not get it back."""
    job, lease = build_running_job()
    draft = build_transaction(job_states.preempt(job, 160.0, 100.0), lease, now=120.0)
    released = lease_states.release(lease, reason, draft.now)
    for node in ("rig1", "rig2"):
        released = lease_states.prove_released(released, node, draft.now)
    draft.put_lease(released)
    propagate(draft, 0)
    assert (draft.jobs["j1"].state, draft.jobs["j1"].reason) == (JobState.ENDED, reason)
    assert list(draft.leases) == ["l1"]


def test_elastic_job_continues_after_shrinking() -> None:
    """Its other workers keep their numbers; the GPUs stay with the lease until there is proof."""
    draft = build_transaction(*build_running_job(nodes=3, least_nodes=1), now=100.0)
    decide(draft, "rig2", is_whole=False)
    job, lease = draft.jobs["j1"], draft.leases["l1"]
    assert (job.state, [worker.index for worker in job.workers]) == (JobState.RUNNING, [0, 2])
    holding = build_allocation(lease, job)
    assert (holding.is_ending, holding.shrinking, len(holding.node_allocations)) == (False, {"rig2"}, 3)
    job = job_states.record_worker_exit(job, 1, 143, "ended", 101.0)
    assert job.state is JobState.RUNNING
    proven = lease_states.prove_released(lease, "rig2", 102.0)
    assert [share.node for share in build_allocation(proven, job).node_allocations] == ["rig1", "rig3"]
    for index in (0, 2):
        job = job_states.record_worker_exit(job, index, 0, "ended with exit code 0", 103.0)
    assert (job.state, job.reason) == (JobState.STOPPING, "all workers ended")


def test_elastic_job_releases_the_gpu_of_a_lost_worker() -> None:
    """So that the launch can grow onto it again; one that is not elastic, or has too few left, keeps what it has."""
    job, lease = build_running_job(nodes=3, least_nodes=2)
    job = job.evolve(min_nnodes=2)
    lost = job_states.record_worker_exit(job, 1, 137, "killed", 100.0)
    draft = build_transaction(job, lease, now=100.0)
    draft.put_job(lost)
    propagate(draft, 0)
    assert [gpu.node for gpu in draft.leases["l1"].gpus if gpu.shrink_requested_at == 100.0] == ["rig2"]
    assert draft.jobs["j1"].state is JobState.RUNNING
    two = job_states.record_worker_exit(lost, 2, 137, "killed", 101.0)
    rigid = job_states.record_worker_exit(job.evolve(min_nnodes=3), 1, 137, "killed", 100.0)
    assert [job_states.find_idle_nodes(one) for one in (lost, two, rigid)] == [{"rig2"}, frozenset(), frozenset()]


def test_starting_job_runs_once_the_missing_node_is_released() -> None:
    """Nothing is waited for that will not come."""
    job, lease = build_running_job(nodes=2, least_nodes=1)
    starting = job_states.record_worker_start(job_states.start(job, lease, 10.0), 0, "c0", 11.0)
    assert starting.state is JobState.STARTING
    assert job_states.shrink(starting, {"rig2"}, 12.0).state is JobState.RUNNING


@pytest.fixture
def preemption_setting(setting: Setting) -> Setting:
    """Scavengers give way, with a second for a checkpoint."""
    setting.cluster = build_cluster(scheduling=SchedulingSettings(preemption=True, preempt_grace="1s", fair_share="0s"))
    return setting


async def run_job(running: Running, **body: Any) -> Any:
    job = await post(running, "ada", "/jobs", {**JOB, **body}, 201)
    return await wait_for_state(running, f"/jobs/{job['id']}", "running")


async def test_scavenging_job_is_preempted_and_restarted(preemption_setting: Setting) -> None:
    """The notebook gets its GPU; the job waits again by itself, and runs when the GPU is free."""
    async with asgi_broker(preemption_setting) as running:
        job = await run_job(running, nnodes=3, scavenge=True)
        lease = await ask(running, "ben")
        assert lease["state"] == "requested"
        assert (await read(running, "ada", f"/jobs/{job['id']}"))["state"] == "preempting"
        granted = await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        assert granted["nodes"] == ["rig1"]
        waiting = await wait_for_state(running, f"/jobs/{job['id']}", "waiting")
        assert (waiting["preemptions"], waiting["workers"]) == (1, [])
        assert waiting["lease"]["id"] != job["lease"]["id"]
        await run_notebook(running, granted)
        await delete(running, "ben", f"/leases/{lease['id']}")
        again = await wait_for_state(running, f"/jobs/{job['id']}", "running")
        assert len(again["workers"]) == 3
        texts = [event["kind"] for event in await read(running, "ada", "/events")]
        assert texts.index("job.preempting") < texts.index("job.requeued")


async def test_preemption_continues_after_a_broker_restart(preemption_setting: Setting) -> None:
    """In the middle of it: the grace is over sooner or later, and the job waits again."""
    async with asgi_broker(preemption_setting) as running:
        job = await run_job(running, nnodes=3, scavenge=True)
        lease = await ask(running, "ben")
        assert (await read(running, "ada", f"/jobs/{job['id']}"))["state"] == "preempting"
    async with asgi_broker(preemption_setting) as running:
        await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        assert (await wait_for_state(running, f"/jobs/{job['id']}", "waiting"))["preemptions"] == 1


async def test_elastic_job_releases_one_node(preemption_setting: Setting) -> None:
    """The notebook gets the node that it needs; the job continues with the others."""
    async with asgi_broker(preemption_setting) as running:
        job = await run_job(running, nnodes=3, min_nnodes=1)
        lease = await ask(running, "ben")
        granted = await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        assert granted["nodes"] == ["rig1"]
        less = await read(running, "ada", f"/jobs/{job['id']}")
        assert (less["state"], sorted(worker["node"] for worker in less["workers"])) == ("running", ["rig2", "rig3"])
        assert all(worker["state"] == WorkerState.RUNNING for worker in less["workers"])
        await until(lambda: not preemption_setting.nodes["rig1"].of_kind("worker"), "the worker on rig1 is gone")


async def test_nothing_is_preempted_without_the_policy(setting: Setting) -> None:
    """Preemption is the administrator's to allow."""
    async with asgi_broker(setting) as running:
        job = await run_job(running, nnodes=3, scavenge=True)
        lease = await ask(running, "ben")
        assert lease["state"] == "requested"
        assert (await read(running, "ada", f"/jobs/{job['id']}"))["state"] == "running"
