"""The log files of one start on one node, in the folders that torchrun makes."""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PROBE = b"\0" * 8192
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, kw_only=True)
class RankLogs:
    """One rank's files."""

    stdout: Path
    stderr: Path
    #: What torch's `record` writes of an exception.
    error: Path


def make_tree(folder: Path, run_id: str, processes: int) -> list[RankLogs]:
    """`folder/<run id>_<random>/attempt_0/<local rank>/` with empty output files, by local rank."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=folder)) / "attempt_0"
    made = []
    for local_rank in range(processes):
        own = attempt / str(local_rank)
        own.mkdir(parents=True)
        logs = RankLogs(stdout=own / "stdout.log", stderr=own / "stderr.log", error=own / "error.json")
        for path in (logs.stdout, logs.stderr):
            path.touch()
        made.append(logs)
    return made


def find_full(folder: Path) -> str:
    """What to say where nothing more can be written in `folder`; empty where it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(_PROBE)
    except OSError as error:
        if error.errno in _FULL:
            return f"The disk or the quota of the log files is full: {folder}"
    return ""
