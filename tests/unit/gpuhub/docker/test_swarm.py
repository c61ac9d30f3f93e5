"""The addresses that Docker gets for the Swarm, the roles of nodes, and which manager is asked."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gpuhub.common.errors import GpuhubError, NodeSilent, NodeUnreachable
from gpuhub.config.settings import NodeSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.swarm import managers, membership
from tests.support.clusters import build_cluster

#: As Docker 20.10 answers on a node of three managers that has lost its peers, and on one that is no manager.
NO_LEADER = (
    "rpc error: code = Unknown desc = The swarm does not have a leader. It's possible that too few managers are online."
)
NO_MANAGER = "This node is not a swarm manager. Manager is being prepared or has trouble connecting to the cluster."


class RecordedDaemons:
    """Daemons outside of any Swarm, which record the calls to make or join one, and their roles."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self.roles: dict[str, str] = {}
        self.swarm_manager = None

    async def call(self, node: str, method: str, *args: Any, **values: Any) -> Any:
        """Answer as a daemon of that node does."""
        if method in {"init_swarm", "join_swarm"}:
            self.calls[node] = values
            self.roles[node] = "manager" if method == "init_swarm" else "worker"
            return True
        if method == "info":
            role = self.roles.get(node)
            state = "active" if role else "inactive"
            return {"Swarm": {"LocalNodeState": state, "ControlAvailable": role == "manager", "NodeID": node}}
        if method == "inspect_swarm":
            return {"ID": "swarm", "JoinTokens": {"Worker": "token"}}
        if method == "update_node":
            name, version, spec = args
            assert version == 7
            self.roles[name] = spec["Role"]
            return True
        assert method == "nodes"
        return [
            {
                "ID": name,
                "Version": {"Index": 7},
                "Spec": {"Labels": {}, "Role": role, "Availability": "active"},
                "Status": {"State": "ready", "Addr": f"192.168.1.2{name[-1]}"},
                **({"ManagerStatus": {"Reachability": "reachable"}} if role == "manager" else {}),
            }
            for name, role in self.roles.items()
        ]


@pytest.fixture(autouse=True)
def open_ports(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The nodes whose port for managers can be reached, in place of a connection: all of them, unless a test says less."""
    names = {"rig1", "rig2", "rig3"}

    async def is_port_open(node: NodeSettings) -> bool:
        return node.name in names

    monkeypatch.setattr(managers, "_is_port_open", is_port_open)
    return names


async def test_only_ranks_packets_take_the_second_network() -> None:
    """The data path has the data address; Swarm's own connections stay on the other one."""
    cluster = build_cluster()
    nodes = tuple(
        node.model_copy(update={"data_address": f"10.10.0.{number}"}) if number < 3 else node
        for number, node in enumerate(cluster.nodes, 1)
    )
    daemons = RecordedDaemons()
    await membership.ensure_swarm(cast("DockerClients", daemons), cluster.model_copy(update={"nodes": nodes}))
    paths = {node: values["data_path_addr"] for node, values in daemons.calls.items()}
    assert paths == {"rig1": "10.10.0.1", "rig2": "10.10.0.2", "rig3": "192.168.1.23"}
    assert daemons.calls["rig2"]["advertise_addr"] == "192.168.1.22"
    assert daemons.calls["rig2"]["remote_addrs"] == ["192.168.1.21:2377"]
    assert daemons.calls["rig1"]["listen_addr"] == "192.168.1.21:2377"


async def test_a_swarm_of_one_manager_gets_two_more() -> None:
    """As after an update from a version that left it to the first node alone."""
    cluster = build_cluster()
    daemons = RecordedDaemons()
    daemons.roles = {"rig1": "manager", "rig2": "worker", "rig3": "worker"}
    await membership.ensure_swarm(cast("DockerClients", daemons), cluster)
    assert daemons.calls == {}
    assert set(daemons.roles.values()) == {"manager"}


async def test_behind_a_firewall_the_one_manager_stays_alone(open_ports: set[str]) -> None:
    """Of two managers both would be needed; the warning names the address."""
    open_ports.remove("rig3")
    daemons = RecordedDaemons()
    daemons.roles = {"rig1": "manager", "rig2": "worker", "rig3": "worker"}
    warning = await membership.ensure_swarm(cast("DockerClients", daemons), build_cluster())
    assert daemons.roles == {"rig1": "manager", "rig2": "worker", "rig3": "worker"}
    assert warning == (
        "rig1 alone keeps users' networks, and nothing starts while it is down; of rig1, rig2, rig3 one could be away, "
        "but 192.168.1.23:2377 cannot be reached: TCP 2377 must be open between the nodes"
    )


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "_PAUSE_S", 0.001)


@pytest.mark.usefixtures("hasty")
async def test_the_next_manager_is_asked_and_then_remembered() -> None:
    """One that does not answer costs time once, and is asked again when the other one is away."""
    asked: list[str] = []
    failures: dict[str, GpuhubError] = {"rig1": NodeUnreachable("node rig1: it is off")}
    daemons = cast("DockerClients", RecordedDaemons())

    async def work(node: str) -> str:
        asked.append(node)
        if node in failures:
            raise failures[node]
        return node

    assert await managers.ask_manager(daemons, build_cluster(), work) == "rig2"
    assert await managers.ask_manager(daemons, build_cluster(), work) == "rig2"
    assert asked == ["rig1", "rig2", "rig2"]
    failures = {"rig2": GpuhubError(NO_MANAGER)}
    assert await managers.ask_manager(daemons, build_cluster(), work) == "rig1"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("failure", [GpuhubError(NO_LEADER), NodeSilent("it does not answer in time")])
async def test_a_leader_is_waited_for(failure: GpuhubError) -> None:
    """The managers choose one within some seconds, in which they refuse requests or leave them without an answer."""
    left = 5

    async def work(node: str) -> str:
        nonlocal left
        left -= 1
        if left > 0:
            raise failure
        return node

    daemons = cast("DockerClients", RecordedDaemons())
    assert await managers.ask_manager(daemons, build_cluster(), work) in {"rig1", "rig2", "rig3"}


@pytest.mark.usefixtures("hasty")
async def test_without_a_leader_it_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors are not repeated at all."""
    monkeypatch.setattr(managers, "_ELECTION_DEADLINE_S", 0.01)
    asked: list[str] = []

    async def lead_less(node: str) -> None:
        raise GpuhubError(f"node {node}: {NO_LEADER}")

    async def fail(node: str) -> None:
        asked.append(node)
        raise GpuhubError("no space left on device")

    daemons = cast("DockerClients", RecordedDaemons())
    with pytest.raises(NodeUnreachable, match=r"node rig1: .*leader.*; node rig2: .*; node rig3: "):
        await managers.ask_manager(daemons, build_cluster(), lead_less)
    with pytest.raises(GpuhubError, match="no space left"):
        await managers.ask_manager(daemons, build_cluster(), fail)
    assert len(asked) == 1
