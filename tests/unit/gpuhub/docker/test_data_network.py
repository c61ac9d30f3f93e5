"""What Docker is told about the data network, and that a container without its addresses does not start."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.data_network import build_data_network, join_data_network
from gpuhub.docker.networks import UserNetwork
from tests.support.clusters import build_cluster

NETWORK = UserNetwork(name="ghtest-net-ada", id="wi326", subnet="10.201.5.0/24")


class OneNode:
    """A daemon with one container on its user's overlay, and perhaps a data network."""

    instance = "ghtest"

    def __init__(self, network: dict[str, Any] | None = None, *, mac: str = "", in_use: bool = False) -> None:
        self.network, self.in_use, self.mac = network, in_use, mac
        self.joined: dict[str, Any] = {NETWORK.name: {"IPAddress": "10.201.5.7", "MacAddress": ""}}
        self.created: list[dict[str, Any]] = []

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        assert node == "rig1"
        match method:
            case "inspect_network" if self.network is None:
                raise NotFound("no such network")
            case "inspect_network":
                return self.network
            case "inspect_container":
                return {"NetworkSettings": {"Networks": self.joined}}
            case "create_network":
                self.created.append(kwargs)
                self.network = describe(kwargs)
            case "remove_network" if self.in_use:
                raise GpuhubError("network ghtest-data has active endpoints")
            case "remove_network":
                self.network = None
            case "connect_container_to_network":
                address, mac = kwargs["ipv4_address"], self.mac or kwargs["mac_address"]
                self.joined[args[1]] = {"IPAddress": address, "MacAddress": mac}
        return None


def describe(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"Id": "d1", "Options": arguments["options"], "IPAM": {"Config": arguments["ipam"]["Config"]}}


def build(interface: str = "eth1", **network: Any) -> ClusterSettings:
    cluster = build_cluster(network=network)
    nodes = tuple(node.model_copy(update={"data_interface": interface}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


async def join(daemons: OneNode, cluster: ClusterSettings) -> None:
    await join_data_network(daemons, cluster, "rig1", "c1", NETWORK)  # type: ignore[arg-type]


async def test_container_gets_the_address_that_follows_from_its_overlay() -> None:
    """And its Ethernet address; a second start connects nothing."""
    daemons = OneNode()
    await join(daemons, build())
    await join(daemons, build())
    assert daemons.joined["ghtest-data"] == {"IPAddress": "10.202.5.7", "MacAddress": "02:42:0a:ca:05:07"}
    [created] = daemons.created
    assert created["options"] == {"parent": "eth1", "macvlan_mode": "private"}
    assert created["internal"]


async def test_network_of_other_settings_is_replaced_when_it_is_unused() -> None:
    """Containers on it keep it, and the error says what to change."""
    old = describe(build_data_network(build("eth0"), "ghtest", build("eth0").nodes[0]))
    daemons = OneNode(old)
    await join(daemons, build())
    assert daemons.network is not None
    assert daemons.network["Options"]["parent"] == "eth1"
    for changed in (build(), build("eth0", data_pool="10.208.0.0/16")):
        with pytest.raises(
            Conflict, match=r"containers on rig1 .* before data_interface or data_pool was changed: stop"
        ):
            await join(OneNode(old, in_use=True), changed)


async def test_container_with_another_ethernet_address_is_refused() -> None:
    """The firewall would not know it."""
    with pytest.raises(GpuhubError, match=r"02:42:AA:00:00:01.*instead of 10\.202\.5\.7 \(02:42:0a:ca:05:07\)"):
        await join(OneNode(mac="02:42:AA:00:00:01"), build())


@pytest.mark.parametrize(("address", "cause"), [("", "empty"), ("10.77.5.7", r"not in network\.overlay_pool")])
async def test_container_on_an_overlay_of_another_pool_is_refused(address: str, cause: str) -> None:
    """As after a change of overlay_pool."""
    daemons = OneNode()
    daemons.joined[NETWORK.name]["IPAddress"] = address
    with pytest.raises(GpuhubError, match=cause):
        await join(daemons, build())
