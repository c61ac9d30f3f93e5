"""What an owner may have, and what is refused by it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker.admission.validate import choose_time_limit
from gpuhub.common.errors import InvalidRequest
from gpuhub.config.settings import GroupSettings, JobSettings, LimitSettings, ProfileSettings, UserSettings
from gpuhub.domain.owner_limits import OwnLimits, build_quota, find_max_gpus, find_max_lease_s, list_groups
from gpuhub.scheduler.interface import Quota, QuotaLimits
from tests.support.broker.calls import ask, post, read, run_notebook
from tests.support.broker.in_process import Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster

JOB = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}


def test_groups_come_from_hub_and_settings() -> None:
    """Whoever a group of the settings names is in it, whatever the hub says."""
    cluster = build_cluster(groups=(GroupSettings(name="lab", members=("ada",)), GroupSettings(name="guests")))
    assert list_groups(cluster, "ada", {"guests", "unknown"}) == {"lab", "guests", "unknown"}
    assert list_groups(cluster, "ben", ()) == frozenset()


def test_most_generous_group_limit_applies_with_user_defaults() -> None:
    """Each limit by itself; what a group may have together is a limit of its own."""
    cluster = build_cluster(
        users=UserSettings(allowed=("ada",), max_gpus=1, gpu_hours_per_week=10, max_waiting=5, longest_lease="1d"),
        groups=(
            GroupSettings(
                name="lab", each=LimitSettings(max_gpus=2, max_jobs=3), together=LimitSettings(max_gpus=8), weight=2
            ),
            GroupSettings(name="staff", each=LimitSettings(max_gpus=4, longest_lease="1h"), weight=3),
            GroupSettings(name="plain"),
        ),
    )
    assert build_quota(cluster, "ada", {"lab", "staff", "plain"}) == Quota(
        per_user=QuotaLimits(max_gpus=4, gpu_hours_per_week=10.0, max_waiting=5, max_jobs=3, longest_lease_s=3600),
        per_group={"lab": QuotaLimits(max_gpus=8)},
        weight=3.0,
    )
    assert build_quota(cluster, "ben", ()).per_user == QuotaLimits(
        max_gpus=1, gpu_hours_per_week=10.0, max_waiting=5, max_jobs=1000, longest_lease_s=86400
    )


def test_own_limits_replace_those_of_settings_and_groups() -> None:
    """Also the most generous group's; what is not set stays, and so does what the group may have together."""
    cluster = build_cluster(
        users=UserSettings(allowed=("ada",), max_gpus=1, max_waiting=5),
        groups=(
            GroupSettings(name="lab", each=LimitSettings(max_gpus=2), together=LimitSettings(max_gpus=8), weight=2),
        ),
    )
    own = OwnLimits(owner="ada", max_gpus=6, longest_lease_s=60.0, by="root", at=0.0)
    assert build_quota(cluster, "ada", {"lab"}, own) == Quota(
        per_user=QuotaLimits(max_gpus=6, max_waiting=5, max_jobs=1000, longest_lease_s=60.0),
        per_group={"lab": QuotaLimits(max_gpus=8)},
        weight=2.0,
    )


def test_lowest_limit_applies() -> None:
    """What a group may have together is no more for one of them."""
    quota = Quota(
        per_user=QuotaLimits(max_gpus=8, longest_lease_s=60.0),
        per_group={"lab": QuotaLimits(max_gpus=4), "staff": QuotaLimits()},
    )
    assert (find_max_gpus(quota), find_max_lease_s(quota)) == (4, 60.0)
    assert (find_max_gpus(Quota()), find_max_lease_s(Quota())) == (None, None)


@pytest.mark.parametrize(
    ("asked", "usual", "longest", "chosen"),
    [
        (None, None, None, None),
        (None, 100, 60.0, 60),
        (90, 100, None, 90),
        (120, 100, None, 100),
        (None, 100, 200.0, 100),
    ],
)
def test_time_limit_of_a_notebook(
    asked: int | None, usual: int | None, longest: float | None, chosen: int | None
) -> None:
    """The least of what was asked for, what the profile has, and what one may have."""
    assert choose_time_limit(asked=asked, usual=usual, longest=longest) == chosen


def test_extension_beyond_the_limit_is_refused() -> None:
    """A job's own settings count as well when it asks for a time."""
    with pytest.raises(InvalidRequest, match="2 min were requested; the longest allowed time is 1 min"):
        choose_time_limit(asked=120, usual=None, longest=60.0)
    with pytest.raises(InvalidRequest, match="2 min were requested; the longest allowed time is 1 min"):
        choose_time_limit(asked=120, usual=60, longest=None, is_usual_the_most=True)


async def test_group_limits_on_waiting_requests_and_jobs(setting: Setting) -> None:
    """What one member asks for counts for the other; the refusal names the group and the limit."""
    group = GroupSettings(name="lab", members=("ada", "ben"), together=LimitSettings(max_waiting=1, max_jobs=2))
    setting.cluster = build_cluster(groups=(group,))
    async with asgi_broker(setting) as running:
        await post(running, "ada", "/jobs", JOB, 201)
        await post(running, "ben", "/jobs", {**JOB, "run_id": "run-000002"}, 201)
        refused = await post(running, "ben", "/jobs", {**JOB, "run_id": "run-000003"}, 429)
        assert refused["code"] == "too-many-jobs"
        assert refused["detail"].startswith("the group lab has 2 jobs and requests 1 more; the limit is 2")
        await post(running, "cleo", "/jobs", {**JOB, "run_id": "run-000004"}, 201)
        assert (await ask(running, "ada", profile="any", key="1"))["state"] == "requested"
        refused = await ask(running, "ben", profile="any", key="2", status=429)
        assert refused["detail"].startswith("the group lab has 1 waiting requests; the limit is 1")


async def test_groups_of_the_hub_apply_to_limits(setting: Setting) -> None:
    """The spawner says them for a notebook, and the notebook's jobs are of the same groups."""
    setting.cluster = build_cluster(
        users=UserSettings(allowed=("ada",), max_gpus=1),
        groups=(GroupSettings(name="staff", each=LimitSettings(max_gpus=2)),),
    )
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "spawner", owner="ada", groups=["staff"]))
        assert running.core.scheduler_sync.get_quota("ada").per_user.max_gpus == 2
        assert (await post(running, "ada", "/jobs", JOB, 201))["state"] == "starting"
        refused = await post(running, "ben", "/jobs", {**JOB, "nnodes": 2}, 422)
        assert refused["detail"] == "2 GPUs were requested; one user may hold at most 1"
        refused = await ask(running, "ben", groups=["staff"], key="b", status=403)
        assert refused["detail"] == "ben may not set the groups of a user"


async def test_time_limits_of_requests(setting: Setting) -> None:
    """A notebook's is the least of all; a job's is refused beyond its settings, and what one may have is said."""
    setting.cluster = build_cluster(
        profiles=[ProfileSettings(name="long", title="Long", time_limit="8h")],
        jobs=JobSettings(time_limit="2h"),
        users=UserSettings(allowed=("ada",), longest_lease="4h"),
    )
    async with asgi_broker(setting) as running:

        async def span(**body: Any) -> float:
            lease = await ask(running, "ada", profile="long", **body)
            rows = running.core.ledger.snapshot.leases
            return float(rows[lease["id"]].time_limit_s or 0)

        assert await span(key="1") == 4 * 3600
        assert await span(key="2", server="b", time_limit_s=600) == 600
        refused = await ask(running, "ada", profile="long", key="3", server="c", time_limit_s=5 * 3600, status=422)
        assert refused["detail"] == "time_limit_s: 5 h were requested; the longest allowed time is 4 h"
        refused = await post(running, "ada", "/jobs", {**JOB, "time_limit_s": 3 * 3600}, 422)
        assert refused["detail"] == "time_limit_s: 3 h were requested; the longest allowed time is 2 h"


async def test_only_administrators_may_raise_priority(setting: Setting) -> None:
    """Anybody may step back."""
    async with asgi_broker(setting) as running:
        refused = await post(running, "ada", "/jobs", {**JOB, "priority": 1}, 403)
        assert refused["detail"] == "priority 1: only an administrator may ask for more than 0"
        await post(running, "ada", "/jobs", {**JOB, "priority": -5}, 201)
        job = await post(running, "root", "/jobs", {**JOB, "priority": 5}, 201)
        assert job["lease"]["priority"] == 5


async def test_usage_is_visible_to_owner_and_administrators(setting: Setting) -> None:
    """With the limits; to an administrator of everybody, and to nobody else."""
    setting.cluster = build_cluster(
        users=UserSettings(allowed=("ada",), max_gpus=3, gpu_hours_per_week=40, max_waiting=9)
    )
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        await ask(running, "ben")
        (mine,) = await read(running, "ada", "/usage")
        assert (mine["owner"], mine["gpus"], mine["waiting"]) == ("ada", 1, 0)
        assert (mine["max_gpus"], mine["max_gpu_hours_week"], mine["max_waiting"]) == (3, 40.0, 9)
        assert [(one["owner"], one["gpus"], one["waiting"]) for one in await read(running, "root", "/usage")] == [
            ("ada", 1, 0),
            ("ben", 0, 1),
        ]
        assert (await read(running, "root", "/usage", owner="ben"))[0]["owner"] == "ben"
        refused = await read(running, "ben", "/usage", 403, owner="ada")
        assert refused["detail"] == "ben may not see what ada uses"
