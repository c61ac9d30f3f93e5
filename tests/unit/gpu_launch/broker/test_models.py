"""What the broker's answers mean for a notebook."""

from __future__ import annotations

import pytest

from gpu_launch.broker import models


def read_cluster(wanted_by, **content):
    """Return a cluster whose nodes have these owners of waiting requests."""
    nodes = [{"name": name, "wanted_by": owners} for name, owners in wanted_by.items()]
    return models.parse_cluster({"nodes": nodes, "waiting": 1, **content})


@pytest.mark.parametrize(
    ("owners", "is_wanted"), [([], False), (["ada"], False), (["ben"], True), (["ada", "ben"], True), (None, True)]
)
def test_nodes_are_wanted_by_others_than_their_holder(owners, is_wanted):
    """An older broker names no owners, so that any waiting request counts."""
    cluster = read_cluster({"rig1": owners, "rig2": ["ben"]})
    assert cluster.is_wanted(frozenset({"rig1"}), owner="ada") is is_wanted


def test_in_doubt_any_waiting_request_counts():
    """Of a node that is not shown, and of Slurm's jobs from outside, it is not known who wants what."""
    assert read_cluster({"rig1": []}).is_wanted(frozenset({"rig1", "rig2"}), owner="ada")
    assert not read_cluster({"rig1": []}, waiting=0).is_wanted(frozenset({"rig1", "rig2"}), owner="ada")
    assert read_cluster({"rig1": []}, waiting=0, waiting_outside=1).is_wanted(frozenset({"rig1"}), owner="ada")
