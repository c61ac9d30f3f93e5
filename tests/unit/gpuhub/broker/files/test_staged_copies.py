"""Which copies of datasets are removed from a node's disk."""

from __future__ import annotations

from pathlib import Path

from gpuhub.broker.files.staged_copies import (
    DatasetVersion,
    StagedCopies,
    StagedCopy,
    choose_removals,
    parse_copies,
)
from gpuhub.common import names
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import SimulatedDaemons, build_cluster, simulated_nodes

DAY = 86400.0
COPIES = [StagedCopy(volume=name, dataset=f"datasets/{name}", size=100) for name in ("old", "older", "new")]
IDLE = {"old": 3 * DAY, "older": 20 * DAY, "new": 60.0}


def removed(**changes: float) -> list[str]:
    limits = {"keep_s": 14 * DAY, "missing_bytes": 0, **changes}
    removals = choose_removals(COPIES, idle_s=IDLE, keep_s=limits["keep_s"], missing_bytes=int(limits["missing_bytes"]))
    return [removal.copy.volume for removal in removals]


def test_old_copies_go_and_then_those_that_make_room() -> None:
    """The one that was not used for the longest time first, and no more than the space needs."""
    assert removed() == ["older"]
    assert removed(missing_bytes=100) == ["older"]
    assert removed(missing_bytes=101) == ["older", "old"]
    assert removed(missing_bytes=1000) == ["older", "old", "new"]
    assert removed(keep_s=30 * DAY) == []
    (removal,) = choose_removals(COPIES, idle_s=IDLE, keep_s=30 * DAY, missing_bytes=1)
    assert removal.reason == "the node's disk needs the space"


def test_only_volumes_of_copies_are_considered() -> None:
    """Homes, scratch and strangers' volumes are not."""
    labels = {names.LABEL_KIND: names.VOLUME_STAGED, names.LABEL_DATASET: "datasets/a", names.LABEL_BYTES: "7"}
    listed = [
        {"Name": "copy", "Labels": labels},
        {"Name": "scratch", "Labels": {names.LABEL_KIND: names.VOLUME_SCRATCH}},
        {"Name": "foreign", "Labels": None},
    ]
    assert parse_copies({"Volumes": listed}) == [StagedCopy(volume="copy", dataset="datasets/a", size=7)]
    assert parse_copies({"Volumes": None}) == []


async def test_copy_in_use_or_just_requested_remains(tmp_path: Path) -> None:
    """A container's copy is in use however old it is, and a new one waits for its container."""
    nodes, cluster, clock = simulated_nodes(), build_cluster(), AheadClock()
    daemons = SimulatedDaemons(cluster.nodes, nodes, tmp_path)
    copies = StagedCopies(daemons, clock)
    version = DatasetVersion(dataset="datasets/a", digest="1" * 64, files=1, size=5)
    volume = copies.build_volume(version)
    assert volume == f"ghtest-staged-a-{'1' * 16}"

    async def find(keep_s: float = DAY) -> list[str]:
        found = await copies.find_removals("rig1", keep_s=keep_s, missing_bytes=10**6)
        return [removal.copy.volume for removal in found]

    await copies.create("rig1", version)
    # The container that fills it does not exist yet.
    assert await find() == []
    copies.record_whole("rig1", volume)
    assert await find() == []
    clock.ahead_s += 700
    assert await find() == [volume]
    container = nodes["rig1"].run_container({})
    nodes["rig1"].containers[container]["Mounts"] = [{"Name": volume}]
    assert await find() == []
    assert not await copies.remove("rig1", volume)
    del nodes["rig1"].containers[container]
    clock.ahead_s += 2 * DAY
    assert await find() == [volume]
    assert await copies.remove("rig1", volume)
    assert not await copies.exists("rig1", volume)


async def test_copy_of_an_earlier_run_of_the_broker_makes_room_at_once(tmp_path: Path) -> None:
    """Nobody has requested it in this run."""
    cluster, clock = build_cluster(), AheadClock()
    daemons = SimulatedDaemons(cluster.nodes, simulated_nodes(), tmp_path)
    version = DatasetVersion(dataset="datasets/a", digest="1" * 64, files=1, size=5)
    await StagedCopies(daemons, clock).create("rig1", version)
    later = StagedCopies(daemons, clock)
    (removal,) = await later.find_removals("rig1", keep_s=DAY, missing_bytes=10**6)
    assert removal.copy.volume == later.build_volume(version)
