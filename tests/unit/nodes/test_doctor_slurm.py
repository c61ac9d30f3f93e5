"""What the doctor makes of a Slurm site."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuhub.nodes.doctor import examining, slurm_looking
from gpuhub.nodes.doctor.facts import GpuFacts, HostFacts, build_probe_words, parse_probe, probe_script
from gpuhub.nodes.doctor.findings import Finding, Level
from gpuhub.nodes.doctor.head_checks import HeadFacts
from gpuhub.nodes.doctor.slurm_checks import check_slurm, check_slurm_node
from gpuhub.nodes.doctor.slurm_facts import SlurmFacts, parse_config, parse_moment, parse_slurmds
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Slurm
from gpuhub.slurm.values import Node, Partition, Site
from tests.unit.containers.conftest import build_cluster

CONFIG = """Configuration data as of 1795292400
AccountingStorageType   = accounting_storage/slurmdbd
EnforcePartLimits       = ALL
Epilog                  = /etc/slurm/gpuhub-epilog.sh
TaskPlugin              = task/cgroup,task/affinity

Cgroup Support Configuration:
TaskPlugin              = none
"""
RIG1 = Node(name="rig1", state="idle", takes_work=True, gpus={"rtx5090": 2, "rtx5060": 1})
SITE = Site(
    version=(22, 5, 8),
    cluster="lab",
    partitions=(Partition(name="gpu", is_default=True, nodes=("rig1",)),),
    nodes=(RIG1,),
    has_accounting=True,
    accounts=("physics",),
    qos=("normal",),
)
FACTS = SlurmFacts(
    site=SITE, munge="", config=parse_config(CONFIG), ahead_s=0.4, slurmds={"rig1": "22.05.8"}, mistakes=()
)
CARDS = tuple(
    GpuFacts(uuid=f"GPU-{at}", model=model, memory_mib=1, driver="580")
    for at, model in enumerate(("RTX 5090", "RTX 5090", "RTX 5060"))
)
HOST = HostFacts(gpus=CARDS, slurm_devices="yes", epilog="ok", accounts={"ada": 1001, "ben": 20000})
NUMBERS = {"ada": 1001, "ben": 20000}
NODE = build_cluster(engine="slurm").nodes[0]


def levels(findings: Iterable[Finding]) -> dict[str, Level]:
    found = list(findings)
    assert all(one.advice for one in found if one.level is not Level.OK)
    return {one.check: one.level for one in found if one.level is not Level.OK}


def at_node(facts: SlurmFacts = FACTS, host: HostFacts = HOST, table: Slurm | None = None) -> list[Finding]:
    return list(check_slurm_node(NODE, host, facts, table or Slurm(), NUMBERS))


def test_a_good_site_has_nothing_to_mend() -> None:
    found = [*check_slurm(FACTS, Slurm()), *at_node()]
    assert levels(found) == {}
    assert "22.05.8, cluster lab" in [one.value for one in found]
    assert {"slurm", "munge", "clock", "accounting", "epilog", "settings", "slurmd", "gres", "devices", "users"} == {
        one.check for one in found
    }


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({"missing": ("sbatch",)}, "slurm", Level.FAILED),
        ({"munge": "munge: Error: Failed to access /run/munge/munge.socket.2"}, "munge", Level.FAILED),
        ({"site": None, "trouble": "slurmctld does not answer"}, "slurm", Level.FAILED),
        ({"site": replace(SITE, version=(21, 8, 8))}, "slurm", Level.FAILED),
        ({"site": replace(SITE, has_accounting=False)}, "accounting", Level.WARNING),
        ({"ahead_s": 4.0}, "clock", Level.WARNING),
        ({"ahead_s": -40.0}, "clock", Level.FAILED),
        ({"ahead_s": -40.0, "within_s": 37.0}, "clock", Level.WARNING),
        ({"mistakes": ('slurm.partition = "x": …',)}, "settings", Level.FAILED),
        ({"config": {**FACTS.config, "epilog": "(null)"}}, "epilog", Level.FAILED),
        ({"config": {**FACTS.config, "taskplugin": "task/none"}}, "devices", Level.WARNING),
        ({"config": {**FACTS.config, "enforcepartlimits": "NO"}}, "limits", Level.WARNING),
    ],
)
def test_each_trouble_of_a_site(changes: dict[str, object], check: str, level: Level) -> None:
    assert levels(check_slurm(replace(FACTS, **changes), Slurm())) == {check: level}  # type: ignore[arg-type]


def test_without_containers_slurm_alone_keeps_jobs_apart() -> None:
    """What is a word of warning beside Docker is a failure without; an Epilog is not needed then."""
    plain = Slurm(runtime="plain", command=Path("/opt/lab"))
    config = {**FACTS.config, "taskplugin": "task/none", "epilog": "(null)"}
    assert levels(check_slurm(replace(FACTS, config=config), plain)) == {"devices": Level.FAILED}
    assert [one.check for one in at_node(table=plain)] == ["slurmd", "gres"]


async def test_nodes_without_docker_are_asked_of_slurm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon is called: there is none."""
    cluster = build_cluster(
        engine="slurm", slurm={"runtime": "plain", "command": "/opt/lab"}, storage={"home": "/home/{username}"}
    )
    bare = cluster.model_copy(update={"nodes": tuple(node.model_copy(update={"docker": ""}) for node in cluster.nodes)})

    async def look(_: Cluster) -> SlurmFacts:
        return FACTS

    monkeypatch.setattr(slurm_looking, "look_at_slurm", look)
    monkeypatch.setattr(examining, "look_at_head", lambda *_: HeadFacts(now=datetime.now(UTC), jupyterhub="6.1.1"))
    (rig1, found), (rig2, missing) = await examining.examine(bare, Paths("ghnone"), ["rig1", "rig2"])
    assert (rig1, rig2) == ("rig1", "rig2")
    assert [one.check for one in found] == ["slurmd", "gres"]
    assert levels(missing) == {"slurm": Level.FAILED}


def test_slurmrestd_is_judged_by_its_answers() -> None:
    """No command and no munge is needed on the head node then."""
    rest = Slurm(api="rest", rest_url="http://127.0.0.1:6820", rest_key=Path("/etc/slurm/jwt.key"))
    assert levels(check_slurm(SlurmFacts(site=SITE), rest)) == {}
    silent = list(check_slurm(SlurmFacts(trouble="slurmrestd does not answer"), rest))
    assert [(one.value, "http://127.0.0.1:6820" in one.advice) for one in silent] == [
        ("slurmrestd does not answer", True)
    ]


@pytest.mark.parametrize(
    ("host", "check", "level"),
    [
        ({"gpus": CARDS[:2]}, "gres", Level.FAILED),
        ({"gpus": CARDS[:1] * 3}, "gres", Level.FAILED),
        ({"gpus": ()}, "gres", Level.WARNING),
        ({"gpus": (CARDS[0], CARDS[2], CARDS[1])}, "gres", Level.WARNING),
        ({"slurm_devices": "no"}, "devices", Level.WARNING),
        ({"slurm_devices": "unknown"}, "devices", Level.WARNING),
        ({"epilog": "missing"}, "epilog", Level.FAILED),
        ({"epilog": "refused"}, "epilog", Level.FAILED),
        ({"epilog": "other"}, "epilog", Level.WARNING),
        ({"epilog": ""}, "epilog", Level.WARNING),
        ({"accounts": {"ada": 1002, "ben": 20000}}, "users", Level.FAILED),
        ({"accounts": {"ada": 1001}}, "users", Level.WARNING),
    ],
)
def test_each_trouble_of_a_node(host: dict[str, object], check: str, level: Level) -> None:
    assert levels(at_node(host=replace(HOST, **host))) == {check: level}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "check", "level"),
    [
        ({"name": "sx1"}, "slurm", Level.FAILED),
        ({"state": "drained", "takes_work": False, "reason": "fans"}, "slurmd", Level.WARNING),
        ({"gpus": {"": 3}}, "gres", Level.WARNING),
    ],
)
def test_each_trouble_that_slurm_tells_of_a_node(node: dict[str, object], check: str, level: Level) -> None:
    site = replace(SITE, nodes=(replace(RIG1, **node),))  # type: ignore[arg-type]
    assert levels(at_node(replace(FACTS, site=site))) == {check: level}


def test_what_is_there_and_what_slurm_says_stand_beside_each_other() -> None:
    fewer = next(one for one in at_node(host=replace(HOST, gpus=CARDS[1:])) if one.check == "gres")
    assert fewer.value == "Slurm has 1 × rtx5060, 2 × rtx5090, and the driver 1 × rtx5060, 1 × rtx5090"


def test_a_slurmd_of_another_release_is_told() -> None:
    assert levels(at_node(replace(FACTS, slurmds={"rig1": "21.08.8"}))) == {"slurmd": Level.WARNING}


def test_without_a_site_nothing_is_said_of_nodes() -> None:
    """The head node's findings say why."""
    assert at_node(SlurmFacts(trouble="silent")) == []


def test_slurms_answers_are_read() -> None:
    """Of a key that stands twice the first counts: later sections are of other files."""
    assert FACTS.epilog == "/etc/slurm/gpuhub-epilog.sh"
    assert parse_config(CONFIG)["taskplugin"] == "task/cgroup,task/affinity"
    assert parse_moment(CONFIG) == 1795292400.0
    assert parse_moment("Configuration data as of 2026-11-21T20:00:00") is None
    assert SlurmFacts(config={"authinfo": "ttl=60,socket=/run/m.socket"}).munge_socket == "/run/m.socket"
    assert FACTS.munge_socket == ""
    assert parse_slurmds("rig1 22.05.8\nrig2 N/A\n\nrig3 23.11.4 x\n") == {"rig1": "22.05.8"}


@pytest.mark.parametrize(
    ("epilog", "mode", "expected"),
    [
        ("docker rm --filter label=gpuhub.slurm-job", 0o755, "ok"),
        ("true", 0o755, "other"),
        ("gpuhub", 0o644, "refused"),
    ],
)
def test_the_probe_looks_at_slurms_files(tmp_path: Path, epilog: str, mode: int, expected: str) -> None:
    """The real script, on files as a node has them."""
    file = tmp_path / "epilog.sh"
    file.write_text(f"#!/bin/sh\n{epilog}\n")
    file.chmod(mode)
    (tmp_path / "cgroup.conf").write_text("# ConstrainDevices=yes\n  constraindevices = YES\n")
    assert probe(tmp_path, file) == ("yes", expected)
    (tmp_path / "cgroup.conf").write_text("#ConstrainDevices=yes\nConstrainDevices=no\n")
    assert probe(tmp_path, tmp_path / "gone") == ("no", "missing")
    (tmp_path / "cgroup.conf").unlink()
    assert probe(tmp_path, file) == ("unknown", expected)


def probe(folder: Path, epilog: Path) -> tuple[str, str]:
    paths = {"slurm": str(folder), "epilog": str(epilog)}
    words = build_probe_words(docker_root="/var/lib/docker", head="127.0.0.1", places=(), accounts=(), slurm=paths)
    done = subprocess.run(["sh", "-c", probe_script(), "probe", *words], check=True, capture_output=True, text=True)
    found = parse_probe(done.stdout)
    return found.slurm_devices, found.epilog


def test_a_path_that_is_none_is_not_asked_for() -> None:
    """slurm.conf may have a pattern there, or anything."""
    paths = {"slurm": "/etc/slurm", "epilog": "/etc/epilog.d/*; id"}
    words = build_probe_words(docker_root="/d", head="127.0.0.1", places=(), accounts=(), slurm=paths)
    assert words == ["/d", "127.0.0.1", "slurm:/etc/slurm"]
