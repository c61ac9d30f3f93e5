"""Job groups: detached jobs that get their GPUs at the same moment, on a real broker with simulated nodes."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker.controllers.worker_launcher import list_aliases
from gpuhub.domain.models import ResourceRequest
from tests.support.broker.calls import delete, post, read, wait_for_state
from tests.support.broker.factories import build_running_job
from tests.support.broker.in_process import Running, Setting, asgi_broker

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
        worker = (await read(running, "ada", f"/jobs/{first['id']}"))["workers"][0]
        node = running.setting.nodes[worker["node"]]
        [container] = [one for one in node.of_kind("worker") if one["Labels"]["gpuhub.job"] == first["id"]]
        node.end_container(container["Id"], code=0)
        for job in group:
            await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")


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
