"""Differences of versions between nodes, and the driver against the image's CUDA."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.ops.doctor.diagnosis import NodeDiagnosis, add_differences
from gpuhub.ops.doctor.findings import Severity, failed, ok
from gpuhub.ops.doctor.node_facts import GpuFacts, HostFacts, build_docker_facts
from gpuhub.ops.doctor.version_checks import (
    NodeVersions,
    check_cuda,
    check_suspension,
    collect_versions,
    compare_versions,
    is_patched_runc,
    parse_version,
)
from gpuhub.ops.images.wheels import find_torch_cuda

USUAL = NodeVersions(
    driver="570.195.03", system="Debian GNU/Linux 12 (bookworm)", docker="20.10.24+dfsg1", toolkit="1.18.0"
)
#: Recorded from Docker 20.10.24 on Debian 12; the system is another one.
DOCKER = replace(
    build_docker_facts(
        json.loads((Path(__file__).parent / "recorded/docker-20.10.24-info.json").read_text()),
        {},
        before=0.0,
        after=0.0,
    ),
    os="Ubuntu 24.04.3 LTS",
)


def test_same_versions_are_silent() -> None:
    assert compare_versions({"rig1": USUAL, "rig2": USUAL}) == {}
    assert compare_versions({}) == {}


@pytest.mark.parametrize(
    ("check", "value"),
    [
        ("driver", "535.261.03"),
        ("system", "Debian GNU/Linux 13 (trixie)"),
        ("docker", "29.4.0"),
        ("toolkit", "1.17.8"),
    ],
)
def test_odd_one_out_is_named(check: str, value: str) -> None:
    findings = compare_versions({"rig1": USUAL, "rig2": replace(USUAL, **{check: value}), "rig3": USUAL})
    assert list(findings) == ["rig2"]
    [finding] = findings["rig2"]
    assert (finding.check, finding.severity) == (check, Severity.WARNING)
    assert finding.value == f"{value}, while {getattr(USUAL, check)} is on rig1, rig3"
    assert finding.advice


def test_of_two_nodes_the_older_one_is_named() -> None:
    findings = compare_versions({"rig1": USUAL, "rig2": replace(USUAL, driver="580.95.05")})
    assert [finding.value for finding in findings["rig1"]] == ["570.195.03, while 580.95.05 is on rig2"]
    assert list(findings) == ["rig1"]


def test_unknown_versions_are_not_compared() -> None:
    assert compare_versions({"rig1": USUAL, "rig2": NodeVersions(), "rig3": replace(USUAL, toolkit="")}) == {}


def test_differences_follow_the_nodes_own_findings() -> None:
    old = NodeDiagnosis(findings=[ok("clock", "as the head node's")], versions=replace(USUAL, docker="20.10.5"))
    unreachable = NodeDiagnosis(findings=[failed("docker", "does not answer", "start it")])
    machines = add_differences({"rig1": NodeDiagnosis(findings=[], versions=USUAL), "rig2": old, "rig3": unreachable})
    assert [(name, [finding.check for finding in findings]) for name, findings in machines] == [
        ("rig1", []),
        ("rig2", ["clock", "docker"]),
        ("rig3", ["docker"]),
    ]


def test_versions_come_from_the_facts() -> None:
    gpu = GpuFacts(uuid="GPU-1", model="RTX 5090", memory_mib=32607, driver="580.95.05")
    assert collect_versions(DOCKER, HostFacts(gpus=(gpu,), toolkit=None)) == NodeVersions(
        driver="580.95.05", system="Ubuntu 24.04 LTS", docker="20.10.24+dfsg1", toolkit=""
    )
    other = replace(DOCKER, os="Ubuntu 24.04.1 LTS")
    assert collect_versions(other, HostFacts()).system == collect_versions(DOCKER, HostFacts()).system


@pytest.mark.parametrize(
    ("driver", "cuda", "is_old"),
    [
        ("535.261.03", "12.8", False),
        ("525.60.13", "12.8", False),
        ("520.61.05", "12.8", True),
        ("570.195.03", "13.0", True),
        ("580.65.06", "13.0", False),
        ("470.256.02", "11.8", False),
        ("470.256.02", None, False),
        ("", "12.8", False),
        ("570.195.03", "99.0", False),
    ],
)
def test_driver_against_the_images_cuda(driver: str, cuda: str | None, is_old: bool) -> None:
    findings = list(check_cuda(driver, cuda))
    assert bool(findings) == is_old
    for finding in findings:
        assert finding.severity is Severity.WARNING
        assert f"CUDA {cuda}, and driver {driver} is too old" in finding.value


def test_images_cuda_is_that_of_the_wheel(tmp_path: Path) -> None:
    """The lines of torch/version.py are those of torch 2.7's wheels."""

    def put(folder: str, cuda: str) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        with zipfile.ZipFile(tmp_path / folder / "torch-2.7.0-cp311-cp311-linux_x86_64.whl", "w") as wheel:
            wheel.writestr("torch/version.py", f"__version__ = '2.7.0'\ndebug = False\ncuda: Optional[str] = {cuda}\n")

    assert find_torch_cuda(tmp_path / "nothing") is None
    put("2a.partial", "'11.8'")
    assert find_torch_cuda(tmp_path) is None
    put("1b", "None")
    assert find_torch_cuda(tmp_path) is None
    put("1b", "'12.8'")
    assert find_torch_cuda(tmp_path) == "12.8"


@pytest.mark.parametrize(
    ("text", "version"),
    [("20.10.24+dfsg1", (20, 10, 24)), ("29.3.1-ce", (29, 3, 1)), ("v1.17.8", (1, 17, 8)), ("none", None)],
)
def test_distribution_version_strings_are_parsed(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("text", "safe"), [("1.2.8", True), ("1.2.7", False), ("1.3.3", True), ("1.4.0", True), ("x", False)]
)
def test_patched_versions_of_runc(text: str, safe: bool) -> None:
    assert is_patched_runc(text) is safe


@pytest.mark.parametrize(
    ("driver", "is_old"), [("550.163.01", True), ("570.86.15", False), ("580.159.04", False), ("", False)]
)
def test_driver_that_cannot_move_gpu_memory(driver: str, is_old: bool) -> None:
    """Named where notebooks are suspended; an unknown driver is not."""
    findings = list(check_suspension(driver))
    assert [finding.check for finding in findings] == ["suspension"] * is_old
    assert all("570" in finding.advice for finding in findings)
