"""Checks of versions between nodes, and of the driver against the image's CUDA."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuhub.ops.doctor.findings import Finding, warning
from gpuhub.ops.doctor.node_checks import Version, format_version, parse_version
from gpuhub.ops.doctor.node_facts import DockerFacts, HostFacts

#: CUDA's major version → the first driver that runs all its minor versions: table "CUDA Toolkit and Minimum Required
#: Driver Version for CUDA Minor Version Compatibility" of the CUDA Toolkit's release notes.
CUDA_DRIVERS: Mapping[int, Version] = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
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
