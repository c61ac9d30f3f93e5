"""The whole broker with Slurm as its backend and its controllers running, over HTTP on simulated nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common import names
from gpuhub.config.slurm import SlurmSettings
from gpuhub.slurm_client.models import SlurmJobState, SlurmSubmission
from tests.support.broker.calls import ask, delete, open_socket, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.slurm.scripted_backend import build_backend, find_submitter, slurm_cluster
from tests.support.slurm.scripted_slurm import ScriptedSlurm


@pytest.fixture
def slurm() -> ScriptedSlurm:
    return ScriptedSlurm()


@pytest.fixture
def setting(tmp_path: Path, slurm: ScriptedSlurm) -> Setting:
    return Setting(tmp_path, cluster=slurm_cluster(), build_backend=lambda cluster: build_backend(cluster, slurm))


async def wait_submitted(slurm: ScriptedSlurm) -> int:
    found: int = await until(lambda: next((job.id for job in slurm.live()), None), "it is submitted")
    return found


async def launch(running: Running, nnodes: int = 1) -> str:
    body = {"run_id": "run-000001", "nnodes": nnodes}
    return str((await post(running, "ada", "/jobs", body, status=201))["id"])


async def test_notebook_starts_and_ends_with_its_slurm_job(setting: Setting, slurm: ScriptedSlurm) -> None:
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        path = f"/leases/{lease['id']}"
        assert lease["state"] == "requested"
        job = await wait_submitted(slurm)
        slurm.start(job)
        granted = await wait_for_state(running, path, "granted")
        assert granted["slurm_job"] == job
        container = await run_notebook(running, granted)
        slurm.scancel(job)
        ended = await wait_for_state(running, path, "released")
        assert container not in setting.nodes["rig1"].containers
        assert "cancelled" in ended["reason"]


async def test_stopped_notebook_cancels_its_slurm_job_after_its_container(
    setting: Setting, slurm: ScriptedSlurm
) -> None:
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        slurm.start(await wait_submitted(slurm))
        container = await run_notebook(running, await wait_for_state(running, f"/leases/{lease['id']}", "granted"))
        seen: list[bool] = []
        cancel = slurm.cancel

        async def note(job_id: int, **how: Any) -> None:
            seen.append(container in setting.nodes["rig1"].containers)
            await cancel(job_id, **how)

        slurm.cancel = note  # type: ignore[method-assign]
        await delete(running, "ada", f"/leases/{lease['id']}")
        await until(lambda: not slurm.live(), "the job is cancelled")
        assert seen
        assert not any(seen)


async def test_workers_are_labelled_and_end_with_their_slurm_job(setting: Setting, slurm: ScriptedSlurm) -> None:
    async with asgi_broker(setting) as running:
        path = f"/jobs/{await launch(running, 3)}"
        job = await wait_submitted(slurm)
        slurm.start(job)
        await wait_for_state(running, path, "running")
        workers = [one for node in setting.nodes.values() for one in node.of_kind(names.KIND_WORKER)]
        assert [one["Labels"][names.LABEL_SLURM_JOB] for one in workers] == [str(job)] * 3
        slurm.end(job, SlurmJobState.PREEMPTED)
        ended = await wait_for_state(running, path, "ended")
        assert ended["reason"] == "Slurm preempted its job for one with a higher priority"
        assert not any(node.of_kind(names.KIND_WORKER) for node in setting.nodes.values())


async def test_no_worker_starts_if_its_slurm_job_ended_during_creation(setting: Setting, slurm: ScriptedSlurm) -> None:
    async with asgi_broker(setting) as running:
        running.workers.held = asyncio.Event()
        path = f"/jobs/{await launch(running)}"
        job = await wait_submitted(slurm)
        slurm.start(job)
        await until(lambda: running.workers.specs, "the worker is being made")
        slurm.scancel(job)
        running.workers.held.set()
        await wait_for_state(running, path, "ended")
        assert not any(node.of_kind(names.KIND_WORKER) for node in setting.nodes.values())
        assert running.workers.specs[0].slurm_job == job


async def test_restarted_broker_resumes_running_leases(setting: Setting, slurm: ScriptedSlurm) -> None:
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        job = await wait_submitted(slurm)
        slurm.start(job)
        await run_notebook(running, await wait_for_state(running, f"/leases/{lease['id']}", "granted"))
    async with asgi_broker(setting) as running:
        await until(lambda: slurm.kept.count(job) == 2, "the new broker has polled Slurm")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        assert slurm.submitted == 1


@pytest.fixture
def plain(setting: Setting) -> Setting:
    """A cluster whose nodes have no Docker daemon."""
    setting.cluster = slurm_cluster(slurm=SlurmSettings(runtime="plain", command=Path("/opt/singleuser")))
    for node in setting.nodes.values():
        node.is_reachable = False
    return setting


async def test_without_docker_the_notebook_runs_in_the_slurm_job(plain: Setting, slurm: ScriptedSlurm) -> None:
    """The hub's spawner submits the job; missing daemons are not queried, and Slurm proves the end."""
    async with asgi_broker(plain, wait=False) as running:
        await until(lambda: slurm.polls > 0, "Slurm was asked")
        lease = await ask(running, "ada")
        name = names.slurm_job_name("ghtest", lease["id"])
        ada = await find_submitter("ada")
        gpu = {"gpus_per_node": 1, "gpu_type": "rtx5090"}
        job = slurm.add(SlurmSubmission(name=name, submitter=ada, script="", cpus=4, memory_mib=16384, **gpu))
        slurm.start(job)
        path = f"/leases/{lease['id']}"
        granted = await wait_for_state(running, path, "granted")
        assert (granted["slurm_job"], len(granted["gpus"])) == (job, 1)
        await post(running, "spawner", f"{path}/activate", {"container_id": f"{job:012x}"})
        await delete(running, "ada", path)
        await until(lambda: not slurm.live(), "the job is cancelled")
        assert slurm.cancelled[-1] == (job, False)
        assert (await read(running, "ada", path))["state"] == "releasing"
        slurm.clean(job)
        await wait_for_state(running, path, "released")


async def launch_without_docker(running: Running, slurm: ScriptedSlurm, **body: Any) -> tuple[str, int]:
    """Launch a job and return its path and its running Slurm job."""
    await until(lambda: slurm.polls > 0, "Slurm was asked")
    made = await post(running, "ada", "/jobs", {"run_id": "run-000001", "nnodes": 2, **body}, status=201)
    job = await wait_submitted(slurm)
    slurm.start(job)
    return str(made["id"]), job


async def test_without_docker_the_slurm_job_runs_the_workers(plain: Setting, slurm: ScriptedSlurm) -> None:
    async with asgi_broker(plain, wait=False) as running:
        path, job = await launch_without_docker(running, slurm)
        path = f"/jobs/{path}"
        script = slurm.asked[job].script
        assert "exec srun" in script
        assert '"GPU_LAUNCH_RUN": "run-000001"' in script
        assert slurm.asked[job].nodes == slurm.asked[job].min_nodes == 2
        found = await wait_for_state(running, path, "running")
        assert [(one["index"], one["node"], one["state"]) for one in found["workers"]] == [
            (0, "rig1", "running"),
            (1, "rig2", "running"),
        ]
        await delete(running, "ada", path)
        await until(lambda: not slurm.live(), "the job is cancelled")
        # Its programs may write a checkpoint: SIGTERM comes first.
        assert slurm.cancelled[-1] == (job, False)
        assert (await read(running, "ada", path))["state"] == "stopping"
        slurm.clean(job)
        await wait_for_state(running, path, "ended")


async def test_without_docker_scancel_of_a_launch_is_reported(plain: Setting, slurm: ScriptedSlurm) -> None:
    async with asgi_broker(plain, wait=False) as running:
        path, job = await launch_without_docker(running, slurm)
        await wait_for_state(running, f"/jobs/{path}", "running")
        slurm.scancel(job)
        slurm.clean(job)
        ended = await wait_for_state(running, f"/jobs/{path}", "ended")
        assert ended["reason"] == "its Slurm job was cancelled"
        assert ended["exit_code"] is None


async def test_without_docker_a_failed_launch_names_its_log_file(plain: Setting, slurm: ScriptedSlurm) -> None:
    async with asgi_broker(plain, wait=False) as running:
        path, job = await launch_without_docker(running, slurm)
        slurm.end(job, SlurmJobState.FAILED)
        slurm.clean(job)
        ended = await wait_for_state(running, f"/jobs/{path}", "ended")
        said = f"its Slurm job failed; its output is in ~/.gpu_launch/jobs/run-000001/logs/slurm-{job}.log"
        assert ended["reason"] == said


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize(
    ("state", "code", "reason"),
    [(SlurmJobState.COMPLETED, 0, "done"), (SlurmJobState.FAILED, 3, "ended with exit code 3")],
)
async def test_without_docker_a_detached_job_ends_as_its_slurm_job_does(
    plain: Setting, slurm: ScriptedSlurm, state: SlurmJobState, code: int, reason: str, is_seen: bool
) -> None:
    """The Slurm job may end before the broker has seen it run."""
    async with asgi_broker(plain, wait=False) as running:
        path, job = await launch_without_docker(running, slurm, detached=True)
        if is_seen:
            await wait_for_state(running, f"/jobs/{path}", "running")
        assert "exec srun" not in slurm.asked[job].script
        # The state that Slurm 22.05 reports until its nodes are clean.
        slurm.change(job, state=SlurmJobState.COMPLETING, is_completing=True)
        if is_seen:
            polls = slurm.polls
            await until(lambda: slurm.polls > polls + 1, "Slurm was asked again")
            assert (await read(running, "ada", f"/jobs/{path}"))["state"] == "running"
        slurm.held.pop(job)
        slurm.change(job, state=state, exit_code=code, is_completing=False)
        ended = await wait_for_state(running, f"/jobs/{path}", "ended")
        assert ended["exit_code"] == code
        assert reason in ended["reason"]


async def test_without_containers_no_docker_daemon_is_asked_for_files_logs_and_terminals(
    plain: Setting, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    """Nodes without an address would otherwise be this machine. The head node has neither the home nor `srun`."""
    table = SlurmSettings(runtime="plain", command=Path("/opt/singleuser"), commands=tmp_path)
    plain.cluster = slurm_cluster(slurm=table)
    async with asgi_broker(plain, wait=False) as running:
        body = {"run_id": "run-000001", "nnodes": 1, "detached": True}
        job = str((await post(running, "ada", "/jobs", body, status=201))["id"])
        async with running.client("ada") as client:
            for path in ("/files?path=a", f"/jobs/{job}/logs", f"/jobs/{job}/state"):
                refusal = await client.get(f"/api/v1{path}")
                assert refusal.status_code == 409, path
                assert "/home/ada is not on the head node" in refusal.json()["detail"]
        assert await open_socket(running, f"/api/v1/jobs/{job}/shell", "ada") == 409
        path, job_id = await launch_without_docker(running, slurm, detached=True)
        await wait_for_state(running, f"/jobs/{path}", "running")
        assert await open_socket(running, f"/api/v1/jobs/{path}/shell", "ada") == 503
        assert slurm.asked[job_id]
    assert all(not node.containers for node in plain.nodes.values())
