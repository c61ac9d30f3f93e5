"""Addresses of ranks' containers on the nodes' own network cards, and settings that exclude them."""

from __future__ import annotations

import pytest

from gpuhub.config.machines.data_network import build_hardware_address, list_user_ranges, map_data_address
from gpuhub.config.machines.network import NetworkSettings
from gpuhub.config.settings import ClusterSettings
from tests.support.clusters import CARDS, build_cluster


def build(*interfaces: str | None, network: dict[str, object] | None = None, docker: bool = True) -> ClusterSettings:
    """Build a cluster of a node for each interface."""
    nodes = [
        {
            "name": name,
            "address": f"192.168.1.{20 + number}",
            **({"docker": f"unix:///run/{name}.sock"} if docker else {}),
            **({} if interface is None else {"data_interface": interface}),
        }
        for number, (name, interface) in enumerate(zip(CARDS, interfaces, strict=False), 1)
    ]
    return build_cluster(nodes=nodes, profiles=[{"name": "any", "title": "Any"}], network=network or {})


def test_every_user_has_a_part_of_the_pool() -> None:
    """A container's part is its user's as on the overlay, so that no two containers have one address."""
    network = NetworkSettings(overlay_pool="10.201.16.0/20", data_pool="10.202.0.0/16")
    assert map_data_address(network, "10.201.19.7") == "10.202.3.7"
    ranges = list_user_ranges(network)
    assert (ranges[0], ranges[3], len(ranges)) == ("10.202.0.0/24", "10.202.3.0/24", 16)
    with pytest.raises(ValueError, match=r"10\.201\.32\.7 is not in network\.overlay_pool, 10\.201\.16\.0/20"):
        map_data_address(network, "10.201.32.7")


def test_hardware_address_follows_from_the_address() -> None:
    """As Docker Engine 20.10 derives it without being told."""
    assert build_hardware_address("10.202.3.7") == "02:42:0a:ca:03:07"


def test_data_network_is_off_without_interfaces() -> None:
    """And needs nothing but the interface of each node."""
    assert not build(None, None).has_data_network
    # On one node, ranks have no other node to reach.
    assert not build("enp1s0f0").has_data_network
    assert build("enp1s0f0", "bond0.50").has_data_network


@pytest.mark.parametrize(
    ("interfaces", "network", "mistake"),
    [
        (("eth1", None, "eth1"), {}, r"data_interface is missing for rig2.*remove it from rig1, rig3"),
        (("eth1", "eth1"), {"encrypt": True}, "what ranks send there is not encrypted"),
        (("eth1", "eth1"), {"guard": False}, r"needs network\.guard = true"),
        (("eth1", "eth1"), {"overlay_pool": "10.0.0.0/12"}, "of /16 or smaller is needed"),
        (("eth1", "eth1"), {"data_pool": "10.202.0.0/20"}, r"smaller than overlay_pool, 10\.201\.0\.0/16"),
        (("eth1", "eth1"), {"data_pool": "10.200.0.0/14"}, "overlaps overlay_pool"),
        (("eth1", "eth1"), {"data_pool": "192.168.0.0/16"}, r"contains 192\.168\.1\.20, the address of a machine"),
        (("eth1", "eth1"), {"data_pool": "8.8.0.0/16"}, "a private network of /8 to /32 is needed"),
        (("eth1", "eth1"), {"data_pool": "10.202.0.1/16"}, "not an IPv4 network"),
        (("eth1", "eth1"), {"overlay_pool": "10.201.0.0/23"}, "a private network of /8 to /22 is needed"),
        (("eth1", "eth1"), {"overlay_pool": "fd00::/8"}, "not an IPv4 network"),
        (('eth1" drop', "eth1"), {}, "data_interface"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    interfaces: tuple[str | None, ...], network: dict[str, object], mistake: str
) -> None:
    """Before anything starts, with the remedy."""
    with pytest.raises(ValueError, match=mistake):
        build(*interfaces, network=network)


def test_guests_and_nodes_without_docker_have_none() -> None:
    """A guest is on no network of the nodes, and a rank without Docker is on the node's anyway."""
    guest = {"name": "rig9", "address": "10.9.0.2", "docker": "ssh://gpuhub@10.9.0.2", "guest": True}
    with pytest.raises(ValueError, match="data_interface and fabric are not for guests"):
        build_cluster(nodes=[guest | {"data_interface": "eth0"}])
    with pytest.raises(ValueError, match="without Docker ranks are on the node's network already"):
        build("eth1", "eth1", docker=False)
