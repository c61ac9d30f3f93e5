"""Job groups: detached jobs that get their GPUs at the same moment, on a real broker with simulated nodes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuhub.broker.controllers.worker_launcher import list_aliases
from gpuhub.domain.models import ResourceRequest
from tests.support.broker.calls import delete, post, read, wait_for_state
from tests.support.broker.factories import build_running_job
from tests.support.broker.in_process import Running, Setting, asgi_broker, held_writes, until

GROUP = "run-000001"


def build_job(number: int, **parts: Any) -> dict[str, Any]:
    return {"run_id": f"{GROUP}-{number}", "detached": True, "batch": True, "name": f"task {number}", **parts}


async def request_group(running: Running, *jobs: dict[str, Any], status: int = 201) -> Any:
    return await post(running, "ada", "/jobs/groups", {"run_id": GROUP, "jobs": jobs}, status)


async def find_states(running: Running, jobs: list[Any]) -> list[str]:
    return [(await read(running, "ada", f"/jobs/{job['id']}"))["state"] for job in jobs]


async def test_group_starts_as_a_whole(setting: Setting) -> None:
    """While ben holds the RTX 5090, no task of the group holds a GPU; a repeated request changes nothing."""
    async with asgi_broker(setting) as running:
        held = await post(running, "ben", "/jobs", {"run_id": "run-000009", "models": ["RTX 5090"]}, 201)
        await wait_for_state(running, f"/jobs/{held['id']}", "running", "ben")
        group = await request_group(running, build_job(0, models=["RTX 5090"]), build_job(1))
        assert [job["array"] for job in group] == [GROUP, GROUP]
        why = await read(running, "ada", f"/leases/{group[1]['lease']['id']}/why")
        assert why["waits_for"].endswith("; it starts together with the other 1 of its job group")
        other = await post(running, "ben", "/jobs", {"run_id": "run-000008", "time_limit_s": 60}, 201)
        await wait_for_state(running, f"/jobs/{other['id']}", "running", "ben")
        assert await find_states(running, group) == ["waiting", "waiting"]
        again = await request_group(running, build_job(0, models=["RTX 5090"]), build_job(1))
        assert [job["id"] for job in again] == [job["id"] for job in group]
        await delete(running, "ben", f"/jobs/{held['id']}")
        for job in group:
            await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        granted = [await read(running, "ada", f"/jobs/{job['id']}") for job in group]
        assert len({job["lease"]["granted_at"] for job in granted}) == 1


async def test_group_waits_for_a_run(setting: Setting) -> None:
    """All of its tasks are released when the run that they wait for has succeeded."""
    async with asgi_broker(setting) as running:
        first = await post(running, "ada", "/jobs", {"run_id": "run-000002", "detached": True}, 201)
        group = await request_group(running, build_job(0, after="run-000002"), build_job(1, after="run-000002"))
        await wait_for_state(running, f"/jobs/{first['id']}", "running", "ada")
        assert await find_states(running, group) == ["waiting", "waiting"]
        await end_program(running, first)
        for job in group:
            await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")


async def end_program(running: Running, job: Any, code: int = 0) -> None:
    """End the program of a running job's worker."""
    worker = (await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada"))["workers"][0]
    node = running.setting.nodes[worker["node"]]
    [container] = [one for one in node.of_kind("worker") if one["Labels"]["gpuhub.job"] == job["id"]]
    node.end_container(container["Id"], code=code)


async def test_auxiliary_jobs_end_with_the_others(setting: Setting) -> None:
    """One at once, one after its delay, when the last of the others has ended, and not before."""
    async with asgi_broker(setting) as running:
        body = {
            "run_id": GROUP,
            "jobs": [build_job(number) for number in range(3)],
            "auxiliary": {f"{GROUP}-1": 0, f"{GROUP}-2": 600},
        }
        group = await post(running, "ada", "/jobs/groups", body, 201)
        for job in group:
            await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        assert [job["lease"]["expires_at"] for job in await read(running, "ada", "/jobs")] == [None] * 3
        await end_program(running, group[0])
        ended = await wait_for_state(running, f"/jobs/{group[1]['id']}", "ended", "ada")
        assert ended["reason"] == "the tasks of its job group that it served have ended"
        last = await read(running, "ada", f"/jobs/{group[2]['id']}")
        assert last["state"] == "running"
        left_s = (datetime.fromisoformat(last["lease"]["expires_at"]) - datetime.now(UTC)).total_seconds()
        assert 540 < left_s <= 600
        # The end of a cordon undoes what a drain has shortened, and not this.
        await post(running, "root", f"/nodes/{last['workers'][0]['node']}/cordon", {})
        await post(running, "root", f"/nodes/{last['workers'][0]['node']}/undrain")
        assert (await read(running, "ada", f"/jobs/{group[2]['id']}"))["lease"]["expires_at"] is not None


async def test_auxiliary_job_with_a_port_does_not_sleep(setting: Setting) -> None:
    """It waits for no request to its port: those that it served are gone."""
    async with asgi_broker(setting) as running:
        jobs = [build_job(0), build_job(1, port=8000, sleeps=True)]
        body = {"run_id": GROUP, "jobs": jobs, "auxiliary": {f"{GROUP}-1": 0}}
        group = await post(running, "ada", "/jobs/groups", body, 201)
        await wait_for_state(running, f"/jobs/{group[1]['id']}", "running", "ada")
        await end_program(running, group[0])
        ended = await wait_for_state(running, f"/jobs/{group[1]['id']}", "ended", "ada")
        assert (ended["sleeps"], ended["reason"]) == (False, "the tasks of its job group that it served have ended")


@pytest.mark.parametrize(
    ("auxiliary", "text"),
    [
        ({"run-000009": 0}, "auxiliary: run-000009 is not a job of the group"),
        ({f"{GROUP}-0": 0, f"{GROUP}-1": 0}, "auxiliary: at least one job of the group ends by itself"),
    ],
)
async def test_auxiliary_jobs_are_some_of_the_group(setting: Setting, auxiliary: dict[str, int], text: str) -> None:
    """Others are refused by name."""
    async with asgi_broker(setting) as running:
        body = {"run_id": GROUP, "jobs": [build_job(0), build_job(1)], "auxiliary": auxiliary}
        assert text in (await post(running, "ada", "/jobs/groups", body, 422))["detail"]


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ([{"models": ["RTX 5090"]}, {"models": ["RTX 5090"]}], "the tasks of the job group never fit at the same time"),
        ([{"nnodes": 2}, {"nnodes": 2}], "the tasks of the job group never fit at the same time"),
        ([{}, {"detached": False}], "jobs: all jobs of a job group are detached"),
        ([{}, {"after": "run-000002"}], "jobs: all jobs of a job group have the same `after`"),
        ([{}, {"run_id": f"{GROUP}-0"}], "jobs: each job of a job group needs a run_id of its own"),
    ],
)
async def test_impossible_groups_are_refused(setting: Setting, jobs: list[dict[str, Any]], text: str) -> None:
    """At the check before the upload as well, and no job of the group exists afterwards."""
    async with asgi_broker(setting) as running:
        group = [build_job(number, **parts) for number, parts in enumerate(jobs)]
        refused = await request_group(running, *group, status=422)
        assert text in refused["detail"]
        checked = await post(running, "ada", "/jobs/check", {"job": group[0], "others": group[1:]}, 422)
        assert text in checked["detail"]
        assert await read(running, "ada", "/jobs") == []


async def test_group_of_more_gpus_than_one_may_hold_is_refused(setting: Setting) -> None:
    """Each task is within the limit, and all of them together are not."""
    async with asgi_broker(setting) as running:
        async with running.client("root") as root:
            assert (await root.put("/api/v1/limits/ada", json={"max_gpus": 1})).status_code == 200
        refused = await request_group(running, build_job(0), build_job(1), status=422)
        assert refused["detail"] == "the job group needs 2 GPUs at the same time; one user may hold at most 1"


def test_workers_of_a_group_have_names_in_the_network() -> None:
    """As SkyPilot's commands spell them, from the task's name, the node's number and the group."""
    job, lease = build_running_job(2)
    assert list_aliases(job, lease, job.workers[1]) == ()
    lease = lease.evolve(resources=ResourceRequest(nodes=2, bundle=GROUP))
    named = job.evolve(name="Rollout Server")
    assert [list_aliases(named, lease, worker) for worker in job.workers] == [
        (f"rollout-server-0.{GROUP}",),
        (f"rollout-server-1.{GROUP}",),
    ]


async def test_sleeping_task_stays_asleep_when_another_ends(setting: Setting) -> None:
    """Only a request to its port wakes it; before its first start it waits like the others."""
    async with asgi_broker(setting) as running:
        first = await post(running, "ada", "/jobs", {"run_id": "run-000002", "detached": True}, 201)
        server = build_job(1, after="run-000002", port=8000, sleeps=True)
        group = await request_group(running, build_job(0, after="run-000002"), server)
        await end_program(running, first)
        await end_program(running, group[1])
        await wait_for_state(running, f"/jobs/{group[1]['id']}", "waiting", "ada")
        await end_program(running, group[0])
        await wait_for_state(running, f"/jobs/{group[0]['id']}", "ended", "ada")
        asleep = await read(running, "ada", f"/jobs/{group[1]['id']}")
        assert (asleep["state"], asleep["lease"]["waiting_for"]) == ("waiting", "a request to its port: it is asleep")


async def test_repeated_request_of_a_group_that_is_being_stored(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends it again before the first answer gets the same jobs."""
    async with asgi_broker(setting) as running:
        with held_writes(running, monkeypatch) as held:
            first = asyncio.ensure_future(request_group(running, build_job(0), build_job(1)))
            await until(lambda: held, "the group is being stored")
            again = asyncio.ensure_future(request_group(running, build_job(0), build_job(1)))
            ledger = running.core.ledger
            await until(lambda: ledger._pending, "the second request waits for the first")
        assert [job["id"] for job in await first] == [job["id"] for job in await again]


@pytest.mark.parametrize("fails", ["before the others end", "after the others end"])
async def test_auxiliary_job_is_not_tried_again_when_the_others_have_ended(setting: Setting, fails: str) -> None:
    """It would wait for GPUs and run without end: nothing is left that it could serve, or that could end it."""
    async with asgi_broker(setting) as running:
        jobs = [build_job(0), build_job(1, max_retries=2)]
        body = {"run_id": GROUP, "jobs": jobs, "auxiliary": {f"{GROUP}-1": 600}}
        group = await post(running, "ada", "/jobs/groups", body, 201)
        auxiliary = await wait_for_state(running, f"/jobs/{group[1]['id']}", "running", "ada")
        node = running.setting.nodes[auxiliary["workers"][0]["node"]]
        if fails == "before the others end":
            # Its lease ends, and the proof is missing while the others end.
            await end_program(running, group[1], code=1)
            node.is_reachable = False
        await end_program(running, group[0])
        await wait_for_state(running, f"/jobs/{group[0]['id']}", "ended", "ada")
        if fails == "after the others end":
            await end_program(running, group[1], code=1)
        node.is_reachable = True
        ended = await wait_for_state(running, f"/jobs/{group[1]['id']}", "ended", "ada")
        assert ended["reason"] == "the tasks of its job group that it served have ended"
