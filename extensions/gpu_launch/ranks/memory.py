"""This container's memory: its limit, and whether the kernel has killed something for want of it."""

from __future__ import annotations

from pathlib import Path

_MIB = 1024**2
_UNLIMITED = 2**60  # bytes
_ROOT = Path("/sys/fs/cgroup")


def oom_kills(cgroups: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> int | None:
    """How many processes so far; None where the container is not told."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    paths = [path for line in lines for path in _files(line, root, v2="memory.events", v1="memory.oom_control")]
    found = map(_count, paths)
    return next((count for count in found if count is not None), None)


def limit_mib(cgroups: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> int:
    """The container's memory limit; 0 where it has none or is not told."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        for path in _files(line, root, v2="memory.max", v1="memory.limit_in_bytes"):
            try:
                text = path.read_text().strip()
            except OSError:
                continue
            # Version 1 says "no limit" with a number that no machine has.
            return int(text) // _MIB if text.isdecimal() and int(text) < _UNLIMITED else 0
    return 0


def _files(line: str, root: Path, *, v2: str, v1: str) -> list[Path]:
    """Where one line of /proc/self/cgroup, such as `0::/docker/4f` or `4:memory:/docker/4f`, has its files.

    In a container its own group is mostly mounted at the root, whatever the line's path.
    """
    _, controllers, path = line.split(":", 2)
    own = path.lstrip("/")
    if not controllers:
        return [root / own / v2, root / v2]
    if "memory" in controllers.split(","):
        return [root / "memory" / own / v1, root / "memory" / v1]
    return []


def _count(path: Path) -> int | None:
    """The line `oom_kill 3` of one file."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
