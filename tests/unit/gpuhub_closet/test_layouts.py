"""The practice closets that `make up CLOSET=…` chooses from."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub_closet import gpu_state, layouts
from gpuhub_closet.cluster_file import format_cluster
from gpuhub_closet.paths import layout_file, node_paths


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """An instance whose state is in a folder of the test."""
    monkeypatch.setattr(Paths, "state", property(lambda self: tmp_path / self.instance))
    return Paths("ghtest")


def test_house_has_five_nodes_and_lab_four_gpus_in_each() -> None:
    """The GPUs, and the speed of the links."""
    house, lab = layouts.build_plan("ghtest", "house"), layouts.build_plan("ghtest", "lab")
    assert [[card.model for card in node.gpus] for node in house.nodes] == [
        ["RTX 5090"], ["RTX 5090"], ["RTX 5070"], ["RTX 5070"], ["RTX 5060"],
    ]  # fmt: skip
    assert [[card.name for card in node.gpus] for node in lab.nodes] == [["NVIDIA A100-SXM4-80GB"] * 4] * 3
    assert house.link and lab.link and (house.link.rate_mbit, lab.link.rate_mbit) == (2500, 10_000)


def test_nodes_keep_their_names_in_all_layouts() -> None:
    """So the images that one layout brought to a node are there for the next one."""
    assert [node.name for node in layouts.build_largest_plan("ghtest").nodes] == [
        "rig1",
        "rig2",
        "rig3",
        "rig4",
        "rig5",
    ]
    for name in layouts.LAYOUTS:
        plan, largest = layouts.build_plan("ghtest", name), layouts.build_largest_plan("ghtest")
        assert all(largest.node(node.name).address == node.address for node in plan.nodes)


@pytest.mark.parametrize("backend", ["builtin", "slurm"])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_cluster_file_of_each_layout_is_valid(layout: str, backend: str, tmp_path: Path) -> None:
    """gpuhub's own parser accepts it, and all GPUs of a node are a profile."""
    plan, file = layouts.build_plan("ghtest", layout), tmp_path / "cluster.toml"
    file.write_text(format_cluster(plan, Paths("ghtest"), cpus=8, backend=backend))
    cluster = settings.load(file)
    assert [node.name for node in cluster.nodes] == [node.name for node in plan.nodes]
    profiles = {profile.name: profile.gpu_count for profile in cluster.profiles if profile.gpu_share == 1}
    assert (
        profiles
        == {
            "practice": {"rtx5090": 1, "rtx5070": 1, "rtx5060": 1, "cpu": 0},
            "house": {"rtx5090": 1, "rtx5070": 1, "rtx5060": 1, "cpu": 0},
            "lab": {"a100": 1, "a100x4": 4, "cpu": 0},
        }[layout]
    )


def test_choice_is_kept_until_the_next_one(paths: Paths) -> None:
    """`make up` without CLOSET starts what ran last; at first, the usual one."""
    assert layouts.choose_layout(paths, None, is_running=False) == layouts.build_plan("ghtest")
    assert layouts.choose_layout(paths, "lab", is_running=False) == layouts.build_plan("ghtest", "lab")
    assert layouts.choose_layout(paths, None, is_running=False) == layouts.build_plan("ghtest", "lab")
    assert layouts.find_plan(paths) == layouts.build_plan("ghtest", "lab")
    assert layouts.choose_layout(paths, "practice", is_running=False) == layouts.build_plan("ghtest")


def test_running_closet_does_not_become_another(paths: Paths) -> None:
    """The error has the two commands; the same layout again is fine."""
    layouts.choose_layout(paths, "house", is_running=False)
    with pytest.raises(SetupError, match=r"runs with CLOSET=house: `sudo make down` first, .*CLOSET=lab"):
        layouts.choose_layout(paths, "lab", is_running=True)
    assert layouts.find_layout(paths) == "house"
    assert layouts.choose_layout(paths, "house", is_running=True) == layouts.build_plan("ghtest", "house")
    with pytest.raises(SetupError, match="runs with CLOSET=practice"):
        layouts.choose_layout(Paths("other"), "lab", is_running=True)


def test_unknown_layout_is_refused(paths: Paths) -> None:
    """The error names those that there are, and nothing is kept."""
    with pytest.raises(
        SettingsError, match="CLOSET=castle: there is no such practice closet; there are practice, house, lab"
    ):
        layouts.choose_layout(paths, "castle", is_running=False)
    assert not layout_file(paths).exists()


def test_layout_of_another_version_is_none(paths: Paths) -> None:
    """A name in the file that this version does not know leads to the usual closet."""
    paths.closet.mkdir(parents=True)
    layout_file(paths).write_text("palace\n")
    assert layouts.find_layout(paths) is None
    assert layouts.find_plan(paths) == layouts.build_plan("ghtest")


def test_gpus_of_another_layout_are_removed(paths: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node with four GPUs that gets one has one afterwards, with the load that it had."""
    monkeypatch.setattr(Paths, "run", property(lambda self: tmp_path / "run"))
    lab, practice = layouts.build_plan("ghtest", "lab"), layouts.build_plan("ghtest")
    gpu_state.ensure_gpus(lab, lab.node("rig1"), paths)
    folder = node_paths(paths, "rig1").gpus
    (folder / "0" / "live").write_text("utilization 7\n")
    assert sorted(gpu.name for gpu in folder.iterdir()) == ["0", "1", "2", "3"]
    gpu_state.ensure_gpus(practice, practice.node("rig1"), paths)
    assert [gpu.name for gpu in folder.iterdir()] == ["0"]
    assert "RTX 5090" in (folder / "0" / "card").read_text()
    assert (folder / "0" / "live").read_text() == "utilization 7\n"
