"""What Docker is told of the Swarm's addresses."""

from __future__ import annotations

from typing import Any, cast

from gpuhub.docker import swarm
from gpuhub.docker.client import DockerClients
from tests.support.clusters import build_cluster


class RecordedDaemons:
    """Daemons outside of any Swarm, which keep what they are told to init or join."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}

    async def call(self, node: str, method: str, *_args: object, **values: Any) -> Any:
        """Answer as a daemon of that node does."""
        if method in {"init_swarm", "join_swarm"}:
            self.calls[node] = values
            return True
        if method == "info":
            is_active = node in self.calls
            state = "active" if is_active else "inactive"
            return {
                "Swarm": {"LocalNodeState": state, "ControlAvailable": node == "rig1" and is_active, "NodeID": node}
            }
        if method == "inspect_swarm":
            return {"ID": "swarm", "JoinTokens": {"Worker": "token"}}
        assert method == "nodes"
        return [{"ID": name, "Status": {"State": "ready"}} for name in self.calls]


async def test_only_ranks_packets_take_the_second_network() -> None:
    """The data path has the data address; Swarm's own connections stay on the other one."""
    cluster = build_cluster()
    nodes = tuple(
        node.model_copy(update={"data_address": f"10.10.0.{number}"}) if number < 3 else node
        for number, node in enumerate(cluster.nodes, 1)
    )
    daemons = RecordedDaemons()
    await swarm.ensure_swarm(cast("DockerClients", daemons), cluster.model_copy(update={"nodes": nodes}))
    paths = {node: values["data_path_addr"] for node, values in daemons.calls.items()}
    assert paths == {"rig1": "10.10.0.1", "rig2": "10.10.0.2", "rig3": "192.168.1.23"}
    assert daemons.calls["rig2"]["advertise_addr"] == "192.168.1.22"
    assert daemons.calls["rig2"]["remote_addrs"] == ["192.168.1.21:2377"]
    assert daemons.calls["rig1"]["listen_addr"] == "192.168.1.21:2377"
