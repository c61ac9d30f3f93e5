"""The MTU of users' networks follows from the kernel's routes to the nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NodeSilent, NodeUnreachable, NotFound, SetupError, Unavailable
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker import networks
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.networks import (
    Route,
    UserNetwork,
    build_user_network,
    choose_mtu,
    compute_user_mtu,
    connect_container,
    ensure_user_network,
    find_min_mtu,
    find_mtu,
    parse_route,
    remove_idle_user_networks,
)
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


def test_only_overlays_are_encrypted() -> None:
    cluster = build_cluster()
    encrypting = cluster.model_copy(update={"network": cluster.network.model_copy(update={"encrypt": True})})
    assert build_user_network(encrypting, "gpuhub", "ada", 1500)["options"] == {
        "com.docker.network.driver.mtu": "1500",
        "encrypted": "",
    }
    single = encrypting.model_copy(update={"nodes": encrypting.nodes[:1]})
    assert "encrypted" not in build_user_network(single, "gpuhub", "ada", 1500)["options"]


@pytest.mark.parametrize(
    ("mtu", "has_overlay", "is_encrypted", "users"),
    [(1500, False, False, 1500), (1500, True, False, 1450), (1500, True, True, 1424), (1420, True, True, 1344)],
)
def test_users_mtu_leaves_room_for_the_headers(mtu: int, has_overlay: bool, is_encrypted: bool, users: int) -> None:
    """The figures are those of Docker's overlay driver, which cuts an encrypted network's MTU to a multiple of four."""
    assert compute_user_mtu(mtu, has_overlay=has_overlay, is_encrypted=is_encrypted) == users


def test_least_mtu_leaves_ipv4_its_minimum() -> None:
    for is_encrypted in (False, True):
        least = find_min_mtu(is_encrypted=is_encrypted)
        assert compute_user_mtu(least, has_overlay=True, is_encrypted=is_encrypted) >= 576
    with pytest.raises(SetupError, match="655 at least"):
        choose_mtu([build_route("tun0", 640)], find_min_mtu(is_encrypted=True))


class OneNetwork(DockerClients):
    """A manager's daemon with at most one network, which may be in use."""

    def __init__(self, folder: Path) -> None:
        super().__init__([], instance="gpuhub", run_dir=folder)
        self.network: dict[str, Any] | None = None
        self.is_used = False

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "create_network":
            options = kwargs["options"]
            self.network = {"Id": f"n{len(options)}", "Driver": kwargs["driver"], "Options": options}
            self.network["IPAM"] = {"Config": [{"Subnet": "10.201.1.0/24"}]}
        elif self.network is None:
            raise NotFound(f"node {node}: network {args[0]} not found")
        elif method == "remove_network":
            if self.is_used:
                raise GpuhubError(f"node {node}: network {args[0]} is in use")
            self.network = None
        return self.network


async def test_network_with_the_other_encryption_is_replaced_when_idle(tmp_path: Path) -> None:
    built = build_cluster()
    cluster = built.model_copy(update={"network": built.network.model_copy(update={"mtu": 1500})})
    encrypting = cluster.model_copy(update={"network": cluster.network.model_copy(update={"encrypt": True})})
    daemons = OneNetwork(tmp_path)

    async def ensure(of: ClusterSettings) -> bool:
        await ensure_user_network(daemons, of, "gpuhub", "ada")
        assert daemons.network is not None
        return "encrypted" in daemons.network["Options"]

    assert await ensure(cluster) is False
    daemons.is_used = True
    with pytest.raises(Conflict, match=r"ada has a notebook .* that is not encrypted: stop it first"):
        await ensure(encrypting)
    assert await ensure(cluster) is False
    daemons.is_used = False
    assert await ensure(encrypting) is True
    assert await ensure(encrypting) is True
    assert await ensure(cluster) is False


class AllocatingManager(OneNetwork):
    """A manager's daemon with an overlay that Swarm has not allocated yet; what it shows is from Docker 20.10."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        allocated = {"Driver": "overlay", "Options": {}, "IPAM": {"Config": [{"Subnet": "10.201.8.0/24"}]}}
        self.network = {"Id": "n1", "Driver": "", "Options": None, "IPAM": {"Driver": "", "Config": None}}
        self._shown = [self.network, {**self.network, **allocated}]

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        assert method == "inspect_network", "nothing is changed"
        self.network = self._shown.pop(0) if len(self._shown) > 1 else self._shown[0]
        return self.network


async def test_network_that_is_not_allocated_yet_is_waited_for(tmp_path: Path) -> None:
    """Another start has just created it: it is not taken for one of other settings, and removed."""
    network = await ensure_user_network(AllocatingManager(tmp_path), build_cluster(), "gpuhub", "ada")
    assert (network.id, network.subnet) == ("n1", "10.201.8.0/24")


class SilentManager(DockerClients):
    """The node that keeps users' networks does not answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__([], instance="gpuhub", run_dir=folder)

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        raise NodeUnreachable(f"node {node}: its Docker daemon does not answer in time")


async def test_silent_manager_does_not_make_the_own_node_unreachable(tmp_path: Path) -> None:
    """What starts on another node would be taken for something that may run there."""
    with pytest.raises(Unavailable, match="nothing can start until two of rig1, rig2 and rig3 do") as raised:
        await ensure_user_network(SilentManager(tmp_path), build_cluster(), "gpuhub", "ada")
    assert not isinstance(raised.value, NodeUnreachable)


class LaggingManager(DockerClients):
    """A manager's daemon that shows a removed network for three more looks, as Docker 20.10 does with an overlay."""

    def __init__(self, folder: Path) -> None:
        super().__init__([], instance="gpuhub", run_dir=folder)
        self.looks_left = 3

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        network = {"Id": "n1", "Name": "gpuhub-user-ada", "Labels": {names.LABEL_OWNER: "ada"}}
        if method == "networks":
            return [network]
        if method == "inspect_network":
            self.looks_left -= 1
            if self.looks_left < 0:
                raise NotFound(f"node {node}: network {args[0]} not found")
        return network


async def test_removal_ends_when_no_start_can_find_the_network(tmp_path: Path) -> None:
    """A start that found it would connect its container to nothing."""
    daemons = LaggingManager(tmp_path)
    assert await remove_idle_user_networks(daemons, build_cluster(), "gpuhub", ()) == ["gpuhub-user-ada"]
    assert daemons.looks_left == -1


class JoiningDaemons(DockerClients):
    """Daemons whose answers to attempts to connect a container are given; None is a success."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)

    async def run(self, node: str, work: Any, *, kind: CallKind = CallKind.SHORT) -> Any:
        del work
        assert kind is CallKind.SWARM
        if (answer := self.answers.pop(0)) is not None:
            raise (NodeSilent if answer is SILENT else GpuhubError)(f"node {node}: {answer}")


#: As Docker 20.10.24 answered after 20 s, while its log had "error creating vxlan interface: file exists".
FAILED = (
    "attaching to network failed, make sure your network options are correct and check manager logs: context deadline "
    "exceeded"
)
#: As it answered on a node that had been out of reach for a minute, 2 s after it answered again.
NOT_BACK = "Could not attach to network wi326: context deadline exceeded"
NETWORK = UserNetwork(name="ghtest-net-ada", id="wi326", subnet="10.201.5.0/24")
SILENT = "its Docker daemon does not answer in time"
#: What it may answer to the attempt after one that failed.
UNKNOWN = "network wi326 not found"


@pytest.mark.parametrize(
    "answers",
    [
        (None,),
        (FAILED, None),
        (FAILED, UNKNOWN, UNKNOWN, FAILED, None),
        (NOT_BACK, SILENT, NOT_BACK, None),
        (SILENT, None),
        ("endpoint with name ghtest-nb-ada already exists in network",),
    ],
)
async def test_container_is_connected_after_failures_of_swarm(
    answers: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempt is made after one that succeeded."""
    monkeypatch.setattr(networks, "_JOIN_PAUSE_S", 0)
    daemons = JoiningDaemons(*answers, "one attempt too many")
    reports: list[str] = []
    await connect_container(daemons, "rig3", "c1", NETWORK, report_retry=lambda: reports.append("again"))
    assert daemons.answers == ["one attempt too many"]
    assert reports == ["again"] * (len(answers) > 1)


@pytest.mark.parametrize(
    "answers", [(FAILED, "permission denied"), (UNKNOWN,), (FAILED, "No such container: c1"), (FAILED, FAILED)]
)
async def test_network_that_cannot_be_joined_is_an_error(
    answers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the last answer: another one, or that of the first attempt after the deadline."""
    monkeypatch.setattr(networks, "_JOIN_PAUSE_S", 0.02)
    monkeypatch.setattr(networks, "_JOIN_DEADLINE_S", 0.01)
    daemons = JoiningDaemons(*answers)
    with pytest.raises(GpuhubError, match=answers[-1]):
        await connect_container(daemons, "rig3", "c1", NETWORK)
    assert daemons.answers == []
