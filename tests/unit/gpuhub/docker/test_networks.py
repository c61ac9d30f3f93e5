"""The MTU of users' networks follows from the kernel's routes to the nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.docker.networks import Route, build_user_network, choose_mtu, find_mtu, parse_route
from tests.support.docker.simulated_nodes import build_cluster


def build_route(interface: str, mtu: int | None) -> Route:
    return Route(address="10.0.0.7", interface=interface, mtu=mtu)


@pytest.mark.parametrize(
    ("ways", "mtu"),
    [
        ([], 1500),
        ([build_route("lo", 65536)], 1500),
        ([build_route("eth0", 1500), build_route("wg0", 1420), build_route("lo", 65536)], 1420),
        ([build_route("tailscale0", 1280), build_route("wg0", 1420)], 1280),
        ([build_route("eth0", 9000)], 1500),
        ([build_route("eth0", None)], 1500),
        ([build_route("tun0", 626)], 626),
    ],
)
def test_smallest_route_mtu_is_used(ways: list[Route], mtu: int) -> None:
    """Routes within this machine do not count, and jumbo frames need a setting."""
    assert choose_mtu(ways) == mtu


def test_too_small_route_mtu_is_an_error() -> None:
    """The error has the needed value and the setting that overrides it."""
    with pytest.raises(SetupError, match=r"10\.0\.0\.7 over tun0 has an MTU of 600 bytes.*626 at least.*network\.mtu"):
        choose_mtu([build_route("eth0", 1500), build_route("tun0", 600)])


@pytest.mark.parametrize(
    ("route", "found"),
    [
        ({"dst": "10.0.0.7", "dev": "wg0"}, build_route("wg0", 1420)),
        ({"dst": "10.0.0.7", "dev": "wg0", "metrics": [{"rtt": 5}, {"mtu": 1300}]}, build_route("wg0", 1300)),
        ({"dst": "10.0.0.7", "dev": "eth9"}, build_route("eth9", None)),
        ({"type": "local", "dst": "10.0.0.7", "dev": "wg0"}, build_route("lo", None)),
        ({}, None),
    ],
)
def test_kernel_routes_are_parsed(tmp_path: Path, route: dict[str, object], found: Route | None) -> None:
    """A route may have an MTU that differs from its interface's; an own address has no outgoing interface."""
    (tmp_path / "wg0").mkdir()
    (tmp_path / "wg0" / "mtu").write_text("1420\n")
    assert parse_route("10.0.0.7", json.dumps([route]).encode(), tmp_path) == found


@pytest.mark.process
def test_configured_mtu_takes_precedence() -> None:
    """And overlays leave room for VXLAN's header."""
    cluster = build_cluster()
    jumbo = cluster.model_copy(update={"network": cluster.network.model_copy(update={"mtu": 9000})})
    assert find_mtu(jumbo) == 9000
    assert cluster.network.mtu == "auto"
    assert find_mtu(cluster) == 1500
    options = build_user_network(jumbo, "gpuhub", "ada", 9000)["options"]
    assert options == {"com.docker.network.driver.mtu": "9000"}
