"""The text of a node's firewall rules."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common import names
from gpuhub.config.settings import ClusterSettings
from gpuhub.firewall.rules import FirewallPolicy, build_policy, describe_rules, format_removal, format_rules
from tests.support.clusters import build_cluster
from tests.support.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")


def make_policy(cluster: ClusterSettings, head: str = "192.168.1.20", *callers: str) -> FirewallPolicy:
    return build_policy(cluster, "gpuhub", head=head, callers=callers)


def build_single_machine(**network: Any) -> ClusterSettings:
    """Build the policy of a machine that is both head node and node."""
    hub = {"address": "192.168.1.21", "bind": "0.0.0.0", "https": "local"}
    cluster = build_cluster(network=network, hub=hub)
    return cluster.model_copy(update={"nodes": cluster.nodes[:1]})


CASES = {
    "three-nodes": lambda: make_policy(build_cluster()),
    "one-machine": lambda: make_policy(build_single_machine(), "192.168.1.21", "127.0.0.1"),
    "encrypted": lambda: make_policy(build_cluster(network={"encrypt": True})),
    "data-interface": lambda: build_policy(
        build_cluster(network={"overlay_pool": "10.201.0.0/22"}),
        "gpuhub",
        head="192.168.1.20",
        callers=(),
        data_interface="enp1s0f0",
    ),
    "open": lambda: make_policy(build_single_machine(egress="open"), "192.168.1.21"),
    "none-but-reached": lambda: make_policy(
        build_cluster(network={"egress": "none", "reach": ["192.168.1.50", "10.9.0.0/16", "10.9.1.0/24", "fd12::/48"]}),
        "192.168.1.20",
        "10.8.0.1",
    ),
    "ipv6": lambda: make_policy(
        build_cluster().model_copy(
            update={
                "nodes": tuple(
                    node.model_copy(update={"address": f"fd00:77::{number}"})
                    for number, node in enumerate(build_cluster().nodes, 1)
                )
            }
        ),
        "fd00:77::20",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_match_the_golden_file(case: str) -> None:
    """Every rule is written down; run with GPUHUB_UPDATE_GOLDEN=1 to accept a change."""
    check_golden(format_rules(CASES[case]()), GOLDEN / f"{case}.nft")


def test_only_the_own_table_is_replaced_atomically() -> None:
    """nft applies a file whole or not at all; the first line makes the second one work in any case."""
    first, second, third, *_ = format_rules(make_policy(build_cluster())).splitlines()
    assert (first, second) == ("table inet gpuhub_gpuhub", "delete table inet gpuhub_gpuhub")
    assert third == "table inet gpuhub_gpuhub {"
    assert format_removal("gpuhub") == f"{first}\n{second}\n"
    assert "flush ruleset" not in format_rules(make_policy(build_cluster()))


@pytest.mark.parametrize("bad", ["rig1", "10.0.0.1; drop", "10.0.0.1/33", "10.0.0.1 }", "", "10.0.0.0/8"])
def test_invalid_addresses_never_become_rules(bad: str) -> None:
    """Rules are text that root's nft reads."""
    with pytest.raises(ValueError, match="appear"):
        make_policy(build_cluster(), bad)
    if "/8" not in bad:
        with pytest.raises(ValueError, match="appear"):
            make_policy(build_cluster(), "10.0.0.1", bad)


def test_private_address_ranges_are_blocked() -> None:
    """Python's own list of what is not global, but for documentation's and benchmarks' special cases, is shut."""
    # The last rules follow from the egress policy, one for each IP version.
    listed = [
        ipaddress.ip_network(text)
        for line in format_rules(make_policy(build_cluster())).splitlines()
        if line.strip().startswith(("ip daddr {", "ip6 daddr {")) and "goto refused" in line
        for text in line.partition("{")[2].partition("}")[0].replace(" ", "").split(",")
    ]

    def is_shut(text: str) -> bool:
        address = ipaddress.ip_address(text)
        return any(address in network for network in listed if network.version == address.version)

    shut = [
        "10.0.0.1",
        "172.31.255.1",
        "192.168.0.1",
        "100.100.100.100",
        "169.254.169.254",
        "127.0.0.53",
        "224.0.0.251",
    ]
    shut += ["255.255.255.255", "0.0.0.0", "fd00:ec2::254", "fe80::1", "ff02::1", "::1", "::ffff:10.0.0.1"]
    assert [text for text in shut if not is_shut(text)] == []
    world = ["1.1.1.1", "151.101.0.223", "172.32.0.1", "100.128.0.1", "223.255.255.1", "2606:4700::1111"]
    assert [text for text in world if is_shut(text)] == []


def test_metadata_and_nodes_are_blocked_before_any_accept_rule() -> None:
    """This holds for any `reach` and `egress`."""
    cluster = build_cluster(network={"egress": "open", "reach": ["169.254.0.0/16", "192.168.1.0/24"]})
    lines = [line.strip() for line in format_rules(make_policy(cluster)).splitlines()]
    reached = lines.index("ip daddr { 169.254.0.0/16, 192.168.1.0/24 } accept")
    assert lines.index("ip daddr { 169.254.0.0/16 } goto refused") < reached
    assert lines.index("ip daddr { 192.168.1.20, 192.168.1.21, 192.168.1.22, 192.168.1.23 } goto refused") < reached


def test_interface_names_fit_the_kernel_limit() -> None:
    """At most 15 characters, and no instance's pattern fits another's."""
    assert len(names.access_network_name("a" * 8)) == len(names.user_bridge_name("a" * 8, "ada.of-somewhere")) == 15
    bridge = names.user_bridge_name("gpuhub", "ada")
    assert bridge.startswith(names.user_bridge_pattern("gpuhub").rstrip("*"))
    assert bridge != names.user_bridge_name("gpuhub", "ben")
    assert not names.access_network_name("gpuhub").startswith(names.user_bridge_pattern("gpuhub").rstrip("*"))


def test_rules_are_described_for_administrators() -> None:
    """A few lines in words, then the rules; and that they are off, where they are."""
    cluster = build_cluster(network={"reach": ["192.168.1.50"]})
    text = describe_rules(cluster, cluster.node("rig2"), make_policy(cluster))
    assert text.startswith("# Node rig2 (192.168.1.22), instance gpuhub.\n")
    assert "192.168.1.50; and all except private addresses." in text
    assert text.endswith(format_rules(make_policy(cluster)))
    off = cluster.model_copy(update={"network": cluster.network.model_copy(update={"guard": False})})
    assert "these rules are NOT on the node" in describe_rules(off, off.node("rig2"), make_policy(off))


def test_data_addresses_of_nodes_are_blocked_too() -> None:
    """A second network card is an address of a node like any other."""
    cluster = build_cluster()
    first = cluster.nodes[0].model_copy(update={"data_address": "10.10.0.21"})
    cluster = cluster.model_copy(update={"nodes": (first, *cluster.nodes[1:])})
    policy = build_policy(cluster, "gpuhub", head="192.168.1.20", callers=())
    assert {"10.10.0.21", "192.168.1.21", "192.168.1.22"} <= set(policy.nodes)
    assert "10.10.0.21" in format_rules(policy)
