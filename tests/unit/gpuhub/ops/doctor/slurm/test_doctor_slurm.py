"""The doctor's findings for a Slurm site."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, SlurmSettings
from gpuhub.ops.doctor import diagnosis
from gpuhub.ops.doctor.findings import Finding, Severity
from gpuhub.ops.doctor.head_node import HeadFacts
from gpuhub.ops.doctor.node_facts import GpuFacts, HostFacts, build_script_arguments, parse_probe, read_probe_script
from gpuhub.ops.doctor.slurm import slurm_queries
from gpuhub.ops.doctor.slurm.slurm_checks import (
    SlurmFacts,
    check_slurm,
    check_slurm_node,
    parse_clock,
    parse_config,
    parse_slurmds,
)
from gpuhub.slurm_client.models import SlurmNode, SlurmPartition, SlurmSite
from tests.support.clusters import build_cluster

CONFIG = """Configuration data as of 1795292400
AccountingStorageType   = accounting_storage/slurmdbd
EnforcePartLimits       = ALL
Epilog                  = /etc/slurm/gpuhub-epilog.sh
HealthCheckProgram      = /etc/slurm/gpuhub-health.sh
TaskPlugin              = task/cgroup,task/affinity

Cgroup Support Configuration:
ConstrainDevices        = yes
TaskPlugin              = none
"""
RIG1 = SlurmNode(name="rig1", state="idle", takes_work=True, gpus={"rtx5090": 2, "rtx5060": 1})
SITE = SlurmSite(
    version=(22, 5, 8),
    cluster="lab",
    partitions=(SlurmPartition(name="gpu", is_default=True, nodes=("rig1",)),),
    nodes=(RIG1,),
    has_accounting=True,
    accounts=("physics",),
    qos=("normal",),
)
FACTS = SlurmFacts(
    site=SITE, munge="", config=parse_config(CONFIG), ahead_s=0.4, slurmds={"rig1": "22.05.8"}, settings_errors=()
)
CARDS = tuple(
    GpuFacts(uuid=f"GPU-{index}", model=model, memory_mib=1, driver="580")
    for index, model in enumerate(("RTX 5090", "RTX 5090", "RTX 5060"))
)
HOST = HostFacts(gpus=CARDS, slurm_devices="yes", epilog="ok", accounts={"ada": 1001, "ben": 20000})
NUMBERS = {"ada": 1001, "ben": 20000}
NODE = build_cluster(engine="slurm").nodes[0]


def levels(findings: Iterable[Finding]) -> dict[str, Severity]:
    findings = list(findings)
    assert all(finding.advice for finding in findings if finding.severity is not Severity.OK)
    return {finding.check: finding.severity for finding in findings if finding.severity is not Severity.OK}


def find_node_problems(
    facts: SlurmFacts = FACTS, host: HostFacts = HOST, table: SlurmSettings | None = None
) -> list[Finding]:
    return list(check_slurm_node(NODE, host, facts, table or SlurmSettings(), NUMBERS))


def test_a_good_site_has_no_problems() -> None:
    findings = [*check_slurm(FACTS, SlurmSettings()), *find_node_problems()]
    assert levels(findings) == {}
    assert "22.05.8, cluster lab" in [finding.value for finding in findings]
    assert {"slurm", "munge", "clock", "accounting", "epilog", "settings", "slurmd", "gres", "devices", "users"} == {
        finding.check for finding in findings
    }


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({"missing": ("sbatch",)}, "slurm", Severity.FAILED),
        ({"munge": "munge: Error: Failed to access /run/munge/munge.socket.2"}, "munge", Severity.FAILED),
        ({"site": None, "problem": "slurmctld does not answer"}, "slurm", Severity.FAILED),
        ({"site": replace(SITE, version=(21, 8, 8))}, "slurm", Severity.FAILED),
        ({"site": replace(SITE, has_accounting=False)}, "accounting", Severity.WARNING),
        ({"ahead_s": 4.0}, "clock", Severity.WARNING),
        ({"ahead_s": -40.0}, "clock", Severity.FAILED),
        ({"ahead_s": -40.0, "within_s": 37.0}, "clock", Severity.WARNING),
        ({"settings_errors": ('slurm.partition = "x": …',)}, "settings", Severity.FAILED),
        ({"config": {**FACTS.config, "epilog": "(null)"}}, "epilog", Severity.FAILED),
        ({"config": {**FACTS.config, "taskplugin": "task/none"}}, "devices", Severity.WARNING),
        ({"config": {**FACTS.config, "enforcepartlimits": "NO"}}, "limits", Severity.WARNING),
    ],
)
def test_each_problem_of_a_site(changes: dict[str, object], check: str, level: Severity) -> None:
    assert levels(check_slurm(replace(FACTS, **changes), SlurmSettings())) == {check: level}  # type: ignore[arg-type]


def test_epilogs_of_later_versions_are_numbered() -> None:
    """One is gpuhub's; slurmctld's own program is none of them."""
    text = """\
EpilogSlurmctld[0]      = /etc/slurm/gpuhub-other.sh
Epilog[0]               = /etc/slurm/scratch.sh
Epilog[1]               = /etc/slurm/gpuhub-epilog.sh
"""
    others = {key: value for key, value in FACTS.config.items() if key != "epilog"}
    assert replace(FACTS, config={**others, **parse_config(text)}).epilog == "/etc/slurm/gpuhub-epilog.sh"
    single = replace(FACTS, config={**others, "epilog[0]": "/etc/slurm/scratch.sh"})
    assert single.epilog == "/etc/slurm/scratch.sh"
    assert levels(check_slurm(single, SlurmSettings())) == {}


def test_without_containers_only_slurm_isolates_jobs() -> None:
    """A warning for a site with Docker is a failure without it; an Epilog is not needed then, and a health check is."""
    plain = SlurmSettings(runtime="plain", command=Path("/opt/lab"))
    config = {**FACTS.config, "taskplugin": "task/none", "epilog": "(null)", "healthcheckprogram": "(null)"}
    assert levels(check_slurm(replace(FACTS, config=config), plain)) == {
        "devices": Severity.FAILED,
        "health check": Severity.WARNING,
    }
    assert [finding.check for finding in find_node_problems(table=plain)] == ["slurmd", "gres"]


def test_what_laptops_lack_on_the_head_node_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The homes, what jobs run in, and srun; with containers nothing is needed."""
    (tmp_path / "home").mkdir()
    (tmp_path / "srun").touch(mode=0o755)
    image = tmp_path / "lab.sif"
    monkeypatch.setenv("PATH", str(tmp_path))
    table = SlurmSettings(runtime="apptainer", image=image, commands=tmp_path / "none")
    cluster = build_cluster(engine="slurm", storage={"home": f"{tmp_path}/none/{{username}}"})
    cluster = cluster.model_copy(update={"slurm": table})
    lacking = tuple(slurm_queries.find_lacking_for_laptops(cluster))
    assert lacking == (f"the homes in {tmp_path}/none", str(image), "apptainer", "srun")
    [finding] = [one for one in check_slurm(replace(FACTS, lacks_for_laptops=lacking), table) if one.check == "laptops"]
    assert finding.severity is Severity.WARNING
    assert f"this machine lacks the homes in {tmp_path}/none, {image}, apptainer, srun: " in finding.value
    image.touch()
    (tmp_path / "apptainer").touch(mode=0o755)
    storage = cluster.storage.model_copy(update={"home": f"{tmp_path}/home/{{username}}"})
    complete = cluster.model_copy(update={"slurm": table.model_copy(update={"commands": None}), "storage": storage})
    assert list(slurm_queries.find_lacking_for_laptops(complete)) == []
    assert levels(check_slurm(replace(FACTS, lacks_for_laptops=()), SlurmSettings())) == {}


@pytest.mark.parametrize(
    ("tracking", "expected"), [("proctrack/cgroup", {}), ("proctrack/linuxproc", {"processes": Severity.WARNING})]
)
def test_signals_to_all_processes_would_end_apptainers_image(tracking: str, expected: dict[str, Severity]) -> None:
    table = SlurmSettings(runtime="apptainer", image=Path("/srv/lab.sif"))
    findings = list(check_slurm(replace(FACTS, config={**FACTS.config, "proctracktype": tracking}), table))
    assert levels(findings) == expected
    assert [finding.value for finding in findings if finding.check == "image"] == [
        "/srv/lab.sif was not checked: `gpuhub image list` tries it on every node"
    ]


async def test_nodes_without_docker_are_checked_through_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon is called, because there are none."""
    cluster = build_cluster(
        engine="slurm", slurm={"runtime": "plain", "command": "/opt/lab"}, storage={"home": "/home/{username}"}
    )
    bare = cluster.model_copy(update={"nodes": tuple(node.model_copy(update={"docker": ""}) for node in cluster.nodes)})

    async def read_facts(_: ClusterSettings) -> SlurmFacts:
        return FACTS

    monkeypatch.setattr(slurm_queries, "read_slurm_facts", read_facts)
    monkeypatch.setattr(diagnosis, "read_head_facts", lambda *_: HeadFacts(now=datetime.now(UTC), jupyterhub="6.1.1"))
    (rig1, findings), (rig2, missing) = await diagnosis.diagnose(bare, Paths("ghnone"), ["rig1", "rig2"])
    assert (rig1, rig2) == ("rig1", "rig2")
    assert [finding.check for finding in findings] == ["slurmd", "gres"]
    assert levels(missing) == {"slurm": Severity.FAILED}


def test_slurmrestd_is_checked_by_its_answers() -> None:
    """The head node needs neither commands nor munge then."""
    rest = SlurmSettings(api="rest", rest_url="http://127.0.0.1:6820", rest_key=Path("/etc/slurm/jwt.key"))
    assert levels(check_slurm(SlurmFacts(site=SITE), rest)) == {}
    silent = list(check_slurm(SlurmFacts(problem="slurmrestd does not answer"), rest))
    assert [(finding.value, "http://127.0.0.1:6820" in finding.advice) for finding in silent] == [
        ("slurmrestd does not answer", True)
    ]


@pytest.mark.parametrize(
    ("host", "check", "level"),
    [
        ({"gpus": CARDS[:2]}, "gres", Severity.FAILED),
        ({"gpus": CARDS[:1] * 3}, "gres", Severity.FAILED),
        ({"gpus": ()}, "gres", Severity.WARNING),
        ({"gpus": (CARDS[0], CARDS[2], CARDS[1])}, "gres", Severity.WARNING),
        ({"slurm_devices": "no"}, "devices", Severity.WARNING),
        ({"slurm_devices": "unknown"}, "devices", Severity.WARNING),
        ({"epilog": "missing"}, "epilog", Severity.FAILED),
        ({"epilog": "refused"}, "epilog", Severity.FAILED),
        ({"epilog": "other"}, "epilog", Severity.WARNING),
        ({"epilog": ""}, "epilog", Severity.WARNING),
        ({"accounts": {"ada": 1002, "ben": 20000}}, "users", Severity.FAILED),
        ({"accounts": {"ada": 1001}}, "users", Severity.WARNING),
    ],
)
def test_each_problem_of_a_node(host: dict[str, object], check: str, level: Severity) -> None:
    assert levels(find_node_problems(host=replace(HOST, **host))) == {check: level}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "check", "level"),
    [
        ({"name": "sx1"}, "slurm", Severity.FAILED),
        ({"state": "drained", "takes_work": False, "reason": "fans"}, "slurmd", Severity.WARNING),
        ({"gpus": {"": 3}}, "gres", Severity.WARNING),
    ],
)
def test_each_problem_that_slurm_reports_of_a_node(node: dict[str, object], check: str, level: Severity) -> None:
    site = replace(SITE, nodes=(replace(RIG1, **node),))  # type: ignore[arg-type]
    assert levels(find_node_problems(replace(FACTS, site=site))) == {check: level}


def test_gpus_of_slurm_and_of_the_driver_are_compared() -> None:
    fewer = next(
        finding for finding in find_node_problems(host=replace(HOST, gpus=CARDS[1:])) if finding.check == "gres"
    )
    assert fewer.value == "Slurm has 1 × rtx5060, 2 × rtx5090, and the driver 1 × rtx5060, 1 × rtx5090"


def test_a_slurmd_of_another_release_is_reported() -> None:
    assert levels(find_node_problems(replace(FACTS, slurmds={"rig1": "21.08.8"}))) == {"slurmd": Severity.WARNING}


def test_nodes_are_not_checked_without_site_information() -> None:
    """The head node's findings have the reason."""
    assert find_node_problems(SlurmFacts(problem="silent")) == []


def test_slurm_responses_are_parsed() -> None:
    """The first of two equal keys counts, because later sections are of other files."""
    assert FACTS.epilog == "/etc/slurm/gpuhub-epilog.sh"
    assert parse_config(CONFIG)["taskplugin"] == "task/cgroup,task/affinity"
    assert parse_clock(CONFIG) == 1795292400.0
    assert parse_clock("Configuration data as of 2026-11-21T20:00:00") is None
    assert SlurmFacts(config={"authinfo": "ttl=60,socket=/run/m.socket"}).munge_socket == "/run/m.socket"
    assert FACTS.munge_socket == ""
    assert parse_slurmds("rig1 22.05.8\nrig2 N/A\n\nrig3 23.11.4 x\n") == {"rig1": "22.05.8"}


@pytest.mark.parametrize(
    ("setting", "level"),
    [({"constraindevices": "yes"}, Severity.OK), ({"constraindevices": "no"}, Severity.FAILED), ({}, Severity.WARNING)],
)
def test_device_limits_matter_most_without_containers(setting: dict[str, str], level: Severity) -> None:
    """They are read from slurmctld, and a site that does not report them gets a warning, also behind slurmrestd."""
    config = {key: value for key, value in FACTS.config.items() if key != "constraindevices"} | setting
    plain = SlurmSettings(runtime="plain", command=Path("/opt/lab"))
    expected = {} if level is Severity.OK else {"devices": level}
    assert levels(check_slurm(replace(FACTS, config=config), plain)) == expected
    rest = SlurmSettings(
        api="rest",
        rest_url="http://127.0.0.1:6820",
        rest_key=Path("/etc/slurm/jwt.key"),
        runtime="plain",
        command=Path("/opt/lab"),
    )
    assert levels(check_slurm(SlurmFacts(site=SITE), rest)) == {"devices": Severity.WARNING}


@pytest.mark.process
@pytest.mark.parametrize(
    ("epilog", "mode", "expected"),
    [
        ("docker rm --filter label=gpuhub.slurm-job", 0o755, "ok"),
        ("true", 0o755, "other"),
        ("gpuhub", 0o644, "refused"),
    ],
)
def test_the_probe_checks_slurms_files(tmp_path: Path, epilog: str, mode: int, expected: str) -> None:
    """The script itself, on files as a node has them."""
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
    words = build_script_arguments(
        docker_root="/var/lib/docker", head="127.0.0.1", addresses=(), accounts=(), slurm=paths
    )
    done = subprocess.run(
        ["sh", "-c", read_probe_script(), "probe", *words], check=True, capture_output=True, text=True
    )
    facts = parse_probe(done.stdout)
    return facts.slurm_devices, facts.epilog


def test_paths_with_special_characters_are_skipped() -> None:
    """slurm.conf may have a pattern or any other text there."""
    paths = {"slurm": "/etc/slurm", "epilog": "/etc/epilog.d/*; id"}
    words = build_script_arguments(docker_root="/d", head="127.0.0.1", addresses=(), accounts=(), slurm=paths)
    assert words == ["/d", "127.0.0.1", "slurm:/etc/slurm"]
