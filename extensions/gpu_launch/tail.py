"""New text in ranks' log files, as torchrun lays them out."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STREAMS = ("stdout", "stderr")
#: Most bytes of one file in one round.
CHUNK = 64 * 1024
#: A reader this far behind jumps ahead: the notebook could not show it anyway, and the file has it.
_BEHIND = 1024 * 1024
#: What is sent of one file in the long run, bytes a second, and how much of it may be saved up. Far more than anybody
#: reads, and so little that a rank which writes without end costs its node nothing.
_RATE, _BURST = 512 * 1024, 2 * 1024 * 1024


@dataclass
class _File:
    rank: int
    stream: str
    number: int
    read_at: float
    offset: int = 0
    allowed: float = _BURST
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Tail:
    """Follows the stdout and stderr files of one node's ranks under torchrun's log folder. Keeps them open."""

    def __init__(
        self,
        log_dir: Path,
        *,
        run_id: str,
        first_rank: int,
        processes: int,
        whole: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir = log_dir
        self._run_id = run_id
        self._first_rank = first_rank
        self._processes = processes
        #: Nothing is passed over, whatever the rate.
        self._whole = whole
        self._clock = clock
        self._files: list[_File] = []

    def read(self, *, everything: bool = False) -> list[list[Any]]:
        """New `[rank, stream, ns, text]` entries; `[rank, stream, ns, None, bytes]` where text was passed over.

        With `everything` whatever the rate: nothing comes after it.
        """
        now = self._clock()
        return [entry for file in self._known() for entry in _read(file, now, everything=everything, whole=self._whole)]

    def end_of(self, rank: int, size: int = 16 * 1024) -> tuple[str, int]:
        """The last `size` bytes of a rank's stderr and when it was last written, in ns."""
        for file in self._known():
            if file.rank == rank and file.stream == "stderr":
                stat = os.fstat(file.number)
                text = os.pread(file.number, size, max(0, stat.st_size - size)).decode("utf-8", "replace")
                return text, stat.st_mtime_ns if text else 0
        return "", 0

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file.number)
        self._files = []

    def _known(self) -> list[_File]:
        if not self._files:
            self._files = self._find()
        return self._files

    def _find(self) -> list[_File]:
        """All files, once all are there: `<log_dir>/<rdzv id>_<random>/attempt_0/<local rank>/stdout.log`."""
        for attempt in self._log_dir.glob(f"{self._run_id}_*/attempt_0"):
            found = [
                (self._first_rank + local, stream, attempt / str(local) / f"{stream}.log")
                for local in range(self._processes)
                for stream in STREAMS
            ]
            if all(path.exists() for _, _, path in found):
                now = self._clock()
                return [
                    _File(rank=rank, stream=stream, number=os.open(path, os.O_RDONLY | os.O_CLOEXEC), read_at=now)
                    for rank, stream, path in found
                ]
        return []


def _read(file: _File, now: float, *, everything: bool, whole: bool) -> list[list[Any]]:
    file.allowed = min(_BURST, file.allowed + (now - file.read_at) * _RATE)
    file.read_at = now
    stat = os.fstat(file.number)
    # One that was cut short goes on from its end.
    file.offset = min(file.offset, stat.st_size)
    if stat.st_size == file.offset or (file.allowed < CHUNK and not (everything or whole)):
        return []
    entries: list[list[Any]] = []
    if stat.st_size - file.offset > _BEHIND and not whole:
        passed = stat.st_size - CHUNK - file.offset
        file.offset += passed
        file.decoder.reset()
        entries.append([file.rank, file.stream, stat.st_mtime_ns, None, passed])
    data = os.pread(file.number, CHUNK, file.offset)
    file.offset += len(data)
    file.allowed -= len(data)
    entries.append([file.rank, file.stream, stat.st_mtime_ns, file.decoder.decode(data)])
    return entries
