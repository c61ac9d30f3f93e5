"""Volumes on nodes: which can go, and that the broker takes them away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers.nodes import volume_gc as keeping
from gpuhub.broker.controllers.nodes.volume_gc import (
    Volume,
    VolumeCollector,
    find_unneeded_volumes,
    parse_volumes,
)
from gpuhub.common import names
from gpuhub.config.settings import StorageSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker.containers.container_lifecycle import find_used_volumes
from gpuhub.docker.containers.mounts import build_mounts
from tests.support.broker.calls import ask
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import SimulatedDaemons, build_cluster

DAY = 86400.0
INSTANCE = "ghtest"
ADA = UserIdentity(name="ada", uid=1001, gid=1001, group_names=("ada",))
NFS = StorageSettings(home="nfs://nas/home/{username}", datasets="nfs://nas/data")


def build_container_listing(storage: StorageSettings, identity: UserIdentity = ADA) -> dict[str, Any]:
    """The volumes of a user's containers as a daemon lists them."""
    mounts = [mount for mount in build_mounts(storage, INSTANCE, identity) if mount["Type"] == "volume"]
    return {
        "Volumes": [
            {
                "Name": mount["Source"],
                "Labels": mount["VolumeOptions"]["Labels"],
                "Options": mount["VolumeOptions"].get("DriverConfig", {}).get("Options"),
            }
            for mount in mounts
        ]
    }


def list_unneeded(volumes: list[Volume], storage: StorageSettings = NFS, **more: Any) -> list[str]:
    rest: dict[str, Any] = {"used": (), "busy": (), "idle_s": {}, **more}
    return [one.volume.name for one in find_unneeded_volumes(volumes, storage=storage, instance=INSTANCE, **rest)]


def test_unused_volumes_of_old_settings_are_removed() -> None:
    """Volumes of the current settings and users' data remain, however long they were idle."""
    now = parse_volumes(build_container_listing(NFS), INSTANCE)
    before = parse_volumes(build_container_listing(NFS.model_copy(update={"nfs_options": "nfsvers=3"})), INSTANCE)
    old = sorted(volume.name for volume in before if volume.is_nfs)
    assert len(old) == 2
    assert list_unneeded(now, idle_s={volume.name: 10 * DAY for volume in now}) == []
    assert sorted(list_unneeded([*now, *before])) == old
    assert list_unneeded(before, used=old[:1]) == old[1:]
    assert list_unneeded(before, busy=("ada",)) == [name for name in old if "datasets" in name]


def test_only_old_unused_scratch_volumes_are_removed() -> None:
    """Age is not enough: a container, running or not, keeps it, and so does an open lease."""
    (scratch,) = (volume for volume in parse_volumes(build_container_listing(NFS), INSTANCE) if volume.is_scratch)
    idle = {scratch.name: 15 * DAY}
    assert list_unneeded([scratch], idle_s=idle) == [scratch.name]
    assert list_unneeded([scratch], idle_s={scratch.name: 13 * DAY}) == []
    assert list_unneeded([scratch]) == []
    assert list_unneeded([scratch], idle_s=idle, busy=("ada",)) == []
    containers = [{"State": "exited", "Mounts": [{"Type": "volume", "Name": scratch.name}, {"Type": "bind"}]}]
    assert list_unneeded([scratch], idle_s=idle, used=find_used_volumes(containers)) == []


def test_foreign_volumes_are_not_removed() -> None:
    """Another instance's, and what has no labels at all."""
    found = build_container_listing(NFS)
    for raw in found["Volumes"]:
        raw["Labels"] = {**raw["Labels"], names.LABEL_INSTANCE: "other"}
    found["Volumes"].append({"Name": "mine", "Labels": None, "Options": None})
    assert parse_volumes(found, INSTANCE) == []
    assert parse_volumes({"Volumes": None}, INSTANCE) == []


@pytest.fixture
def clock() -> AheadClock:
    """A clock that tests advance."""
    return AheadClock()


@pytest.fixture
def setting(tmp_path: Path, clock: AheadClock) -> Setting:
    """Three simulated nodes, each with ada's scratch."""
    made = Setting(tmp_path, clock=clock, cluster=build_cluster(storage=StorageSettings()))
    for node in made.nodes.values():
        node.volumes = {raw["Name"]: raw for raw in build_container_listing(StorageSettings())["Volumes"]}
    return made


def build_collector(running: Running, setting: Setting) -> VolumeCollector:
    daemons = SimulatedDaemons(setting.cluster.nodes, setting.nodes, setting.folder)
    return VolumeCollector(core=running.core, daemons=daemons)


def list_scratch_nodes(setting: Setting) -> list[str]:
    """Nodes that have ada's scratch."""
    return [name for name, node in setting.nodes.items() if names.scratch_volume_name(INSTANCE, "ada") in node.volumes]


async def end_lease(running: Running, lease: dict[str, Any]) -> None:
    async with running.client("ada") as client:
        assert (await client.delete(f"/api/v1/leases/{lease['id']}")).status_code == 200


async def run_and_end_lease(running: Running, setting: Setting) -> str:
    """Ada has a GPU and gives it back; the node."""
    lease = await ask(running, "ada")
    await end_lease(running, lease)
    await until(lambda: lease["id"] not in running.core.ledger.snapshot.leases, "the lease has ended")
    return str(lease["nodes"][0])


async def test_scratch_ages_from_the_last_lease_on_its_node(setting: Setting, clock: AheadClock) -> None:
    """Known over restarts of the broker; where no lease is known, from when the volume was first seen."""
    async with asgi_broker(setting) as running:
        node = await run_and_end_lease(running, setting)
    clock.ahead_s += 13 * DAY
    async with asgi_broker(setting) as running:
        await until(
            lambda: all(one.is_up for one in running.core.capacity.inventory.nodes.values()), "all nodes are up"
        )
        volumes = build_collector(running, setting)
        await volumes.collect()
        assert list_scratch_nodes(setting) == list(setting.nodes)
        clock.ahead_s += 2 * DAY
        await volumes.collect()
        assert list_scratch_nodes(setting) == [one for one in setting.nodes if one != node]
        events = [event for event in await running.core.read_events(None, 50, None) if event.kind == "volume.removed"]
        assert [(event.owner, event.node) for event in events] == [("ada", node)]
        assert "no container of ada used it for 14 d" in events[0].text
        clock.ahead_s += 13 * DAY
        await volumes.collect()
        assert list_scratch_nodes(setting) == []


async def test_scratch_is_kept_by_a_container_or_a_lease(setting: Setting, clock: AheadClock) -> None:
    """Also a container that has ended, and also when the lease's node is another: a start may be under way."""
    async with asgi_broker(setting) as running:
        volumes = build_collector(running, setting)
        await until(
            lambda: all(one.is_up for one in running.core.capacity.inventory.nodes.values()), "all nodes are up"
        )
        await volumes.collect()
        container = setting.nodes["rig3"].run_container({"gpuhub.instance": "foreign"}, state="exited")
        mount = {"Type": "volume", "Name": names.scratch_volume_name(INSTANCE, "ada")}
        setting.nodes["rig3"].containers[container]["Mounts"] = [mount]
        lease = await ask(running, "ada")
        clock.ahead_s += 20 * DAY
        await volumes.collect()
        assert list_scratch_nodes(setting) == list(setting.nodes)
        await end_lease(running, lease)
        await until(lambda: not running.core.ledger.snapshot.leases, "the lease has ended")
        await volumes.collect()
        assert "rig3" in list_scratch_nodes(setting)


async def test_clock_jump_does_not_age_scratch(setting: Setting, clock: AheadClock) -> None:
    """A jump of the clock by a month does not count as a month without use."""
    async with asgi_broker(setting) as running:
        await run_and_end_lease(running, setting)
        volumes = build_collector(running, setting)
        await until(
            lambda: all(one.is_up for one in running.core.capacity.inventory.nodes.values()), "all nodes are up"
        )
        clock.jump_s = 30 * DAY
        await running.core.apply_clock_jump()
        await volumes.collect()
        assert list_scratch_nodes(setting) == list(setting.nodes)


async def test_volume_cleanup_skips_unreachable_nodes(
    setting: Setting, clock: AheadClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop queries the nodes that answer."""
    monkeypatch.setattr(keeping, "COLLECT_PERIOD_S", 0.05)
    setting.cluster = build_cluster(storage=StorageSettings.model_validate({"scratch_keep": "1s"}))
    setting.nodes["rig2"].is_reachable = False
    async with asgi_broker(setting, wait=False) as running:
        await until(
            lambda: len([1 for one in running.core.capacity.inventory.nodes.values() if one.is_up]) == 2, "two are up"
        )
        clock.ahead_s += 2
        await until(lambda: list_scratch_nodes(setting) == ["rig2"], "the others' scratch is gone")
