"""Jobs that sleep until a request to their port: on a real broker with simulated nodes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gpuhub.broker.admission import validate
from gpuhub.broker_api.schemas import JobRequest
from gpuhub.common.errors import InvalidRequest
from gpuhub.domain import job_states
from tests.support.broker.calls import delete, post, read, wait_for_state
from tests.support.broker.factories import build_running_job
from tests.support.broker.in_process import Running, Setting, asgi_broker

SERVER = {"run_id": "run-000001", "detached": True, "port": 8000, "port_users": ["ben"], "sleeps": True}
ASLEEP = "a request to its port: it is asleep"


async def end(running: Running, job: Any, code: int = 0) -> None:
    """End the program of a job's worker when it runs."""
    job = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
    machine = running.setting.nodes[job["workers"][0]["node"]]
    containers = [one for one in machine.of_kind("worker") if one["Labels"]["gpuhub.job"] == job["id"]]
    machine.end_container(containers[-1]["Id"], code=code)


async def fall_asleep(running: Running) -> Any:
    """Return a job that is asleep."""
    job = await post(running, "ada", "/jobs", SERVER, 201)
    await end(running, job)
    return await wait_for_state(running, f"/jobs/{job['id']}", "waiting", "ada")


async def visit(running: Running, job: Any, who: str) -> httpx.Response:
    async with running.client(who) as client:
        return await client.get(f"/ports/{job['id']}/v1/models")


async def test_request_wakes_a_sleeping_job(setting: Setting) -> None:
    """Its GPU is free meanwhile and nothing waits for it; the request is answered with a time after which to repeat it."""
    async with asgi_broker(setting) as running:
        asleep = await fall_asleep(running)
        assert (asleep["lease"]["waiting_for"], asleep["times_asleep"], asleep["exit_code"]) == (ASLEEP, 1, None)
        cluster = await read(running, "ada", "/cluster")
        assert cluster["queue"] == []
        assert {gpu["state"] for node in cluster["nodes"] for gpu in node["gpus"]} == {"free"}
        refused = await read(running, "ada", f"/leases/{asleep['lease']['id']}/why", 409)
        assert "waits for other jobs or for a request" in refused["detail"]
        answer = await visit(running, asleep, "ben")
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert "ask again" in answer.json()["detail"]
        awake = await wait_for_state(running, f"/jobs/{asleep['id']}", "running", "ada")
        assert awake["lease"]["created_at"] > asleep["lease"]["created_at"]
        assert [spec.times_asleep for spec in running.workers.specs] == [0, 1]
        await end(running, awake)
        again = await wait_for_state(running, f"/jobs/{asleep['id']}", "waiting", "ada")
        assert again["times_asleep"] == 2


@pytest.mark.parametrize("who", ["eve", "root", "unknown"])
async def test_only_owner_and_named_users_wake_it(setting: Setting, who: str) -> None:
    async with asgi_broker(setting) as running:
        asleep = await fall_asleep(running)
        assert (await visit(running, asleep, who)).status_code in {401, 403, 404}
        assert (await read(running, "ada", f"/jobs/{asleep['id']}"))["lease"]["waiting_for"] == ASLEEP


async def test_job_that_fails_or_is_cancelled_does_not_sleep(setting: Setting) -> None:
    """Also one that is cancelled while it sleeps."""
    async with asgi_broker(setting) as running:
        asleep = await fall_asleep(running)
        await delete(running, "ada", f"/jobs/{asleep['id']}")
        await wait_for_state(running, f"/jobs/{asleep['id']}", "ended", "ada")
        assert (await visit(running, asleep, "ada")).status_code == 409
        failing = await post(running, "ada", "/jobs", {**SERVER, "run_id": "run-000002"}, 201)
        await end(running, failing, code=3)
        ended = await wait_for_state(running, f"/jobs/{failing['id']}", "ended", "ada")
        assert ended["exit_code"] == 3


async def test_broker_that_restarts_wakes_it(setting: Setting) -> None:
    async with asgi_broker(setting) as running:
        asleep = await fall_asleep(running)
    async with asgi_broker(setting) as running:
        assert (await read(running, "ada", f"/jobs/{asleep['id']}"))["lease"]["waiting_for"] == ASLEEP
        assert (await visit(running, asleep, "ada")).status_code == 503
        await wait_for_state(running, f"/jobs/{asleep['id']}", "running", "ada")


def test_cancel_in_its_last_moment_counts() -> None:
    """A job whose program has ended well, and whose container is still there, ends if it is cancelled then."""
    running = build_running_job(1)[0].evolve(detached=True, sleeps=True, port=8000)
    done = job_states.record_worker_exit(running, 0, 0, "ended with exit code 0", 20.0)
    assert job_states.goes_to_sleep(done)
    assert not job_states.goes_to_sleep(job_states.cancel(done, "stopped", 21.0))
    assert not job_states.goes_to_sleep(job_states.stop(running, "its lease ended", 20.0))


def test_only_a_job_with_a_port_can_sleep() -> None:
    with pytest.raises(InvalidRequest, match="name the port as well"):
        validate.check_consistency(JobRequest(run_id="run-000001", detached=True, sleeps=True))
