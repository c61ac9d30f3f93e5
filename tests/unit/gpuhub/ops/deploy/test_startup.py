"""Checks of `gpuhub up` before it starts services, and the provider of nodes."""

from __future__ import annotations

import shutil
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from gpuhub.broker_api.schemas import ClusterView, GpuState, GpuView, NodeState, NodeView
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.ops.deploy import cluster_choice, startup
from gpuhub.ops.deploy.node_setup import check_unique_daemons
from gpuhub.ops.deploy.programs import Supervisor
from gpuhub.ops.deploy.readiness import check_unique_gpus
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.paths import FolderPaths


def node(name: str, *uuids: str) -> NodeView:
    """A node with these GPUs."""
    gpus = tuple(
        GpuView(
            uuid=uuid, node=name, index=index, model="RTX 5090", memory_mib=32607, state=GpuState.FREE, holder=None,
            utilisation_percent=None, memory_used_mib=None,
        )
        for index, uuid in enumerate(uuids)
    )  # fmt: skip
    return NodeView(name=name, state=NodeState.UP, message=None, gpus=gpus)


def view(*nodes: NodeView) -> ClusterView:
    """A cluster of these nodes."""
    return ClusterView(nodes=nodes, profiles=(), queue=(), now=datetime.now(UTC))


def test_two_nodes_that_are_one_machine_are_refused() -> None:
    """The addresses differ, but the GPUs are the same; the error names both nodes."""
    with pytest.raises(SettingsError, match="nodes rig1 and rig3 report the same GPU GPU-a") as refused:
        check_unique_gpus(view(node("rig1", "GPU-a"), node("rig2", "GPU-b"), node("rig3", "GPU-c", "GPU-a")))
    assert "GPU-b" not in str(refused.value)


def test_nodes_with_different_gpus_are_accepted() -> None:
    nodes = view(node("rig1", "GPU-a"), node("rig2", "GPU-b", "GPU-c"))
    check_unique_gpus(nodes)
    assert len(nodes.nodes) == 2


def test_daemons_with_one_identity_are_refused() -> None:
    """The error names the nodes, the identity and the remedy."""
    with pytest.raises(SetupError, match="daemons of rig1 and rig3 have the same identity AAAA") as refused:
        check_unique_daemons({"rig1": "AAAA", "rig2": "BBBB", "rig3": "AAAA"})
    assert "rig2" not in str(refused.value)
    assert "remove /etc/docker/key.json" in str(refused.value)
    check_unique_daemons({"rig1": "AAAA", "rig2": "BBBB"})


class FakeSupervisor:
    """A supervisord with programs in these states; without any, it does not run."""

    def __init__(self, **states: str) -> None:
        self._states = states

    def is_running(self) -> bool:
        return bool(self._states)

    def states(self) -> dict[str, str]:
        assert self._states, "nothing answers"
        return self._states


@pytest.mark.parametrize(
    ("states", "expected"),
    [({}, False), ({"hub": "RUNNING"}, False), ({"hub": "RUNNING", "prometheus": "STOPPED"}, True)],
)
def test_a_supervised_prometheus_is_recognised(states: dict[str, str], expected: bool) -> None:
    """Then it may be what listens on its port."""
    assert startup.is_monitored(cast(Supervisor, FakeSupervisor(**states))) is expected


def test_prometheus_is_started_until_that_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot nothing runs that would show the choice, and the call at boot has no options."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    paths, off = FolderPaths("ghunit", tmp_path), cast(Supervisor, FakeSupervisor())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        cluster = build_cluster(monitoring={"port": port})
        with pytest.raises(SetupError, match="`sudo make up MONITORING=0`"):
            startup.build_prometheus(paths, cluster, off, requested=True)
    for requested, expected in ((None, False), (True, True), (None, True), (None, True), (False, False), (None, False)):
        assert bool(startup.build_prometheus(paths, cluster, off, requested=requested)) is expected


def test_prometheus_is_no_sign_of_the_practice_closet() -> None:
    provider = cluster_choice.find_provider()
    assert provider is not None
    services = {"proxy", "broker", "hub"}
    assert provider.find_running_backend({*services, "prometheus"}) is None
    assert provider.find_running_backend({*services, "prometheus", "rig1"}) == "builtin"


def test_the_practice_closet_is_found_by_its_entry_point() -> None:
    """gpuhub itself imports nothing of it."""
    provider = cluster_choice.find_provider()
    assert provider is not None
    assert provider.title == "Practice closet"


def test_without_a_provider_a_cluster_file_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the remedy."""
    monkeypatch.setattr(cluster_choice, "entry_points", lambda group: ())
    assert cluster_choice.find_provider() is None
    with pytest.raises(SetupError, match="no practice closet is installed: write a cluster"):
        startup._require_provider(None)
