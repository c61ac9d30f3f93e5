"""Versions as distributions write them, and the first ones without known vulnerabilities."""

from __future__ import annotations

import re

Version = tuple[int, ...]

#: The oldest Docker Engine that gpuhub supports.
MIN_DOCKER: Version = (20, 10)
#: Docker Engine: the first version without each vulnerability.
DOCKER_FLOORS: tuple[tuple[Version, str], ...] = (
    ((28, 3, 3), "a reload of firewalld opens containers' ports (CVE-2025-54388, CVE-2025-54410)"),
    ((29, 3, 1), "authorisation plugins can be bypassed (CVE-2026-34040)"),
)
TOOLKIT_FLOOR: Version = (1, 17, 8)
JUPYTERHUB_FLOOR: Version = (5, 5, 1)
#: runc: the first patch of each series without CVE-2025-31133, -52565 and -52881, which allow escapes from containers.
_RUNC_PATCHES: dict[Version, int] = {(1, 2): 8, (1, 3): 3}


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
