"""Versions: those without known vulnerabilities, checks between nodes, and of the driver against the image's CUDA."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuhub.ops.doctor.findings import Finding, warning
from gpuhub.ops.doctor.node_facts import DockerFacts, HostFacts

#: A version's numbers.
Version = tuple[int, ...]
#: The oldest Docker Engine that gpuhub supports, and the only one that its tests ran with.
MIN_DOCKER: Version = (20, 10)
TESTED_DOCKER = "20.10.24"
#: Docker Engine: the first version without each vulnerability.
DOCKER_FLOORS: tuple[tuple[Version, str], ...] = (
    ((28, 3, 3), "a reload of firewalld opens containers' ports (CVE-2025-54388, CVE-2025-54410)"),
    ((29, 3, 1), "authorisation plugins can be bypassed (CVE-2026-34040)"),
)
TOOLKIT_FLOOR: Version = (1, 17, 8)
#: runc: the first patch of each series without CVE-2025-31133, -52565 and -52881, which allow escapes from containers.
_RUNC_PATCHES: dict[Version, int] = {(1, 2): 8, (1, 3): 3}
#: CUDA's major version → the first driver that runs all its minor versions: table "CUDA Toolkit and Minimum Required
#: Driver Version for CUDA Minor Version Compatibility" of the CUDA Toolkit's release notes.
CUDA_DRIVERS: Mapping[int, Version] = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
#: The first driver with CUDA's calls that move a process's GPU memory (CUDA 12.8).
SUSPENSION_DRIVER: Version = (570,)
_ADVICE = {
    "driver": "install the same branch of NVIDIA's driver on all nodes: launches over several nodes mix them",
    "system": "install the same release on all nodes, or expect that updates differ",
    "docker": "update Docker there, or on the other nodes",
    "toolkit": "update nvidia-container-toolkit there, or on the other nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVersions:
    """Versions that should be the same on all nodes; empty where unknown."""

    driver: str = ""
    #: The distribution and its release, such as `Debian GNU/Linux 12 (bookworm)`.
    system: str = ""
    docker: str = ""
    toolkit: str = ""


def collect_versions(docker: DockerFacts, host: HostFacts) -> NodeVersions:
    """Return the node's versions."""
    # Ubuntu's point releases are updates of the same packages.
    system = re.sub(r"(\d+\.\d+)\.\d+", r"\1", host.os or docker.os)
    driver = host.gpus[0].driver if host.gpus else ""
    return NodeVersions(driver=driver, system=system, docker=docker.version, toolkit=host.toolkit or "")


def compare_versions(nodes: Mapping[str, NodeVersions]) -> dict[str, list[Finding]]:
    """Return warnings for the nodes that differ from most others: node → findings.

    Where no version is the most frequent one, the newest of them is expected.
    """
    findings: dict[str, list[Finding]] = {}
    for check, advice in _ADVICE.items():
        values = {node: str(value) for node, versions in nodes.items() if (value := getattr(versions, check))}
        counts = Counter(values.values())
        expected = max(counts, key=lambda value: (counts[value], parse_version(value) or ()), default="")
        same = ", ".join(node for node, value in values.items() if value == expected)
        for node, value in values.items():
            if value != expected:
                text = f"{value}, while {expected} is on {same}"
                findings.setdefault(node, []).append(warning(check, text, advice))
    return findings


def check_cuda(driver: str, cuda: str | None) -> Iterator[Finding]:
    """Check that the driver runs the CUDA version of the image's torch; None for a build without CUDA."""
    wanted, version = parse_version(cuda or ""), parse_version(driver)
    least = None if wanted is None else CUDA_DRIVERS.get(wanted[0])
    if least is not None and version is not None and version < least:
        yield warning(
            "cuda",
            f"the image's torch is built for CUDA {cuda}, and driver {driver} is too old for it",
            f"install driver {format_version(least)} or newer, or choose another torch_index below [images]",
        )


def check_suspension(driver: str) -> Iterator[Finding]:
    """Check that the driver can move GPU memory, where notebooks or jobs are suspended."""
    version = parse_version(driver)
    if version is not None and version < SUSPENSION_DRIVER:
        yield warning(
            "suspension",
            f"driver {driver} cannot move GPU memory, so nothing there is suspended",
            f"install driver {format_version(SUSPENSION_DRIVER)} or newer, or leave out idle.suspend_after and "
            "scheduling.suspend_scavengers",
        )


def parse_version(text: str) -> Version | None:
    """Parse a version: `20.10.24+dfsg1` is (20, 10, 24). Return None without a number."""
    match = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else None


def find_docker_vulnerabilities(text: str) -> list[str]:
    """Return the known vulnerabilities of this version of Docker Engine."""
    version = parse_version(text)
    return [vulnerability for floor, vulnerability in DOCKER_FLOORS if version is not None and version < floor]


def is_patched_runc(text: str) -> bool:
    """Return whether this version of runc has the patches of November 2025."""
    version = parse_version(text)
    if version is None or len(version) < 3:
        return False
    series = version[:2]
    return series > max(_RUNC_PATCHES) or (series in _RUNC_PATCHES and version[2] >= _RUNC_PATCHES[series])


def format_version(version: Version) -> str:
    """Return the version as text, such as `20.10`."""
    return ".".join(map(str, version))
