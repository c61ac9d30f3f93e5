"""The practice closet's plan, its commands and its cluster.toml."""

from __future__ import annotations

import ipaddress
import itertools
import re

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub_closet import docker_daemons, network
from gpuhub_closet import paths as places
from gpuhub_closet.cluster_file import format_cluster
from gpuhub_closet.layouts import build_plan
from gpuhub_closet.topology import (
    ClosetPlan,
    NodeLink,
    SimulatedGpu,
    SimulatedMigDevice,
    build_nodes,
    build_subnet,
    gpu_uuid,
)


def make_plan(**changes) -> ClosetPlan:
    plan = build_plan("ghtest")
    values = {"instance": plan.instance, "subnet": plan.subnet, "nodes": plan.nodes, "link": plan.link}
    return ClosetPlan(**(values | changes))


def test_plan_of_the_practice_closet():
    """The plan has the three GPUs, and fixed addresses for the two usual instances."""
    plan = build_plan("gpuhub")
    cards = [(node.name, str(node.address), card.name, card.memory_mib) for node in plan.nodes for card in node.gpus]
    assert cards == [
        ("rig1", "10.77.0.11", "NVIDIA GeForce RTX 5090", 32607),
        ("rig2", "10.77.0.12", "NVIDIA GeForce RTX 5070", 12227),
        ("rig3", "10.77.0.13", "NVIDIA GeForce RTX 5060", 8151),
    ]
    assert str(plan.head) == "10.77.0.1"
    assert str(build_plan("ghtest").subnet) == "10.87.0.0/24"


def test_other_instances_get_private_subnets():
    """Any instance has a fixed /24 within 10.64.0.0–10.255.255.255 that is not one of the two usual ones."""
    subnets = {build_subnet(f"i{number}") for number in range(200)}
    assert build_subnet("i7") == build_subnet("i7")
    assert all(ipaddress.ip_address("10.64.0.0") <= net.network_address and net.is_private for net in subnets)
    assert not subnets & {build_subnet("gpuhub"), build_subnet("ghtest")}
    assert len(subnets) > 190


def test_gpu_uuids_are_stable_distinct_and_in_nvidias_form():
    """Each GPU of each node of each instance has its own UUID."""
    uuids = {gpu_uuid(instance, node, index) for instance in "ab" for node in "xy" for index in range(8)}
    assert len(uuids) == 32
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid) for uuid in uuids)
    assert gpu_uuid("gpuhub", "rig1", 0) == gpu_uuid("gpuhub", "rig1", 0)


@pytest.mark.parametrize("name", ["", "Rig1", "rig 1", "rig-1", "rigrig1", "../x", "ríg", "1"])
def test_invalid_node_names_are_refused(name):
    """A node's name must fit into interface, path and host names."""
    card = (SimulatedGpu(model="RTX 5060", memory_mib=8151),)
    with pytest.raises(SettingsError, match="closet node"):
        make_plan(nodes=build_nodes(build_subnet("ghtest"), {name: card}))


def test_too_many_nodes_are_refused():
    """There are addresses for ten nodes."""
    with pytest.raises(SettingsError, match="1 to 10 nodes, not 11"):
        make_plan(nodes=build_nodes(build_subnet("ghtest"), {f"n{i}": () for i in range(11)}))


def test_unknown_node_is_named():
    """The error lists the existing nodes."""
    with pytest.raises(SettingsError, match="'rig9' does not exist; there are: rig1, rig2, rig3"):
        build_plan("ghtest").node("rig9")


def test_interface_names_fit_the_kernel():
    """The longest instance and node names still make interface names of at most 15 characters."""
    plan = make_plan(instance="abcdefgh", nodes=build_nodes(build_subnet("abcdefgh"), {"abcdef": ()}))
    assert len(plan.netns_name(plan.nodes[0])) <= 15
    assert len(plan.bridge) <= 15


def test_address_pools_of_nodes_are_disjoint():
    """No two nodes' local bridges, nor the closet's subnet, share an address."""
    plan = build_plan("gpuhub")
    pools = [*(plan.bridge_pool(node) for node in plan.nodes), plan.subnet]
    assert not any(pool.overlaps(other) for pool in pools for other in pools if pool is not other)


def test_network_commands():
    """A node is a namespace with one address and no default route."""
    plan = build_plan("ghtest")
    lines = [" ".join(command) for command in network.build_node_network(plan, plan.nodes[0])]
    assert "ip -netns ghtest-rig1 address replace 10.87.0.11/24 dev eth0" in lines
    assert not any("default" in line for line in lines)


def test_shaping_commands():
    """Both ends of a link are shaped, or neither if the plan has no speed."""
    plan = make_plan(link=NodeLink(rate_mbit=1000))
    assert [command[-5] for command in network.build_shaping(plan, plan.nodes[0])] == ["1000mbit", "1000mbit"]
    assert network.build_shaping(make_plan(link=None), plan.nodes[0]) == ()


def test_daemons_listen_on_unix_sockets_only():
    """A daemon has its own folders and socket, and reads no configuration of this machine."""
    plan, paths = build_plan("ghtest"), Paths("ghtest")
    node = plan.node("rig2")
    command = docker_daemons.build_node_command(plan, node, places.node_paths(paths, node))
    options = dict(itertools.pairwise(command))
    assert options["--host"] == "unix:///run/ghtest/closet/rig2/docker.sock"
    assert options["--data-root"] == "/var/lib/ghtest/closet/rig2/docker"
    assert options["--config-file"] == "/var/lib/ghtest/closet/rig2/daemon.json"
    assert options["--bip"] == "172.22.255.1/24"
    assert command.count("--host") == 1


@pytest.mark.parametrize(("instance", "port"), [("gpuhub", 8000), ("ghtest", 18000)])
def test_cluster_file_is_valid(instance, port, tmp_path):
    """gpuhub's own parser accepts the file, and every GPU has a profile."""
    plan, file = build_plan(instance), tmp_path / "cluster.toml"
    file.write_text(format_cluster(plan, Paths(instance), cpus=2))
    cluster = settings.load(file)
    assert [node.address for node in cluster.nodes] == [str(node.address) for node in plan.nodes]
    assert [profile.gpu_model for profile in cluster.profiles] == ["RTX 5090", "RTX 5070", "RTX 5060", "RTX 5090", None]
    assert [profile.gpu_share for profile in cluster.profiles] == [1, 1, 1, 4, 1]
    assert cluster.scheduling.preemption
    assert cluster.storage.home == f"/var/lib/{instance}/homes/{{username}}"
    assert (cluster.hub.port, cluster.hub.address) == (port, str(plan.head))
    assert cluster.users.allowed == ("ada", "ben")


def test_cluster_file_requests_at_most_the_existing_cpus(tmp_path):
    """On a machine with one CPU no profile and no job wants two, which Docker would refuse."""
    file = tmp_path / "cluster.toml"
    file.write_text(format_cluster(build_plan("ghtest"), Paths("ghtest"), cpus=1))
    cluster = settings.load(file)
    assert {profile.cpus for profile in cluster.profiles} | {cluster.jobs.cpus} == {1.0}


def test_mig_devices_are_gpus_of_the_cluster_file(tmp_path):
    """A GPU in MIG mode can only be granted by its devices: each type has a profile, the GPU has none."""
    parts = (SimulatedMigDevice(profile="1g.18gb", memory_mib=16384),) * 2
    split = SimulatedGpu(
        model="H200",
        memory_mib=143771,
        capability=(9, 0),
        mig_devices=(*parts, SimulatedMigDevice(profile="3g.71gb", memory_mib=71424)),
    )
    subnet = build_subnet("ghtest")
    plan = ClosetPlan(instance="ghtest", subnet=subnet, nodes=build_nodes(subnet, {"rig1": (split,)}))
    file = tmp_path / "cluster.toml"
    file.write_text(format_cluster(plan, Paths("ghtest"), cpus=2))
    cluster = settings.load(file)
    assert [(card.model, card.count) for card in cluster.nodes[0].gpus] == [
        ("H200 MIG 1g.18gb", 2),
        ("H200 MIG 3g.71gb", 1),
    ]
    assert [(profile.name, profile.gpu_model) for profile in cluster.profiles] == [
        ("h200mig1g18gb", "H200 MIG 1g.18gb"),
        ("h200mig3g71gb", "H200 MIG 3g.71gb"),
        ("cpu", None),
    ]
    assert split.name == "NVIDIA H200"
