"""The settings against what a Slurm site has: every mistake with its key, Slurm's word for it, and what there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuhub.config.settings import ClusterSettings, SlurmSettings
from gpuhub.slurm_client.models import SlurmNode, SlurmPartition, SlurmSite
from gpuhub.slurm_client.site import JobShape, SlurmTerms, check_job_shape, check_site, find_terms
from tests.support.clusters import build_cluster

HOUR = 3600
NODES = (
    SlurmNode(name="rig1", state="idle", takes_work=True, gpus={"rtx5090": 2}, cpus=16, memory_mib=64_000),
    SlurmNode(name="rig2", state="mixed", takes_work=True, gpus={"rtx5070": 1}, cpus=8, memory_mib=32_000),
    SlurmNode(name="rig3", state="idle", takes_work=True, gpus={"rtx5060": 1}, cpus=8, memory_mib=32_000),
    SlurmNode(name="far", state="idle", takes_work=True, gpus={"h200": 8}, cpus=64, memory_mib=512_000),
)
SITE = SlurmSite(
    version=(22, 5, 8),
    cluster="lab",
    partitions=(
        SlurmPartition(name="all", is_default=True, nodes=("rig1", "rig2", "rig3", "far")),
        SlurmPartition(name="short", max_time_s=4 * HOUR, max_nodes=1, nodes=("rig1", "rig2")),
        SlurmPartition(name="remote", nodes=("far",)),
    ),
    nodes=NODES,
    has_accounting=True,
    accounts=("physics", "root"),
    qos=("normal",),
    reservations=(),
)
PROFILE = {"name": "big", "title": "Big", "gpu_model": "RTX 5090"}


def site_cluster(slurm: dict[str, Any] | None = None, **profile: Any) -> ClusterSettings:
    """Three nodes in Slurm's care, and one profile."""
    return build_cluster(engine="slurm", slurm=slurm or {}, profiles=[{**PROFILE, **profile}])


def test_matching_site_has_no_mistakes() -> None:
    assert (
        check_site(site_cluster({"partition": "short", "account": "physics"}, time_limit="4h", qos="normal"), SITE)
        == []
    )


def test_unknown_default_partition_is_left_to_slurm() -> None:
    """slurmrestd of Slurm 23.02 and later does not report it."""
    partitions = tuple(replace(partition, is_default=None) for partition in SITE.partitions)
    assert check_site(site_cluster(), replace(SITE, partitions=partitions)) == []
    assert check_site(site_cluster({"partition": "gpus"}), replace(SITE, partitions=partitions)) != []


@pytest.mark.parametrize(
    ("slurm", "profile", "expected"),
    [
        (
            {"partition": "gpus"},
            {},
            'slurm.partition = "gpus": Slurm says "Invalid partition name specified"; there are: all, short, remote',
        ),
        (
            {"account": "chemistry"},
            {},
            'slurm.account = "chemistry": Slurm says "Invalid account or account/partition combination specified"; '
            "there are: physics, root",
        ),
        ({"qos": "high"}, {}, 'slurm.qos = "high": Slurm says "Invalid qos specification"; there are: normal'),
        (
            {},
            {"reservation": "course"},
            'profiles: \'big\': reservation = "course": Slurm says "Requested reservation is invalid"; there are: none',
        ),
        (
            {},
            {"partition": "gpus"},
            'profiles: \'big\': partition = "gpus": Slurm says "Invalid partition name specified"; '
            "there are: all, short, remote",
        ),
        (
            {},
            {"partition": "short", "time_limit": "5h"},
            "profiles: 'big': time_limit of 5 h: partition \"short\" allows 4 h at most (Slurm's PartitionTimeLimit)",
        ),
        (
            {"gpu_types": {"RTX 5090": "geforce"}},
            {},
            'profiles: \'big\': RTX 5090 is GPU type "geforce" to Slurm, which says "Requested node configuration is not '
            'available"; partition "all" has: rig1 with 2 × rtx5090, rig2 with 1 × rtx5070, rig3 with 1 × rtx5060; '
            "slurm.gpu_types gives a model another type",
        ),
        (
            {},
            {"cpus": 32},
            "profiles: 'big': 32 CPUs and 16 GiB of memory on a node (Requested node configuration is not available); "
            "there are: rig1 with 16 and 62.5 GiB",
        ),
        (
            {"partition": "remote"},
            {},
            "profiles: 'big': partition \"remote\" has none of the nodes here; its nodes are: far",
        ),
    ],
)
def test_each_site_mistake_is_reported(slurm: dict[str, Any], profile: dict[str, Any], expected: str) -> None:
    assert expected in check_site(site_cluster(slurm, **profile), SITE)


def test_more_gpus_than_a_node_has() -> None:
    """A GPU type that the settings allow is checked against gres.conf."""
    cluster = site_cluster()
    four = cluster.profiles[0].model_copy(update={"gpu_count": 4})
    found = check_site(cluster.model_copy(update={"profiles": (four,)}), SITE)
    assert found == [
        "profiles: 'big': 1 node with 4 × rtx5090: partition \"all\" has 0 such (Requested node configuration is not "
        "available): rig1 with 2 × rtx5090, rig2 with 1 × rtx5070, rig3 with 1 × rtx5060"
    ]


def test_nodes_unknown_to_slurm_are_reported() -> None:
    """Nodes are compared by Slurm's names; without one the text names the key to set."""
    cluster = site_cluster()
    nodes = (cluster.nodes[0].model_copy(update={"slurm": "sx9"}), *cluster.nodes[1:])
    fewer = replace(SITE, nodes=(NODES[0], *NODES[2:]))
    assert check_site(cluster.model_copy(update={"nodes": nodes}), fewer)[:2] == [
        'nodes: node = "sx9": Slurm says "Invalid node name specified"; there are: rig1, rig3, far',
        'nodes: node = "rig2": Slurm says "Invalid node name specified"; there are: rig1, rig3, far; '
        'set its name in Slurm with slurm = "…"',
    ]


def test_a_site_without_a_default_partition() -> None:
    """A mistake is reported once, however many profiles have it."""
    bare = replace(SITE, partitions=SITE.partitions[1:])
    cluster = build_cluster(engine="slurm")
    assert [line for line in check_site(cluster, bare) if "No partition" in line] == [
        'slurm.partition is not set: Slurm says "No partition specified or system default partition"; '
        "there are: short, remote"
    ]


def test_accounts_are_not_checked_without_accounting() -> None:
    """slurmdbd may be away for a while; what slurmctld remembers continues."""
    away = replace(SITE, has_accounting=False, accounts=(), qos=())
    assert check_site(site_cluster({"account": "chemistry", "qos": "high"}), away) == []


def test_long_lists_are_truncated() -> None:
    """A list of a thousand partitions is cut."""
    many = replace(SITE, partitions=tuple(SlurmPartition(name=f"p{i}", nodes=("rig1",)) for i in range(1000)))
    assert "p11 and 988 more" in check_site(site_cluster({"partition": "x"}), many)[0]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (JobShape(nodes=2, gpus_per_node=1, models=("RTX 5060", "RTX 5070")), ""),
        (JobShape(spread=4), ""),
        (JobShape(spread=3, models=("RTX 5090",)), '3 GPUs of rtx5090: partition "all" has 2 (Requested node config'),
        (JobShape(nodes=4, gpus_per_node=1), '4 nodes with 1 × any type: partition "all" has 3 such'),
        (
            JobShape(nodes=2, terms=SlurmTerms(partition="short")),
            '2 nodes: partition "short" allows 1 at most (Slurm\'s Part',
        ),
        (JobShape(gpus_per_node=1, models=("RTX 4090",)), 'RTX 4090 is GPU type "rtx4090" to Slurm, which says'),
        (JobShape(terms=SlurmTerms(qos="x")), 'qos = "x": Slurm says "Invalid qos specification"'),
        (JobShape(time_limit_s=5 * HOUR, terms=SlurmTerms(partition="short")), "time_limit of 5 h: partition"),
    ],
)
def test_job_shape_is_checked_against_the_site(wish: JobShape, expected: str) -> None:
    """The same checks apply to a request; nodes that are not gpuhub's do not count."""
    found = check_job_shape(site_cluster(), SITE, wish)
    assert [line.startswith(expected) for line in found] == ([True] if expected else [])


def test_terms_of_a_profile_override_the_site() -> None:
    table = SlurmSettings(partition="all", account="physics")
    profile = site_cluster(partition="short").profiles[0]
    assert find_terms(table, profile) == SlurmTerms(partition="short", account="physics")
    assert find_terms(table) == SlurmTerms(partition="all", account="physics")
