"""A node that is its owner's first: others get only scavenging jobs there, which are preempted."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.config.settings import GroupSettings, SchedulingSettings
from tests.support.broker.calls import ask, post, read, wait_for_state
from tests.support.broker.in_process import ACCESS, Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster

SCAVENGING = {
    "run_id": "run-000001", "detached": True, "name": "train.py", "models": ["RTX 5090"], "scavenge": True,
}  # fmt: skip


def give_to_mia(setting: Setting, groups: tuple[str, ...] = ()) -> None:
    """Make rig1, which has the only RTX 5090, mia's first; otherwise for scavenging jobs of `groups`."""
    cluster = build_cluster(
        groups=(GroupSettings(name="vision", members=("dee",)),), scheduling=SchedulingSettings(preemption=True)
    )
    rig1, *other_nodes = cluster.nodes
    rig1 = rig1.model_copy(update={"owner": "mia", "owner_first": True, "groups": groups})
    setting.cluster = cluster.model_copy(update={"nodes": (rig1, *other_nodes)})
    setting.hub.models["mia"] = {"kind": "user", "name": "mia", "groups": [], "scopes": [ACCESS]}


async def test_scavenging_work_makes_way_for_the_owner(setting: Setting) -> None:
    """Others' jobs run there until the owner starts a notebook."""
    give_to_mia(setting)
    async with asgi_broker(setting) as running:
        job = await post(running, "ben", "/jobs", SCAVENGING, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running", "ben")
        await ask(running, "mia", profile="rtx5090")
        await wait_for_state(running, f"/jobs/{job['id']}", "preempting", "ben")


async def test_other_work_of_others_is_refused_with_the_owner(setting: Setting) -> None:
    """Notebooks and jobs that would not be preempted."""
    give_to_mia(setting)
    async with asgi_broker(setting) as running:
        detail = (await ask(running, "ben", profile="rtx5090", status=403))["detail"]
        assert detail.endswith("only for mia, and for scavenging jobs: rig1")
        await post(running, "ben", "/jobs", {**SCAVENGING, "scavenge": False}, 403)
        assert (await ask(running, "mia", profile="rtx5090"))["nodes"] == ["rig1"]


async def test_scavenging_may_be_restricted_to_groups(setting: Setting) -> None:
    """Members' jobs may use the node while its owner does not; those of others may not."""
    give_to_mia(setting, groups=("vision",))
    async with asgi_broker(setting) as running:
        detail = (await post(running, "ben", "/jobs", SCAVENGING, 403))["detail"]
        assert detail.endswith("only for mia, and for scavenging jobs of members of vision: rig1")
        job = await post(running, "dee", "/jobs", SCAVENGING, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running", "dee")


@pytest.mark.parametrize("name", ["owner:mia", "scavenging:"])
async def test_no_login_makes_somebody_the_owner(setting: Setting, name: str) -> None:
    """A provider's group of that name counts as no group, whoever reports it."""
    give_to_mia(setting)
    setting.hub.models["ben"] = {"kind": "user", "name": "ben", "groups": [name], "scopes": [ACCESS]}
    async with asgi_broker(setting) as running:
        await ask(running, "ben", profile="rtx5090", status=403)
        await ask(running, "spawner", profile="rtx5090", owner="ben", groups=[name], status=403)
        assert await read(running, "ben", "/leases") == []


async def test_the_cluster_shows_whose_the_node_is(setting: Setting) -> None:
    """And what of theirs is placed there, to each user."""
    give_to_mia(setting)
    async with asgi_broker(setting) as running:

        async def read_rig1(token: str, **params: Any) -> tuple[str, bool, bool]:
            view = await read(running, token, "/cluster", **params)
            (rig1,) = [node for node in view["nodes"] if node["name"] == "rig1"]
            return rig1["owner"], rig1["is_open"], rig1["takes_scavenging"]

        assert await read_rig1("mia") == ("mia", True, True)
        assert await read_rig1("ben") == ("mia", False, True)
        assert await read_rig1("spawner", group=["owner:mia"]) == ("mia", True, True)
