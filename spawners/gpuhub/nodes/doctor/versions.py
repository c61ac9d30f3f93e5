"""Versions as distributions write them, and the oldest that are free of known holes. Pure."""

from __future__ import annotations

import re

Version = tuple[int, ...]

#: Docker's API that gpuhub speaks.
DOCKER_LEAST: Version = (20, 10)
#: Docker Engine: until these versions, what each mends.
DOCKER_FLOORS: tuple[tuple[Version, str], ...] = (
    ((28, 3, 3), "firewalld's reload opens containers' ports (CVE-2025-54388, CVE-2025-54410)"),
    ((29, 3, 1), "authorisation plugins can be passed by (CVE-2026-34040)"),
)
TOOLKIT_FLOOR: Version = (1, 17, 8)
JUPYTERHUB_FLOOR: Version = (5, 5, 1)
#: runc: the first version of each series without CVE-2025-31133, -52565 and -52881, which lead out of containers.
_RUNC_GOOD: dict[Version, int] = {(1, 2): 8, (1, 3): 3}


def parse_version(text: str) -> Version | None:
    """`20.10.24+dfsg1` is (20, 10, 24); None where there is no number."""
    found = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def docker_holes(text: str) -> list[str]:
    """What is known to be wrong with this version of Docker Engine."""
    version = parse_version(text)
    return [what for floor, what in DOCKER_FLOORS if version is not None and version < floor]


def is_safe_runc(text: str) -> bool:
    """Whether this version of runc has the repairs of November 2025 by its number."""
    version = parse_version(text)
    if version is None or len(version) < 3:
        return False
    series = version[:2]
    return series > max(_RUNC_GOOD) or (series in _RUNC_GOOD and version[2] >= _RUNC_GOOD[series])


def format_version(version: Version) -> str:
    """With points."""
    return ".".join(map(str, version))
