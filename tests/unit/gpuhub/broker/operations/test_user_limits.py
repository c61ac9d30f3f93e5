"""Limits that administrators set for single users, over the broker's API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.operations.user_limits import LimitOperations
from gpuhub.broker_api.schemas import Capabilities
from gpuhub.broker_api.schemas.limits import COUNTED_BY_SCHEDULER, UserLimitsRequest
from gpuhub.common.errors import InvalidRequest
from gpuhub.config.settings import UserSettings
from gpuhub.config.slurm import LIMIT_KEYS
from gpuhub.domain.models import Identity
from tests.support.broker.calls import post, read
from tests.support.broker.in_process import Running, Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster

JOB = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}


@pytest.fixture
def limited(setting: Setting) -> Setting:
    """A broker whose users may have one GPU each."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada", "ben"), max_gpus=1))
    return setting


async def put(running: Running, owner: str, body: Any, status: int = 200) -> Any:
    async with running.client("root") as client:
        answer = await client.put(f"/api/v1/limits/{owner}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def delete(running: Running, owner: str) -> int:
    async with running.client("root") as client:
        return (await client.delete(f"/api/v1/limits/{owner}")).status_code


def test_slurm_counts_the_limits_that_its_settings_replace() -> None:
    """What cannot be set for a user where Slurm decides is what cluster.toml cannot set there either."""
    assert set(LIMIT_KEYS) == COUNTED_BY_SCHEDULER


async def test_limits_count_at_once_and_until_they_are_cleared(limited: Setting) -> None:
    """For this user alone, after a restart as well, and the user sees who set them."""
    two = {**JOB, "nnodes": 2}
    async with asgi_broker(limited) as running:
        await post(running, "ada", "/jobs", two, 422)
        made = await put(running, "ada", {"max_gpus": 2, "longest_lease_s": 7200, "reason": "paper"})
        assert (made["owner"], made["by"], made["max_gpus"], made["max_jobs"]) == ("ada", "root", 2, None)
        await post(running, "ben", "/jobs", two, 422)
    async with asgi_broker(limited) as running:
        assert (await post(running, "ada", "/jobs", two, 201))["state"] == "starting"
        (usage,) = await read(running, "ada", "/usage")
        assert (usage["max_gpus"], usage["longest_lease_s"], usage["max_waiting"]) == (2, 7200, 16)
        assert (usage["own_limits"]["reason"], usage["own_limits"]["by"]) == ("paper", "root")
        assert [row["owner"] for row in await read(running, "root", "/limits")] == ["ada"]
        events = [event for event in await read(running, "ada", "/events") if event["kind"] == "user.limited"]
        assert events[-1]["text"] == "limits of ada, by root: max_gpus 2, longest_lease_s 7200: paper"
        assert await delete(running, "ada") == 204
        assert await delete(running, "ada") == 404
        # What she has stays.
        assert (await read(running, "ada", "/usage"))[0]["gpus"] == 2
        refused = await post(running, "ada", "/jobs", {**two, "run_id": "run-000002"}, 422)
        assert refused["detail"] == "2 GPUs were requested; one user may hold at most 1"
        assert await read(running, "root", "/limits") == []


async def test_waiting_request_is_granted_when_its_limit_is_raised(limited: Setting) -> None:
    """Without another event."""
    async with asgi_broker(limited) as running:
        await post(running, "ada", "/jobs", JOB, 201)
        job = await post(running, "ada", "/jobs", {**JOB, "run_id": "run-000002"}, 201)
        assert job["state"] == "waiting"
        await put(running, "ada", {"max_gpus": 2})
        await running.core.ledger.change(lambda _: None)
        assert (await read(running, "ada", f"/jobs/{job['id']}"))["state"] == "starting"


@pytest.mark.parametrize(
    ("owner", "body", "says"),
    [
        ("ada", {}, "no limit is given: one of max_gpus, gpu_hours_per_week"),
        ("ada", {"reason": "why"}, "no limit is given"),
        ("ada", {"max_gpus": 0}, "max_gpus"),
        ("ada", {"max_waiting": 1001}, "max_waiting"),
        ("ada", {"gpu_hours_per_week": 0}, "gpu_hours_per_week"),
        ("ada", {"longest_lease_s": 59}, "longest_lease_s"),
        ("ada", {"max_gpu": 1}, "max_gpu"),
        ("Ada%20X", {"max_gpus": 1}, "owner"),
    ],
)
async def test_wrong_limits_are_refused(limited: Setting, owner: str, body: Any, says: str) -> None:
    """With the name of what is wrong, and nothing is set."""
    async with asgi_broker(limited) as running:
        assert says in str(await put(running, owner, body, 422))
        assert await read(running, "root", "/limits") == []


async def test_limits_that_another_scheduler_counts_are_refused(limited: Setting) -> None:
    """GPUs and GPU-hours are; the numbers of jobs and requests are counted by gpuhub."""
    root = Identity(name="root", is_admin=True)
    slurm = SimpleNamespace(title="Slurm", capabilities=Capabilities(external_jobs=True))
    async with asgi_broker(limited) as running:
        limits = LimitOperations(running.core, cast("SchedulingBackend", slurm))
        with pytest.raises(
            InvalidRequest, match=r"Slurm counts GPUs and GPU-hours.*set gpu_hours_per_week of ada there"
        ):
            await limits.set_limits(root, "ada", UserLimitsRequest(gpu_hours_per_week=1, max_jobs=2))
        assert (await limits.set_limits(root, "ada", UserLimitsRequest(max_jobs=2))).max_jobs == 2
