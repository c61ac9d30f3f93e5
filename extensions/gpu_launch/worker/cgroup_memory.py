"""The container's memory limit and its count of out-of-memory kills, read from its cgroup."""

from __future__ import annotations

from pathlib import Path

_MIB = 1024**2
_UNLIMITED = 2**60  # bytes
_ROOT = Path("/sys/fs/cgroup")


def count_oom_kills(cgroups: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> int | None:
    """Return the number of out-of-memory kills so far, None if it cannot be read."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    paths = [
        path for line in lines for path in _candidate_files(line, root, v2="memory.events", v1="memory.oom_control")
    ]
    counts = map(_read_oom_kills, paths)
    return next((count for count in counts if count is not None), None)


def read_limit_mib(cgroups: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> int:
    """Return the container's memory limit in MiB, 0 if it has none or it cannot be read."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        for path in _candidate_files(line, root, v2="memory.max", v1="memory.limit_in_bytes"):
            try:
                text = path.read_text().strip()
            except OSError:
                continue
            # Version 1 writes "no limit" as a number larger than any machine's memory.
            return int(text) // _MIB if text.isdecimal() and int(text) < _UNLIMITED else 0
    return 0


def _candidate_files(line: str, root: Path, *, v2: str, v1: str) -> list[Path]:
    """Return the possible files of one line of /proc/self/cgroup: `0::/docker/4f` or `4:memory:/docker/4f`.

    A container usually sees its own group mounted at the root, whatever the line's path.
    """
    _, controllers, path = line.split(":", 2)
    own = path.lstrip("/")
    if not controllers:
        return [root / own / v2, root / v2]
    if "memory" in controllers.split(","):
        return [root / "memory" / own / v1, root / "memory" / v1]
    return []


def _read_oom_kills(path: Path) -> int | None:
    """Read the count from the line `oom_kill 3` of a file."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
