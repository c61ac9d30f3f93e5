"""Launches over simulated and real GPUs."""

from __future__ import annotations

import pytest

from gpu_launch.common.launch_spec import NodeInfo
from gpu_launch.launch.mixed_gpus import describe_mixed_gpus


def node(name: str, *, is_simulated: bool) -> NodeInfo:
    return NodeInfo(worker=0, node=name, address="10.0.0.1", interface="eth0", port=1, is_simulated=is_simulated)


def test_note_names_the_nodes_of_both_kinds():
    """And the option that chooses one kind."""
    infos = [node("rig1", is_simulated=True), node("rig3", is_simulated=False), node("rig2", is_simulated=True)]
    note = describe_mixed_gpus(infos)
    assert "GPUs of rig1, rig2 are simulated, and those of rig3 are real" in note
    assert "--model" in note


@pytest.mark.parametrize("is_simulated", [True, False])
def test_nodes_of_one_kind_need_no_note(is_simulated):
    """Nothing is hidden from their ranks."""
    assert describe_mixed_gpus([node(name, is_simulated=is_simulated) for name in ("rig1", "rig2")]) == ""
