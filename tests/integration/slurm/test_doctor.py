"""`check_site` and the doctor against a real Slurm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.doctor.findings import Finding, Severity
from gpuhub.ops.doctor.slurm.slurm_checks import check_slurm
from gpuhub.ops.doctor.slurm.slurm_queries import check_munge, read_slurm_facts
from gpuhub.slurm_client.factory import make_client
from gpuhub.slurm_client.site import check_site
from gpuhub_closet.slurm.slurm_config import SlurmPartitionConfig
from tests.support.clusters import build_cluster
from tests.support.slurm.site import SlurmSite, slurm_site

pytestmark = [pytest.mark.slurm, pytest.mark.root]

PORT = 28000
PROFILES = [{"name": "big", "title": "Big", "gpu_model": "RTX 5090", "memory": "4G"}]
NODES = {"rig1": "sx1", "rig2": "sx2", "rig3": "sx3"}


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    """Three nodes with a GPU each, two partitions, and accounts."""
    partitions = (
        SlurmPartitionConfig(name="all", default_minutes=60),
        SlurmPartitionConfig(name="short", nodes=("sx1",), is_default=False, max_minutes=30, max_nodes=1),
    )
    with slurm_site(port=PORT, has_accounts=True, partitions=partitions) as started:
        yield started


def cluster_of(site: SlurmSite, **changes: object) -> ClusterSettings:
    """Return settings with the nodes of this Slurm."""
    base = build_cluster(**{"engine": "slurm", "jobs": {"memory": "4G"}, "profiles": PROFILES, **changes})
    nodes = tuple(node.model_copy(update={"slurm": NODES[node.name]}) for node in base.nodes)
    return base.model_copy(update={"nodes": nodes, "slurm": site.table(**base.slurm.model_dump(exclude_unset=True))})


def collect_problems(findings: Iterable[Finding]) -> dict[str, Severity]:
    return {finding.check: finding.severity for finding in findings if finding.severity is not Severity.OK}


async def test_suitable_site_passes(site: SlurmSite) -> None:
    """The only warnings are about what these settings lack on purpose."""
    facts = await read_slurm_facts(cluster_of(site, slurm={"account": "lab", "partition": "all"}))
    assert facts.settings_errors == ()
    assert facts.ahead_s is not None
    assert abs(facts.ahead_s) <= facts.within_s
    assert sorted(facts.slurmds) == ["sx1", "sx2", "sx3"]
    assert facts.munge == ""
    assert collect_problems(check_slurm(facts, site.table())) == {
        "epilog": Severity.FAILED,
        "devices": Severity.WARNING,
        "limits": Severity.WARNING,
    }


async def test_unknown_names_are_listed_with_existing_ones(site: SlurmSite) -> None:
    """An unknown partition, account, QOS, reservation or GPU type is named with those that exist, and so is a limit
    that is
    too high.
    """
    profiles = [
        {"name": "long", "title": "L", "gpu_model": "RTX 5090", "partition": "short", "time_limit": "2h"},
        {"name": "none", "title": "N", "gpu_model": "RTX 5070", "partition": "short"},
        {"name": "qos", "title": "Q", "gpu_count": 0, "qos": "high", "reservation": "course", "account": "lib"},
        {"name": "gone", "title": "G", "gpu_count": 0, "partition": "gpus"},
    ]
    cluster = cluster_of(site, profiles=profiles)
    api = make_client(cluster.slurm)
    try:
        found = "\n".join(check_site(cluster, await api.read_site()))
    finally:
        await api.close()
    for text in (
        "profiles: 'long': time_limit of 2 h: partition \"short\" allows 30 min at most",
        'profiles: \'none\': RTX 5070 is GPU type "rtx5070" to Slurm, which says "Requested node configuration',
        'profiles: \'qos\': qos = "high": Slurm says "Invalid qos specification"; there are: normal',
        'profiles: \'qos\': reservation = "course": Slurm says "Requested reservation is invalid"; there are: none',
        "profiles: 'qos': account = \"lib\": Slurm says",
        'profiles: \'gone\': partition = "gpus": Slurm says "Invalid partition name specified"; there are: all, short',
    ):
        assert text in found


async def test_quoted_messages_are_slurms(site: SlurmSite) -> None:
    """The quoted messages are those of sbatch."""
    messages = {
        key: site.run("sbatch", "-o", "/dev/null", option, "--wrap", "true", user="ada").stderr
        for key, option in {
            "partition": "--partition=gpus",
            "account": "--account=lib",
            "qos": "--qos=high",
            "reservation": "--reservation=course",
            "type": "--gres=gpu:rtx4090:1",
            "shape": "--gres=gpu:rtx5090:2",
        }.items()
    }
    assert "invalid partition specified" in messages["partition"]
    assert "Invalid account or account/partition combination specified" in messages["account"]
    assert "Invalid qos specification" in messages["qos"]
    assert "Requested reservation is invalid" in messages["reservation"]
    assert "Requested node configuration is not available" in messages["type"]
    assert "Requested node configuration is not available" in messages["shape"]


async def test_silent_site_is_reported(site: SlurmSite) -> None:
    """The doctor reports a slurmctld or munged that does not answer."""
    site.daemons.kill("slurmctld")
    try:
        facts = await read_slurm_facts(cluster_of(site))
    finally:
        site.daemons.start("slurmctld")
        site.wait_for_nodes()
    findings = list(check_slurm(facts, site.table()))
    assert collect_problems(findings) == {"slurm": Severity.FAILED}
    assert "scontrol ping" in findings[-1].advice
    assert check_munge(str(site.folder / "nobody.socket"))
