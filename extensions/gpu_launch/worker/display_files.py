"""Follows the files to which a node's ranks write what they display, see `common.displays`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_launch.common import displays
from gpu_launch.common.displays import Display
from gpu_launch.common.run_folder import RunFolder

#: Long-term limit of one rank in bytes per second, and how much may be saved up.
_RATE, _BURST = 2 * 1024**2, 32 * 1024**2
#: Most bytes read of one file in one round: two displays.
_CHUNK = 2 * (displays.MAX_BYTES + 1)


@dataclass
class _DisplayFile:
    rank: int
    number: int
    read_at: float
    offset: int = 0
    allowed: float = _BURST
    #: The beginning of a line.
    pending: bytes = b""


class DisplayFiles:
    """The files of one start, which are created here. Keeps them open."""

    def __init__(self, run: RunFolder, ranks: Sequence[int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._files = [
            _DisplayFile(rank=rank, number=os.open(run.display_file(rank), flags, 0o600), read_at=clock())
            for rank in ranks
        ]

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return new displays by rank; those above the limits as text with their size."""
        return [(file.rank, display) for file in self._files for display in self._read_file(file)]

    def close(self) -> None:
        for file in self._files:
            os.close(file.number)
        self._files = []

    def _read_file(self, file: _DisplayFile) -> list[dict[str, Any]]:
        now = self._clock()
        file.allowed = min(_BURST, file.allowed + (now - file.read_at) * _RATE)
        file.read_at = now
        if os.fstat(file.number).st_size == file.offset:
            return []
        data = os.pread(file.number, _CHUNK, file.offset)
        file.offset += len(data)
        *lines, file.pending = (file.pending + data).split(b"\n")
        if len(file.pending) > _CHUNK:
            # No display is that large: a line of something else.
            file.pending = b""
        _empty_when_read(file)
        return [display for line in lines if (display := _read_line(file, line)) is not None]


def _read_line(file: _DisplayFile, line: bytes) -> dict[str, Any] | None:
    if len(line) > file.allowed or len(line) > displays.MAX_BYTES + 1:
        text = f"[a display of {len(line) / 1e6:.1f} MB is left out: too many large ones]"
        line = displays.dump_display(Display(data={"text/plain": text}))
    file.allowed -= len(line)
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _empty_when_read(file: _DisplayFile) -> None:
    """Empty a file that was read to its end; ranks write under the same lock."""
    if file.pending:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if os.fstat(file.number).st_size == file.offset:
                os.ftruncate(file.number, 0)
                file.offset = 0
        finally:
            fcntl.flock(file.number, fcntl.LOCK_UN)
