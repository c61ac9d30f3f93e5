"""`check_site` and the doctor against a real Slurm: what is wrong is found, by Slurm's own answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from gpuhub.closet.slurm_files import SlurmPartition
from gpuhub.nodes.doctor.findings import Finding, Level
from gpuhub.nodes.doctor.slurm_checks import check_slurm
from gpuhub.nodes.doctor.slurm_looking import look_at_slurm, try_munge
from gpuhub.settings import Cluster
from gpuhub.slurm.make import make_api
from gpuhub.slurm.site import check_site
from tests.support.slurm_site import SlurmSite, slurm_site
from tests.unit.containers.conftest import build_cluster

PORT = 28000
PROFILES = [{"name": "big", "title": "Big", "gpu_model": "RTX 5090", "memory": "4G"}]
NODES = {"rig1": "sx1", "rig2": "sx2", "rig3": "sx3"}


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    """Three nodes with a card each, two partitions, accounts."""
    partitions = (
        SlurmPartition(name="all", usual_minutes=60),
        SlurmPartition(name="short", nodes=("sx1",), is_default=False, longest_minutes=30, most_nodes=1),
    )
    with slurm_site(port=PORT, has_accounts=True, partitions=partitions) as made:
        yield made


def cluster_of(site: SlurmSite, **changes: object) -> Cluster:
    """The small cluster as Slurm's nodes."""
    known = build_cluster(**{"engine": "slurm", "jobs": {"memory": "4G"}, "profiles": PROFILES, **changes})
    nodes = tuple(node.model_copy(update={"slurm": NODES[node.name]}) for node in known.nodes)
    return known.model_copy(update={"nodes": nodes, "slurm": site.table(**known.slurm.model_dump(exclude_unset=True))})


def troubles(findings: Iterable[Finding]) -> dict[str, Level]:
    return {one.check: one.level for one in findings if one.level is not Level.OK}


async def test_a_site_that_fits_is_told_so(site: SlurmSite) -> None:
    """All that is warned of is what these settings lack on purpose."""
    facts = await look_at_slurm(cluster_of(site, slurm={"account": "lab", "partition": "all"}))
    assert facts.mistakes == ()
    assert facts.ahead_s is not None
    assert abs(facts.ahead_s) <= facts.within_s
    assert sorted(facts.slurmds) == ["sx1", "sx2", "sx3"]
    assert facts.munge == ""
    assert troubles(check_slurm(facts, site.table())) == {
        "epilog": Level.FAILED,
        "devices": Level.WARNING,
        "limits": Level.WARNING,
    }


async def test_what_slurm_does_not_know_is_named_with_what_there_is(site: SlurmSite) -> None:
    """Partition, account, QOS, reservation, type of GPU, and a limit beyond the partition's."""
    profiles = [
        {"name": "long", "title": "L", "gpu_model": "RTX 5090", "partition": "short", "time_limit": "2h"},
        {"name": "none", "title": "N", "gpu_model": "RTX 5070", "partition": "short"},
        {"name": "qos", "title": "Q", "gpu_count": 0, "qos": "high", "reservation": "course", "account": "lib"},
        {"name": "gone", "title": "G", "gpu_count": 0, "partition": "gpus"},
    ]
    cluster = cluster_of(site, profiles=profiles)
    api = make_api(cluster.slurm)
    try:
        found = "\n".join(check_site(cluster, await api.site()))
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


async def test_slurms_words_are_slurms(site: SlurmSite) -> None:
    """What is quoted is what sbatch says."""
    said = {
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
    assert "invalid partition specified" in said["partition"]
    assert "Invalid account or account/partition combination specified" in said["account"]
    assert "Invalid qos specification" in said["qos"]
    assert "Requested reservation is invalid" in said["reservation"]
    assert "Requested node configuration is not available" in said["type"]
    assert "Requested node configuration is not available" in said["shape"]


async def test_a_site_that_is_silent_is_told(site: SlurmSite) -> None:
    """With slurmctld away, and where munged is not."""
    site.daemons.kill("slurmctld")
    try:
        facts = await look_at_slurm(cluster_of(site))
    finally:
        site.daemons.start("slurmctld")
        site.wait_for_nodes()
    found = list(check_slurm(facts, site.table()))
    assert troubles(found) == {"slurm": Level.FAILED}
    assert "scontrol ping" in found[-1].advice
    assert try_munge(str(site.folder / "nobody.socket"))
