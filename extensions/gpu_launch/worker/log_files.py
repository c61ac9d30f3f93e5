"""Log files of one start on one node: creates them in the same folders as torchrun, and follows them."""

from __future__ import annotations

import codecs
import errno
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STREAMS = ("stdout", "stderr")
#: Bytes that are read of one file in one round.
CHUNK = 64 * 1024
#: A reader further behind skips ahead, bytes: the notebook could not display that much, and the file keeps it.
_MAX_BACKLOG = 1024 * 1024
#: Long-term limit of one file in bytes per second, and how much may be saved up. More than anyone can read, but little
#: enough that a rank which writes without end does not load its node.
_RATE, _BURST = 512 * 1024, 2 * 1024 * 1024
#: Written to test for a full disk.
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


def read_error_file(error_file: Path) -> str:
    """Return the traceback written by torch's `record`, empty if there is none."""
    try:
        return str(json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def describe_full_disk(folder: Path) -> str:
    """Return a message if the disk or quota of `folder` is full, else an empty string."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(_PROBE)
    except OSError as error:
        if error.errno in _FULL_ERRORS:
            return f"The disk or the quota of the log files is full: {folder}"
    return ""


@dataclass
class _TailedFile:
    rank: int
    stream: str
    number: int
    read_at: float
    offset: int = 0
    allowed: float = _BURST
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class LogTail:
    """Follows the stdout and stderr files of one node's ranks below torchrun's log folder. Keeps the files open."""

    def __init__(
        self,
        log_dir: Path,
        *,
        run_id: str,
        first_rank: int,
        processes: int,
        unlimited: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir = log_dir
        self._run_id = run_id
        self._first_rank = first_rank
        self._processes = processes
        #: Skip no text, whatever the rate.
        self._is_unlimited = unlimited
        self._clock = clock
        self._files: list[_TailedFile] = []

    def read(self, *, everything: bool = False) -> list[list[Any]]:
        """Return new `[rank, stream, ns, text]` entries, and `[rank, stream, ns, None, bytes]` for skipped text.

        With `everything` the rate limit does not apply: this is the last call.
        """
        now = self._clock()
        return [
            entry
            for file in self._open_files()
            for entry in _read_file(file, now, everything=everything, unlimited=self._is_unlimited)
        ]

    def read_stderr_end(self, rank: int, size: int = 16 * 1024) -> tuple[str, int]:
        """Return the last `size` bytes of a rank's stderr and the time of its last write in ns."""
        for file in self._open_files():
            if file.rank == rank and file.stream == "stderr":
                stat = os.fstat(file.number)
                text = os.pread(file.number, size, max(0, stat.st_size - size)).decode("utf-8", "replace")
                return text, stat.st_mtime_ns if text else 0
        return "", 0

    def close(self) -> None:
        for file in self._files:
            os.close(file.number)
        self._files = []

    def _open_files(self) -> list[_TailedFile]:
        if not self._files:
            self._files = self._open_all()
        return self._files

    def _open_all(self) -> list[_TailedFile]:
        """Open all files once they all exist: `<log_dir>/<rdzv id>_<random>/attempt_0/<local rank>/stdout.log`."""
        for attempt in self._log_dir.glob(f"{self._run_id}_*/attempt_0"):
            paths = [
                (self._first_rank + local, stream, attempt / str(local) / f"{stream}.log")
                for local in range(self._processes)
                for stream in STREAMS
            ]
            if all(path.exists() for _, _, path in paths):
                now = self._clock()
                return [
                    _TailedFile(rank=rank, stream=stream, number=os.open(path, os.O_RDONLY | os.O_CLOEXEC), read_at=now)
                    for rank, stream, path in paths
                ]
        return []


def _read_file(file: _TailedFile, now: float, *, everything: bool, unlimited: bool) -> list[list[Any]]:
    file.allowed = min(_BURST, file.allowed + (now - file.read_at) * _RATE)
    file.read_at = now
    stat = os.fstat(file.number)
    # A truncated file continues from its new end.
    file.offset = min(file.offset, stat.st_size)
    if stat.st_size == file.offset or (file.allowed < CHUNK and not (everything or unlimited)):
        return []
    entries: list[list[Any]] = []
    if stat.st_size - file.offset > _MAX_BACKLOG and not unlimited:
        skipped = stat.st_size - CHUNK - file.offset
        file.offset += skipped
        file.decoder.reset()
        entries.append([file.rank, file.stream, stat.st_mtime_ns, None, skipped])
    data = os.pread(file.number, CHUNK, file.offset)
    file.offset += len(data)
    file.allowed -= len(data)
    entries.append([file.rank, file.stream, stat.st_mtime_ns, file.decoder.decode(data)])
    return entries
