"""What `gpuhub down` removes from nodes, and which nodes it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.docker.client import DockerClients
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy import shutdown
from tests.support.docker.simulated_nodes import SimulatedDaemons, SimulatedNode, build_cluster, simulated_nodes


@pytest.fixture
def nodes() -> dict[str, SimulatedNode]:
    nodes = simulated_nodes()
    for node in nodes.values():
        node.run_container({names.LABEL_KIND: names.KIND_NOTEBOOK})
    return nodes


async def test_every_node_that_answers_is_cleaned(nodes: dict[str, SimulatedNode], tmp_path: Path) -> None:
    """A node that does not answer is named once, with the reason, and the others have nothing left."""
    cluster = build_cluster()
    nodes["rig2"].is_reachable = False
    daemons = SimulatedDaemons(cluster.nodes, nodes, tmp_path)
    cleanup = await shutdown.clean_nodes(daemons, cluster, "ghtest")
    assert cleanup.failures == {"rig2": "node rig2: its Docker daemon cannot be reached"}
    assert cleanup.stopped.keys() == {"rig1", "rig3"}
    assert cleanup.warnings == []
    assert {name: len(node.containers) for name, node in nodes.items()} == {"rig1": 0, "rig2": 1, "rig3": 0}


async def leave_swarm(_daemons: object, _cluster: object) -> list[str]:
    """Leave it without a warning."""
    return []


class SlowSwarm(SimulatedDaemons):
    """A Swarm that takes the removed containers' tasks off a network only after some calls, as Docker 20.10 says it."""

    refusals = 2

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Answer as the simulated daemons, with a network on the first node."""
        if method == "networks":
            return [{"Id": "n1", "Name": "ghtest-net-ada"}] if node == "rig1" else []
        if method == "remove_network" and self.refusals:
            self.refusals -= 1
            raise GpuhubError(
                "node rig1: rpc error: code = FailedPrecondition desc = network n1 is in use by task 22v88udfl3m6cx"
            )
        return None if method == "remove_network" else await super().call(node, method, *args, **kwargs)


@pytest.mark.parametrize(("deadline_s", "failing"), [(20.0, []), (-1.0, ["rig1"])])
async def test_networks_go_once_swarm_has_ended_their_tasks(
    nodes: dict[str, SimulatedNode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deadline_s: float,
    failing: list[str],
) -> None:
    """A link that broke before delays what a node tells the manager; not for ever."""
    cluster = build_cluster()
    monkeypatch.setattr(shutdown, "SWARM_TASKS_DEADLINE_S", deadline_s)
    monkeypatch.setattr(shutdown.membership, "leave_swarm", leave_swarm)
    cleanup = await shutdown.clean_nodes(SlowSwarm(cluster.nodes, nodes, tmp_path), cluster, "ghtest")
    assert list(cleanup.failures) == failing


def test_down_fails_and_names_the_nodes_last(
    nodes: dict[str, SimulatedNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This machine is stopped all the same."""
    nodes["rig1"].is_reachable = nodes["rig3"].is_reachable = False
    cluster = build_cluster()

    def connect(*_arguments: object, **_options: object) -> DockerClients:
        return SimulatedDaemons(cluster.nodes, nodes, tmp_path)

    for folder in ("state", "run", "log"):
        monkeypatch.setattr(Paths, folder, property(lambda _self, folder=folder: tmp_path / folder))
    paths = Paths("ghtest")
    paths.run.mkdir()
    paths.used_cluster_file.touch()
    monkeypatch.setattr(shutdown.settings, "load", lambda _file: cluster)
    monkeypatch.setattr(shutdown, "DockerClients", connect)
    monkeypatch.setattr(shutdown, "find_provider", lambda: None)
    with pytest.raises(SetupError) as failure:
        shutdown.stop_hub(paths, StepReport())
    assert str(failure.value).splitlines()[-1] == "Not cleaned: rig1, rig3"
    assert "Stopped." not in capsys.readouterr().out
    assert not paths.run.exists()
