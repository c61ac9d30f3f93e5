"""Nodes and profiles that are restricted to groups, by every way into the broker, on simulated nodes."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.config.settings import GroupSettings
from tests.support.broker.calls import ask, post, read, wait_for_state
from tests.support.broker.in_process import ACCESS, Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster

JOB = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}
DETACHED = {**JOB, "detached": True, "name": "train.py"}


def restrict(setting: Setting) -> None:
    """Restrict rig1, which has the only RTX 5090, and a profile to vision, of which mia and dee are members."""
    cluster = build_cluster(groups=(GroupSettings(name="vision", members=("dee",)),))
    rig1, *other_nodes = cluster.nodes
    profiles = tuple(
        profile.model_copy(update={"groups": ("nlp", "vision")}) if profile.name == "rtx5060" else profile
        for profile in cluster.profiles
    )
    nodes = (rig1.model_copy(update={"groups": ("vision",)}), *other_nodes)
    setting.cluster = cluster.model_copy(update={"nodes": nodes, "profiles": profiles})
    setting.hub.models["mia"] = {"kind": "user", "name": "mia", "groups": ["vision"], "scopes": [ACCESS]}


PROFILE_REFUSAL = "profile 'rtx5060' is only for members of nlp or vision, and ben is not one"
NODE_REFUSAL = (
    "1 × RTX 5090 on one node was requested; none of the nodes other than rig1 can provide it; the cluster has: rig1 "
    "with 1 × RTX 5090 (31.8 GiB); rig2 with 1 × RTX 5070 (11.9 GiB); rig3 with 1 × RTX 5060 (7.96 GiB); only for "
    "members of vision: rig1"
)


async def test_notebooks_of_others_are_refused_with_the_groups(setting: Setting) -> None:
    """The profile, and the profile whose only node is restricted; members by login or by the settings get both."""
    restrict(setting)
    async with asgi_broker(setting) as running:
        assert (await ask(running, "ben", profile="rtx5060", status=403))["detail"] == PROFILE_REFUSAL
        assert (await ask(running, "ben", profile="rtx5090", status=403))["detail"] == NODE_REFUSAL
        unknown = await ask(running, "ben", profile="h100", status=422)
        assert unknown["detail"] == "there is no profile 'h100'; there are: rtx5070, rtx5090, any, cpu"
        assert (await ask(running, "mia", profile="rtx5060"))["nodes"] == ["rig3"]
        assert (await ask(running, "dee", profile="rtx5090"))["nodes"] == ["rig1"]
        assert (await read(running, "ben", "/leases")) == []


async def test_the_spawner_reports_the_groups_of_users(setting: Setting) -> None:
    """As it does for limits; a user cannot name groups."""
    restrict(setting)
    async with asgi_broker(setting) as running:
        await ask(running, "spawner", profile="rtx5060", owner="ben", status=403)
        await ask(running, "ben", profile="rtx5060", groups=["vision"], status=403)
        assert (await ask(running, "spawner", profile="rtx5060", owner="cyd", groups=["vision"]))["nodes"] == ["rig3"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"models": ["RTX 5090"]}, NODE_REFUSAL),
        ({"exclude_nodes": ["rig2", "rig3"]}, "1 nodes were requested and the cluster has 0 other than rig1, rig2, "),
        (
            {"nnodes": 3},
            "3 nodes were requested and the cluster has 2 other than rig1: rig2, rig3; only for members of",
        ),
        (
            {"gpus": 3},
            "3 × any GPU on any nodes was requested; the nodes other than rig1 have 2 such GPUs; the cluster ",
        ),
        ({"least_memory_mib": 20 * 1024, "detached": True, "scavenge": True}, "1 × any GPU of at least 20 GiB on "),
    ],
)
async def test_jobs_for_others_nodes_are_refused_at_once(setting: Setting, body: dict[str, Any], detail: str) -> None:
    """By model, by node, by number, by memory: nothing waits for what it can never get; members may ask."""
    restrict(setting)
    async with asgi_broker(setting) as running:
        refused = await post(running, "ben", "/jobs", {**JOB, **body}, 403)
        assert refused["detail"].startswith(detail)
        assert refused["detail"].endswith("only for members of vision: rig1")
        assert await read(running, "ben", "/jobs") == []
        await post(running, "mia", "/jobs", {**JOB, **body}, 201)


async def test_requests_that_nobody_could_serve_are_invalid(setting: Setting) -> None:
    """Being a member would not help."""
    restrict(setting)
    async with asgi_broker(setting) as running:
        await post(running, "ben", "/jobs", {**JOB, "models": ["H200"]}, 422)
        await post(running, "ben", "/jobs", {**JOB, "nnodes": 4}, 422)
        await post(running, "mia", "/jobs", {**JOB, "nnodes": 4}, 422)


async def test_refusals_are_not_mixed_up_between_members_and_others(setting: Setting) -> None:
    """Equal requests have one refusal for each of them."""
    restrict(setting)
    async with asgi_broker(setting) as running:
        for number in range(2):
            job = {**JOB, "run_id": f"run-00000{number}", "models": ["RTX 5090"]}
            await post(running, "ben", "/jobs", job, 403)
            await post(running, "mia", "/jobs", job, 201)


async def test_arrays_groups_and_profiles_of_jobs_are_refused_as_well(setting: Setting) -> None:
    """A job names a profile for its image; nothing of a job group is accepted if one of its jobs is not."""
    restrict(setting)
    async with asgi_broker(setting) as running:
        array = {"count": 3, "job": {**DETACHED, "models": ["RTX 5090"]}}
        assert (await post(running, "ben", "/jobs/arrays", array, 403))["detail"] == NODE_REFUSAL
        group = {
            "run_id": "run-000003",
            "jobs": [{**DETACHED, "run_id": "run-000002"}, {**DETACHED, "models": ["RTX 5090"]}],
        }
        assert (await post(running, "ben", "/jobs/groups", group, 403))["detail"] == NODE_REFUSAL
        check = {"job": group["jobs"][0], "others": group["jobs"][1:]}
        assert (await post(running, "ben", "/jobs/check", check, 403))["detail"] == NODE_REFUSAL
        assert await read(running, "ben", "/jobs") == []
        refused = await post(running, "ben", "/jobs", {**DETACHED, "profile": "rtx5060"}, 403)
        assert refused["detail"] == PROFILE_REFUSAL
        await post(running, "mia", "/jobs", {**DETACHED, "profile": "rtx5060"}, 201)


async def test_waiting_requests_never_get_a_gpu_of_other_groups(setting: Setting) -> None:
    """Although it is free; why they wait names the node, and a notebook without GPU stays away as well."""
    restrict(setting)
    async with asgi_broker(setting) as running:
        for number in range(3):
            await post(running, "ben", "/jobs", {**JOB, "run_id": f"run-00000{number}"}, 201)
        leases = sorted(await read(running, "ben", "/leases"), key=lambda lease: lease["created_at"])
        assert [lease["nodes"] for lease in leases] == [["rig3"], ["rig2"], []]
        why = await read(running, "ben", f"/leases/{leases[2]['id']}/why")
        assert "held by ben; only for members of vision: rig1" in why["waits_for"]
        for number in range(4):
            lease = await ask(running, "ben", profile="cpu", server=f"s{number}")
            assert lease["nodes"][0] != "rig1"
        await post(running, "mia", "/jobs", JOB, 201)
        (lease,) = await read(running, "mia", "/leases")
        assert (await wait_for_state(running, f"/leases/{lease['id']}", "active"))["nodes"] == ["rig1"]


async def test_the_cluster_shows_what_is_open_to_the_caller(setting: Setting) -> None:
    """The hub's spawner asks for the user of a page."""
    restrict(setting)
    async with asgi_broker(setting) as running:

        async def read_view(token: str, **params: Any) -> tuple[dict[str, bool], list[str], int]:
            view = await read(running, token, "/cluster", **params)
            profiles = {profile["name"]: profile for profile in view["profiles"]}
            is_open = {node["name"]: node["is_open"] for node in view["nodes"]}
            return is_open, sorted(profiles), profiles["rtx5090"]["total"]

        names = ["any", "cpu", "rtx5070", "rtx5090"]
        others = ({"rig1": False, "rig2": True, "rig3": True}, names, 0)
        members = (dict.fromkeys(("rig1", "rig2", "rig3"), True), sorted([*names, "rtx5060"]), 1)
        assert [await read_view(who) for who in ("ben", "mia", "dee", "spawner")] == [others, members, members, others]
        assert await read_view("spawner", group=["vision"]) == members
        assert await read_view("spawner", group=["lab"]) == others
        refused = await read(running, "ben", "/cluster", 403, group=["vision"])
        assert refused["detail"] == "ben may not set the groups of a user"
        assert [(node["name"], node["groups"], node["is_open"]) for node in await read(running, "mia", "/nodes")] == [
            ("rig1", ["vision"], True),
            ("rig2", [], True),
            ("rig3", [], True),
        ]
