"""Jobs after other jobs, arrays with a limit of running tasks, and retries: on a real broker with simulated nodes."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker.admission import validate
from gpuhub.broker_api.schemas import JobRequest, JobState
from gpuhub.common.errors import InvalidRequest
from gpuhub.domain import job_states
from tests.support.broker.calls import delete, post, read, wait_for_state
from tests.support.broker.factories import build_running_job
from tests.support.broker.in_process import Running, Setting, asgi_broker, until

FAILED = "worker 0 on rig1: ended with exit code 3"


async def launch(running: Running, number: int, status: int = 201, **parts: Any) -> Any:
    """Request a detached job of one GPU."""
    body = {"run_id": f"run-{number:06d}", "detached": True, **parts}
    return await post(running, "ada", "/jobs", body, status)


async def end(running: Running, job: Any, code: int = 0) -> str:
    """End the program of a job's worker when it runs; return its node."""
    job = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
    node: str = job["workers"][0]["node"]
    machine = running.setting.nodes[node]
    (container,) = [one for one in machine.of_kind("worker") if one["Labels"]["gpuhub.job"] == job["id"]]
    machine.end_container(container["Id"], code=code)
    return node


async def job_of(running: Running, job: Any) -> Any:
    return await read(running, "ada", f"/jobs/{job['id']}")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"after": "run-000002"}, "after, max_retries: they are for detached jobs"),
        ({"max_retries": 1}, "after, max_retries: they are for detached jobs"),
        ({"after": "run-000001", "detached": True}, "after: run-000001 cannot wait for itself"),
    ],
)
def test_contradictory_requests_are_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        validate.check_consistency(JobRequest(run_id="run-000001", **asked))


def test_a_failed_job_can_be_retried_until_its_limit_and_not_after_a_cancel() -> None:
    """A cancelled one does not start again, even where it had failed just before."""
    running = build_running_job(1)[0].evolve(detached=True, max_retries=1)
    failed = job_states.record_worker_exit(running, 0, 3, "ended with exit code 3", 20.0)
    assert (failed.state, failed.has_failed, job_states.can_retry(failed)) == (JobState.STOPPING, True, True)
    assert not job_states.can_retry(job_states.cancel(failed, "stopped", 21.0))
    assert job_states.cancel(failed, "stopped", 21.0).reason == FAILED
    again = job_states.retry(failed, "l2", 22.0)
    assert (again.state, again.lease_id, again.retries, again.exit_code, again.reason, again.workers) == (
        JobState.WAITING, "l2", 1, None, None, (),
    )  # fmt: skip
    assert not job_states.can_retry(failed.evolve(retries=1))
    done = job_states.record_worker_exit(running, 0, 0, "ended with exit code 0", 20.0)
    assert (done.has_failed, job_states.can_retry(done)) == (False, False)
    stopped = job_states.record_worker_exit(job_states.stop(running, "stopped", 20.0), 0, 143, "ended", 21.0)
    assert not job_states.can_retry(stopped)
    unstarted = job_states.record_worker_exit(running, 0, None, "it could not be started", 20.0)
    assert job_states.can_retry(unstarted)
    gone = job_states.record_leader_exit(running.evolve(workers=()), 20.0, exit_code=1)
    assert job_states.can_retry(gone)


async def test_job_starts_after_another_one_has_succeeded(setting: Setting) -> None:
    """It is not in the queue before: others do not wait for it, and its age counts from then on."""
    async with asgi_broker(setting) as running:
        first = await launch(running, 1)
        second = await launch(running, 2, after=first["run_id"])
        assert (second["state"], second["after"]) == ("waiting", first["run_id"])
        assert (second["lease"]["waiting_for"], second["lease"]["position"]) == ("the end of run-000001", None)
        assert (await read(running, "ada", "/cluster"))["queue"] == []
        why = await read(running, "ada", f"/leases/{second['lease']['id']}/why", 409)
        assert "its job waits for other jobs or for a request, and not for GPUs" in why["detail"]
        await end(running, first)
        started = await wait_for_state(running, f"/jobs/{second['id']}", "running", "ada")
        assert started["after"] is None
        assert started["lease"]["created_at"] > second["lease"]["created_at"]
        assert started["created_at"] == second["created_at"]
        # A run that has succeeded is nothing to wait for.
        third = await launch(running, 3, after=first["run_id"])
        assert third["after"] is None
        await wait_for_state(running, f"/jobs/{third['id']}", "running", "ada")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_chain_ends_with_the_run_that_did_not_succeed(setting: Setting, is_cancelled: bool) -> None:
    """All of it, each with its reason."""
    async with asgi_broker(setting) as running:
        jobs = [await launch(running, 1)]
        for number in (2, 3):
            jobs.append(await launch(running, number, after=jobs[-1]["run_id"]))
        if is_cancelled:
            await wait_for_state(running, f"/jobs/{jobs[0]['id']}", "running", "ada")
            await delete(running, "ada", f"/jobs/{jobs[0]['id']}")
            reason = "stopped"
        else:
            reason = f"worker 0 on {await end(running, jobs[0], 3)}: ended with exit code 3"
        ended = [await wait_for_state(running, f"/jobs/{job['id']}", "ended", "ada") for job in jobs]
        second = f"run-000001, after which it should start, did not succeed: {reason}"
        assert [job["reason"] for job in ended] == [
            reason,
            second,
            f"run-000002, after which it should start, did not succeed: {second}",
        ]
        assert [job["exit_code"] for job in ended[1:]] == [None, None]
        refused = await launch(running, 4, 422, after="run-000001")
        assert f"after: run-000001 did not succeed: {reason}" in refused["detail"]


async def test_only_own_detached_runs_can_be_waited_for(setting: Setting) -> None:
    """Of other users not even their existence shows."""
    async with asgi_broker(setting) as running:
        await launch(running, 1)
        other = await post(
            running, "ben", "/jobs", {"run_id": "run-000002", "detached": True, "after": "run-000001"}, 422
        )
        assert other["detail"].endswith("after: you have no run run-000001, or it ended long ago")
        await post(running, "ada", "/jobs", {"run_id": "run-000003"}, 201)
        refused = await launch(running, 4, 422, after="run-000003")
        assert "only a detached job shows whether it succeeded" in refused["detail"]


async def test_array_runs_as_many_tasks_as_its_limit(setting: Setting) -> None:
    """In order; a task that ends, however, lets the next one start; a job after the array waits for all."""
    async with asgi_broker(setting) as running:
        body = {"job": {"run_id": "run-000001", "detached": True, "batch": True}, "count": 4, "max_running": 1}
        tasks = await post(running, "ada", "/jobs/arrays", body, 201)
        assert [task["array_limit"] for task in tasks] == [1] * 4
        assert tasks[3]["lease"]["waiting_for"] == "its turn: 1 of its array's tasks run at the same time"
        last = await launch(running, 2, after="run-000001")
        for number in range(3):
            await wait_for_state(running, f"/jobs/{tasks[number]['id']}", "running", "ada")
            others = [await job_of(running, task) for task in tasks[number + 1 :]]
            assert {other["state"] for other in others} == {"waiting"}
            assert [other["lease"]["position"] for other in others] == [None] * len(others)
            await end(running, tasks[number])
        assert (await job_of(running, last))["after"] == "run-000001"
        await end(running, tasks[3])
        await wait_for_state(running, f"/jobs/{last['id']}", "running", "ada")
        # The cancel of a held task changes nothing for the others.
        tasks = await post(
            running, "ada", "/jobs/arrays", {**body, "job": {**body["job"], "run_id": "run-000009"}, "count": 3}, 201
        )
        await wait_for_state(running, f"/jobs/{tasks[0]['id']}", "running", "ada")
        assert (await delete(running, "ada", f"/jobs/{tasks[1]['id']}"))["state"] == "ended"
        assert (await job_of(running, tasks[2]))["lease"]["position"] is None
        await end(running, tasks[0], 1)
        await wait_for_state(running, f"/jobs/{tasks[2]['id']}", "running", "ada")


async def test_array_after_a_run_keeps_its_limit(setting: Setting) -> None:
    async with asgi_broker(setting) as running:
        first = await launch(running, 1)
        job = {"run_id": "run-000002", "detached": True, "after": "run-000001"}
        tasks = await post(running, "ada", "/jobs/arrays", {"job": job, "count": 3, "max_running": 2}, 201)
        assert {task["lease"]["waiting_for"] for task in tasks} == {"the end of run-000001"}
        await end(running, first)
        for task in tasks[:2]:
            await wait_for_state(running, f"/jobs/{task['id']}", "running", "ada")
        held = await job_of(running, tasks[2])
        assert (held["state"], held["lease"]["position"], held["after"]) == ("waiting", None, None)


async def test_failed_job_starts_again_and_dependents_wait_for_the_last_try(setting: Setting) -> None:
    async with asgi_broker(setting) as running:
        first = await launch(running, 1, max_retries=1)
        second = await launch(running, 2, after="run-000001")
        await end(running, first, 3)

        async def is_again() -> bool:
            job = await job_of(running, first)
            return (job["retries"], job["state"]) == (1, "running")

        await until(is_again, "it runs again")
        assert (await job_of(running, second))["after"] == "run-000001"
        assert [spec.retries for spec in running.workers.specs if spec.run_id == "run-000001"] == [(0, 1), (1, 1)]
        await end(running, first)
        assert (await wait_for_state(running, f"/jobs/{first['id']}", "ended", "ada"))["exit_code"] == 0
        await end(running, second, 3)
        ended = await wait_for_state(running, f"/jobs/{second['id']}", "ended", "ada")
        assert (ended["exit_code"], ended["retries"]) == (3, 0)


async def test_broker_that_restarts_knows_what_waits(setting: Setting) -> None:
    """What is held stays held, and is released by the end that comes later."""
    async with asgi_broker(setting) as running:
        first = await launch(running, 1)
        await wait_for_state(running, f"/jobs/{first['id']}", "running", "ada")
        second = await launch(running, 2, after="run-000001", max_retries=2)
    async with asgi_broker(setting) as running:
        held = await job_of(running, second)
        assert (held["after"], held["max_retries"], held["lease"]["position"]) == ("run-000001", 2, None)
        assert (await read(running, "ada", "/cluster"))["queue"] == []
        await end(running, first)
        await wait_for_state(running, f"/jobs/{second['id']}", "running", "ada")
