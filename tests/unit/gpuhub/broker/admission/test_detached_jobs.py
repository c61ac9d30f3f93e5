"""Jobs that outlive their notebook, and workers that join a run: the rules, and the whole way on simulated nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuhub.broker.admission import limits, validate
from gpuhub.broker.admission.validate import Requester
from gpuhub.broker.controllers.deadlines import find_silent_jobs
from gpuhub.broker.controllers.worker_launcher import build_spec, build_worker_list
from gpuhub.broker.state import mutations
from gpuhub.broker_api.schemas import JobRequest, JobState
from gpuhub.common.errors import InvalidRequest
from gpuhub.config.settings import JobSettings, ProfileSettings, SchedulingSettings, UserSettings
from gpuhub.domain import job_states
from gpuhub.domain.models import LedgerSnapshot
from gpuhub.domain.scheduler_input import build_allocation
from gpuhub.scheduler.interface import Quota, QuotaLimits
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.factories import build_running_job, build_transaction
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster

DETACHED = {"run_id": "run-000001", "detached": True, "name": "train.py"}


# -- rules ------------------------------------------------------------------------------------------------------------


def test_detached_job_ends_with_worker_0() -> None:
    """Others may come and go; its exit code is worker 0's."""
    job = build_running_job(3)[0].evolve(detached=True)
    job = job_states.record_worker_exit(job, 2, 1, "ended with exit code 1", 20.0)
    assert (job.state, job.exit_code) == (JobState.RUNNING, None)
    job = job_states.record_worker_exit(job, 0, 3, "ended with exit code 3", 21.0)
    assert (job.state, job.exit_code, job.reason) == (
        JobState.STOPPING,
        3,
        "worker 0 on rig1: ended with exit code 3",
    )
    assert job_states.stop(job, "stopped", 22.0).exit_code == 3


def test_stopped_detached_job_has_no_exit_code() -> None:
    """What its worker ends with when it is removed says nothing of the job."""
    job = job_states.stop(build_running_job(1)[0].evolve(detached=True), "stopped", 20.0)
    job = job_states.record_worker_exit(job, 0, 137, "killed (exit code 137)", 21.0)
    assert (job.state, job.reason, job.exit_code) == (JobState.STOPPING, "stopped", None)


@pytest.mark.parametrize("code", [143, 0])
def test_preempted_detached_job_is_requeued_despite_success(code: int) -> None:
    """Scripts that have written their checkpoint may end with success."""
    job = job_states.preempt(build_running_job(1)[0].evolve(detached=True), 60.0, 20.0)
    job = job_states.record_worker_exit(job, 0, code, "it ended", 21.0)
    assert (job.state, job.exit_code, job_states.is_checkpoint_done(job, 21.0)) == (JobState.PREEMPTING, None, True)


def test_detached_job_needs_no_heartbeat() -> None:
    """However long nobody is heard of."""
    job, lease = build_running_job(1)
    cluster = build_cluster()
    for is_detached, silent in ((False, ["j1"]), (True, [])):
        snapshot = LedgerSnapshot(leases={"l1": lease}, jobs={"j1": job.evolve(detached=is_detached)})
        assert find_silent_jobs(snapshot, cluster, lambda _: 1e6) == silent


def test_scheduler_keeps_the_node_of_worker_0() -> None:
    """An elastic one may lose any node but worker 0's."""
    job, lease = build_running_job(2)
    assert build_allocation(lease, job).leader is None
    assert build_allocation(lease, job.evolve(detached=True)).leader == "rig1"


def test_detached_workers_get_their_peers() -> None:
    """As the broker tells of workers, with the numbers and folder of the run."""
    job, lease = build_running_job(2)
    worker_list = json.loads(build_worker_list(job, lease))
    assert [(one["index"], one["node"], one["state"]) for one in worker_list] == [
        (0, "rig1", "running"),
        (1, "rig2", "running"),
    ]
    assert worker_list[0]["gpus"] == [{"uuid": "GPU-rig1", "node": "rig1", "model": "RTX 5090", "memory_mib": 32607}]
    spec = build_spec("gh", job.evolve(detached=True, preemptions=2), lease, job.workers[1])
    assert (spec.run_id, spec.run_index, spec.preemptions, spec.worker_list) == (
        "run-000001",
        1,
        2,
        build_worker_list(job, lease),
    )
    joined = build_spec("gh", job.evolve(joins="run-000009", first_worker=3), lease, job.workers[1])
    assert (joined.run_id, joined.run_index, joined.index, joined.worker_list) == ("run-000009", 4, 1, None)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"first_worker": 2}, "first_worker: goes with joins"),
        ({"joins": "run-000009", "detached": True}, "joins: a detached job leads its own workers"),
        ({"joins": "run-000001"}, "joins: run-000001 cannot join itself"),
        ({"detached": True, "nnodes": 1024}, "a detached job may have 512 GPUs at most"),
    ],
)
def test_contradictory_job_options_are_refused(asked: dict[str, Any], text: str) -> None:
    """With what would be right."""
    with pytest.raises(InvalidRequest, match=text):
        validate.check_consistency(JobRequest(run_id="run-000001", **asked))


def test_detached_job_may_use_the_quota_of_its_notebook() -> None:
    """The notebook can end while it waits; another launch waits with its notebook, and a joining one with its run."""
    draft = build_transaction(*build_running_job(2), now=20.0)
    quota = Quota(per_user=QuotaLimits(max_gpus=2))
    asker = Requester(owner="ada", groups=frozenset(), quota=quota)
    request = JobRequest(run_id="run-000002", nnodes=2)
    _, lease = validate.build_job(
        cluster=build_cluster(), transaction=draft, requester=asker, request=request, notebook=None
    )
    limits.check_gpu_limit(lease, quota)
    with pytest.raises(InvalidRequest, match="in addition to the notebook's 1; one user may hold at most 2"):
        limits.check_gpu_limit(lease, quota, notebook=1)
    with pytest.raises(InvalidRequest, match="in addition to the notebook's 1 and the joined run's 2"):
        limits.check_gpu_limit(lease, quota, notebook=1, joined=2)


# -- the whole way ----------------------------------------------------------------------------------------------------


def worker_on(running: Running, node: str) -> dict[str, Any]:
    (found,) = running.setting.nodes[node].of_kind("worker")
    return found


async def test_detached_job_continues_after_its_notebook_ends(setting: Setting) -> None:
    """Its notebook ends: it runs on. Worker 0 ends: the others are removed, and how it went is told afterwards."""
    async with asgi_broker(setting) as running:
        notebook = await ask(running, "ada", profile="cpu")
        await run_notebook(running, notebook)
        made = await post(running, "ada", "/jobs", {**DETACHED, "nnodes": 3}, 201)
        job = await wait_for_state(running, f"/jobs/{made['id']}", "running", "ada")
        assert (job["detached"], job["name"], job["exit_code"]) == (True, "train.py", None)
        assert job["created_at"] <= job["started_at"]
        await delete(running, "ada", f"/leases/{notebook['id']}")
        await wait_for_state(running, f"/leases/{notebook['id']}", "released", "ada")
        assert (await read(running, "ada", f"/jobs/{made['id']}"))["state"] == "running"
        first = job["workers"][0]["node"]
        setting.nodes[first].end_container(worker_on(running, first)["Id"], code=7)
        ended = await wait_for_state(running, f"/jobs/{made['id']}", "ended", "ada")
        assert (ended["exit_code"], ended["reason"]) == (7, f"worker 0 on {first}: ended with exit code 7")
        assert [node.of_kind("worker") for node in setting.nodes.values()] == [[], [], []]
        assert await read(running, "ada", "/jobs") == []
        (told,) = await read(running, "ada", "/jobs", ended=True)
        assert told == ended


async def test_detached_job_runs_the_image_of_its_profile(tmp_path: Any) -> None:
    """The named one, else its server's, else the default; one that is not there is refused, with those that are."""
    profiles = [
        ProfileSettings(name="cpu", title="No GPU", gpu_count=0, image="lab/notebook:1"),
        ProfileSettings(name="own", title="Own", image="lab/own:2"),
    ]
    setting = Setting(tmp_path, cluster=build_cluster(profiles=profiles))
    async with asgi_broker(setting) as running:
        refused = await post(running, "ada", "/jobs", {**DETACHED, "profile": "none"}, 422)
        assert refused["detail"] == "there is no profile 'none'; there are: cpu, own"
        await run_notebook(running, await ask(running, "ada", profile="cpu", server="lab"))
        for number, asked in enumerate(({"server": "lab"}, {"server": "lab", "profile": "own"}, {"server": "gone"})):
            await post(running, "ada", "/jobs", {**DETACHED, "run_id": f"run-00000{number}", **asked}, 201)
        jobs = {job.run_id: job for job in running.core.ledger.snapshot.jobs.values()}
    assert [jobs[f"run-00000{number}"].image for number in range(3)] == [
        "lab/notebook:1",
        "lab/own:2",
        "gpuhub/notebook:latest",
    ]
    assert {job.notebook_lease for job in jobs.values()} == {None}


async def test_job_runs_the_image_that_its_owner_chose(tmp_path: Any) -> None:
    """One that a profile offers which the owner may use; others are refused, with those that are offered."""
    profiles = [
        ProfileSettings(name="cpu", title="No GPU", gpu_count=0, images=("lab/llm:1",)),
        ProfileSettings(name="own", title="Own", image="lab/own:2"),
        ProfileSettings(name="nlp", title="NLP", image="lab/nlp:3", groups=("nlp",)),
    ]
    setting = Setting(tmp_path, cluster=build_cluster(profiles=profiles))
    async with asgi_broker(setting) as running:
        for asked, refusal in (
            ({"image": "evil"}, "no profile offers the image 'evil'; they offer: gpuhub/notebook:latest, lab/llm:1, lab/own:2"),
            ({"image": "lab/nlp:3"}, "no profile offers the image 'lab/nlp:3'; they offer: gpuhub/notebook:latest, "
             "lab/llm:1, lab/own:2"),
            ({"image": "lab/own:2", "profile": "cpu"}, "profile 'cpu' does not offer the image 'lab/own:2'; it offers: "
             "gpuhub/notebook:latest, lab/llm:1"),
        ):  # fmt: skip
            assert (await post(running, "ada", "/jobs", {**DETACHED, **asked}, 422))["detail"] == refusal
        for number, asked in enumerate(({"image": "lab/own:2"}, {"image": "lab/llm:1", "profile": "cpu"})):
            await post(running, "ada", "/jobs", {**DETACHED, "run_id": f"run-00000{number}", **asked}, 201)
        images = {job.run_id: job.image for job in running.core.ledger.snapshot.jobs.values()}
    assert images == {"run-000000": "lab/own:2", "run-000001": "lab/llm:1"}


async def test_detached_job_survives_a_broker_restart(setting: Setting) -> None:
    """A new broker continues with it, queued or running, and tells of it after its end."""
    async with asgi_broker(setting) as running:
        made = await post(running, "ada", "/jobs", {**DETACHED, "nnodes": 3}, 201)
        await wait_for_state(running, f"/jobs/{made['id']}", "running", "ada")
        waits = await post(running, "ada", "/jobs", {**DETACHED, "run_id": "run-000002"}, 201)
        assert (waits["state"], waits["lease"]["position"]) == ("waiting", 1)
    async with asgi_broker(setting) as running:
        job = await read(running, "ada", f"/jobs/{made['id']}")
        assert (job["state"], job["name"]) == ("running", "train.py")
        first = job["workers"][0]["node"]
        setting.nodes[first].end_container(worker_on(running, first)["Id"])
        ended = await wait_for_state(running, f"/jobs/{made['id']}", "ended", "ada")
        assert (ended["exit_code"], ended["reason"]) == (0, "done")
        await wait_for_state(running, f"/jobs/{waits['id']}", "running", "ada")
    async with asgi_broker(setting) as running:
        told = await read(running, "ada", "/jobs", ended=True)
        assert [(job["run_id"], job["state"]) for job in told] == [("run-000002", "running"), ("run-000001", "ended")]
        assert await read(running, "ben", "/jobs", ended=True) == []
        assert len(await read(running, "root", "/jobs", ended=True)) == 2


async def test_preempted_detached_job_is_queued_again(tmp_path: Any) -> None:
    """As others do, with its workers told how often that was."""
    setting = Setting(tmp_path, cluster=build_cluster(scheduling=SchedulingSettings(preemption=True)))
    async with asgi_broker(setting) as running:
        made = await post(running, "ada", "/jobs", {**DETACHED, "nnodes": 3, "scavenge": True}, 201)
        await wait_for_state(running, f"/jobs/{made['id']}", "running", "ada")
        held = await ask(running, "ben", profile="rtx5090")
        await wait_for_state(running, f"/jobs/{made['id']}", "preempting", "ada")
        for node in setting.nodes.values():
            node.end_container(node.of_kind("worker")[0]["Id"], code=143)
        waiting = await wait_for_state(running, f"/jobs/{made['id']}", "waiting", "ada")
        assert (waiting["preemptions"], waiting["started_at"], waiting["exit_code"]) == (1, None, None)
        await delete(running, "ben", f"/leases/{held['id']}")
        await wait_for_state(running, f"/jobs/{made['id']}", "running", "ada")
        assert {spec.preemptions for spec in running.workers.specs[-3:]} == {1}


async def test_joining_workers_end_with_their_run(setting: Setting) -> None:
    """They read its folder and are numbered after its own; nobody else's run, and none that is over, can be joined."""
    joining = {"run_id": "run-000002", "joins": "run-000001", "first_worker": 1}
    async with asgi_broker(setting) as running:
        refused = await post(running, "ada", "/jobs", joining, 422)
        assert refused["detail"] == "joins: ada has no run 'run-000001' that is still running"
        base = await post(running, "ada", "/jobs", {"run_id": "run-000001"}, 201)
        assert (await post(running, "ben", "/jobs", joining, 422))["code"] == "invalid-request"
        made = await post(running, "ada", "/jobs", joining, 201)
        job = await wait_for_state(running, f"/jobs/{made['id']}", "running", "ada")
        assert (job["joins"], [worker["index"] for worker in job["workers"]]) == ("run-000001", [0])
        assert [(spec.run_id, spec.run_index) for spec in running.workers.specs] == [
            ("run-000001", 0),
            ("run-000001", 1),
        ]
        chained = await post(running, "ada", "/jobs", {**joining, "run_id": "run-000003", "joins": "run-000002"}, 422)
        assert chained["detail"] == "joins: run-000002 has itself joined run-000001: name that one"
        await delete(running, "ada", f"/jobs/{base['id']}")
        ended = await wait_for_state(running, f"/jobs/{made['id']}", "ended", "ada")
        assert ended["reason"] == "the run that it joined ended: run-000001"


async def test_ended_jobs_are_listed_and_then_forgotten(tmp_path: Any) -> None:
    """Within `remember`; the newest at most; usage counts on."""
    clock = AheadClock()
    users = UserSettings(allowed=("ada",), max_waiting=1000)
    setting = Setting(tmp_path, cluster=build_cluster(jobs=JobSettings(remember="1h"), users=users), clock=clock)
    async with asgi_broker(setting) as running:
        made = await post(running, "ada", "/jobs", DETACHED, 201)
        await wait_for_state(running, f"/jobs/{made['id']}", "running", "ada")
        await delete(running, "ada", f"/jobs/{made['id']}")
        await wait_for_state(running, f"/jobs/{made['id']}", "ended", "ada")
        array = {"job": {**DETACHED, "run_id": "run-00000a", "models": ["RTX 5090"]}, "count": 250}
        await post(running, "ada", "/jobs/arrays", array, 201)
        told = await read(running, "ada", "/jobs", ended=True)
        assert (len(told), {job["array"] for job in told}) == (200, {"run-00000a"})
        await running.core.ledger.change(
            mutations.end_leases(dict.fromkeys(running.core.ledger.snapshot.leases, "over"))
        )
        await until(lambda: not running.core.ledger.snapshot.jobs, "all have ended")
        told = await read(running, "ada", "/jobs", ended=True)
        assert len(told) == 200
        assert [job["created_at"] for job in told] == sorted((job["created_at"] for job in told), reverse=True)
        clock.ahead_s = 3700.0
        assert await read(running, "ada", "/jobs", ended=True) == []
        spent = running.store.load_usage(0.0)
        await running.core.forget_ended()
        await read(running, "ada", f"/jobs/{made['id']}", 404)
        assert running.store.load_usage(0.0) == spent != []
