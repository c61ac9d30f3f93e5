"""New text in ranks' log files, as torchrun lays them out."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STREAMS = ("stdout", "stderr")
#: Most bytes of one file in one round.
_CHUNK = 64 * 1024
#: A reader this far behind jumps ahead: the notebook could not show it anyway, and the file has it.
_BEHIND = 2 * 1024 * 1024


@dataclass
class _File:
    rank: int
    stream: str
    path: Path
    offset: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Tail:
    """Follows the stdout and stderr files of one node's ranks under torchrun's log folder."""

    def __init__(self, log_dir: Path, *, run_id: str, first_rank: int, processes: int) -> None:
        self._log_dir = log_dir
        self._run_id = run_id
        self._first_rank = first_rank
        self._processes = processes
        self._files: list[_File] = []

    def read(self) -> list[list[Any]]:
        """New `[rank, stream, ns, text]` entries; `[rank, stream, ns, None, bytes]` where text was passed over."""
        if not self._files:
            self._files = self._find()
        return [entry for file in self._files for entry in _read(file)]

    def end_of(self, rank: int, size: int = 16 * 1024) -> tuple[str, int]:
        """The last `size` bytes of a rank's stderr and when it was last written, in ns."""
        for file in self._files:
            if file.rank == rank and file.stream == "stderr":
                with file.path.open("rb") as opened:
                    opened.seek(max(0, file.path.stat().st_size - size))
                    text = opened.read().decode("utf-8", "replace")
                return text, file.path.stat().st_mtime_ns if text else 0
        return "", 0

    def _find(self) -> list[_File]:
        """All files, once all are there: `<log_dir>/<rdzv id>_<random>/attempt_0/<local rank>/stdout.log`."""
        for attempt in self._log_dir.glob(f"{self._run_id}_*/attempt_0"):
            files = [
                _File(rank=self._first_rank + local, stream=stream, path=attempt / str(local) / f"{stream}.log")
                for local in range(self._processes)
                for stream in STREAMS
            ]
            if all(file.path.exists() for file in files):
                return files
        return []


def _read(file: _File) -> list[list[Any]]:
    stat = file.path.stat()
    if stat.st_size <= file.offset:
        return []
    entries: list[list[Any]] = []
    if stat.st_size - file.offset > _BEHIND:
        passed = stat.st_size - _CHUNK - file.offset
        file.offset += passed
        file.decoder.reset()
        entries.append([file.rank, file.stream, stat.st_mtime_ns, None, passed])
    with file.path.open("rb") as opened:
        opened.seek(file.offset)
        data = opened.read(_CHUNK)
    file.offset += len(data)
    entries.append([file.rank, file.stream, stat.st_mtime_ns, file.decoder.decode(data)])
    return entries
