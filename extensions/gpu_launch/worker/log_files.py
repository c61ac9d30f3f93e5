"""Log files of one start on one node, in the same folders as torchrun's."""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path


def read_error_file(error_file: Path) -> str:
    """Return the traceback written by torch's `record`, empty if there is none."""
    import json

    try:
        return str(json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


_PROBE = b"\0" * 8192
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, kw_only=True)
class RankLogs:
    """The log files of one rank."""

    stdout: Path
    stderr: Path
    #: Written by torch's `record` when the script raises an exception.
    error: Path


def create_log_tree(folder: Path, run_id: str, processes: int) -> list[RankLogs]:
    """Create `folder/<run id>_<random>/attempt_0/<local rank>/` with empty output files; return them by local rank."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=folder)) / "attempt_0"
    all_logs = []
    for local_rank in range(processes):
        rank_folder = attempt / str(local_rank)
        rank_folder.mkdir(parents=True)
        logs = RankLogs(
            stdout=rank_folder / "stdout.log", stderr=rank_folder / "stderr.log", error=rank_folder / "error.json"
        )
        for path in (logs.stdout, logs.stderr):
            path.touch()
        all_logs.append(logs)
    return all_logs


def describe_full_disk(folder: Path) -> str:
    """Return a message if the disk or quota of `folder` is full, else an empty string."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(_PROBE)
    except OSError as error:
        if error.errno in _FULL_ERRORS:
            return f"The disk or the quota of the log files is full: {folder}"
    return ""
