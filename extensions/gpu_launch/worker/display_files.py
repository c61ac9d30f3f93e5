"""Follows the files to which a node's ranks write what they display, see `common.displays`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_launch.common import displays
from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.common.run_folder import RunFolder

#: Long-term limit of one rank in bytes per second, and how much may be saved up, or wait to be sent.
_RATE, _BURST = 2 * 1024**2, 32 * 1024**2
#: Seconds between two rounds: of the updates of one display that come in between, the last one is sent.
PERIOD_S = 0.1
#: Bytes that are read of one file in one round: two displays.
_CHUNK = 2 * (displays.MAX_BYTES + 1)
#: Beginnings of keys.
_UPDATE, _CLEAR, _SHOW = "update", "clear", "show"


@dataclass(frozen=True, kw_only=True)
class FoundDisplay:
    """A display that a rank has written."""

    rank: int
    #: In the form of `common.displays`.
    display: dict[str, Any]
    #: Displays that the rank has written since the one that was found before, those that were left out included.
    count: int


@dataclass
class _Waiting:
    """Displays of one rank that were read and not sent, with their sizes in bytes."""

    #: An update has the same key as later ones of the same display.
    items: dict[str, tuple[dict[str, Any], int]] = field(default_factory=dict)
    size: int = 0
    _number: int = 0

    def add(self, display: dict[str, Any], size: int) -> None:
        """Add a display, and drop those that it replaces or clears; one for which there is no room as text."""
        key = self._choose_key(display)
        self._drop([key])
        if self.size + size > _BURST:
            text = f"[a display of {size / 1e6:.1f} MB is left out: too many large ones]"
            display, size = {**display, "data": {"text/plain": text}, "metadata": {}}, len(text)
        self.items[key] = (display, size)
        self.size += size

    def pop(self) -> tuple[dict[str, Any], int]:
        """Remove the oldest display; return it and its size."""
        display, size = self.items.pop(next(iter(self.items)))
        self.size -= size
        return display, size

    def has_only_updates(self) -> bool:
        return all(display.get("kind") == DisplayKind.UPDATE for display, _ in self.items.values())

    def _choose_key(self, display: dict[str, Any]) -> str:
        if display.get("kind") == DisplayKind.UPDATE:
            return f"{_UPDATE} {display.get('id')}"
        self._number += 1
        placed = [key for key in self.items if not key.startswith(_UPDATE)]
        if display.get("kind") == DisplayKind.CLEAR:
            if not display.get("wait"):
                self._drop(placed)
            elif placed and placed[-1].startswith(_CLEAR):
                return placed[-1]
            return f"{_CLEAR} {self._number}"
        # A clear that waits takes effect now.
        clears = [index for index, key in enumerate(placed) if key.startswith(_CLEAR)]
        self._drop(placed[: clears[-1]] if clears else ())
        return f"{_SHOW} {self._number}"

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            _, size = self.items.pop(key, ({}, 0))
            self.size -= size


@dataclass
class _DisplayFile:
    rank: int
    number: int
    read_at: float
    offset: int = 0
    allowed: float = _BURST
    #: The beginning of a line.
    pending: bytes = b""
    waiting: _Waiting = field(default_factory=_Waiting)
    #: Displays that were read since one was sent.
    count: int = 0


class DisplayFiles:
    """The files of one start, which are created here. Keeps them open."""

    def __init__(
        self,
        run: RunFolder,
        ranks: Sequence[int],
        *,
        is_only_rank: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_only_rank` says that displays have a place among the rank's lines: only updates wait."""
        self._clock, self._is_only_rank = clock, is_only_rank
        self._due_at = clock()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._files = [
            _DisplayFile(rank=rank, number=os.open(run.display_file(rank), flags, 0o600), read_at=clock())
            for rank in ranks
        ]

    def read(self, *, everything: bool = False) -> list[FoundDisplay]:
        """Return displays that are to be sent now; with `everything` all, because the ranks have ended."""
        now = self._clock()
        is_due = everything or now >= self._due_at
        if not is_due and not self._is_only_rank:
            return []
        for file in self._files:
            while _read_chunk(file) and everything:
                pass
        if not is_due and all(file.waiting.has_only_updates() for file in self._files):
            return []
        self._due_at = now + PERIOD_S
        return [found for file in self._files for found in _pop_due(file, now, everything=everything)]

    def close(self) -> None:
        for file in self._files:
            os.close(file.number)
        self._files = []


def _read_chunk(file: _DisplayFile) -> bool:
    """Read what a rank has written, up to a limit; return whether there was something."""
    if os.fstat(file.number).st_size == file.offset:
        return False
    data = os.pread(file.number, _CHUNK, file.offset)
    file.offset += len(data)
    *lines, file.pending = (file.pending + data).split(b"\n")
    if len(file.pending) > _CHUNK:
        # No display is that large: a line of something else.
        file.pending = b""
    _empty_when_read(file)
    for line in lines:
        if (display := _parse_line(line)) is not None:
            file.count += 1
            file.waiting.add(display, len(line))
    return bool(data)


def _pop_due(file: _DisplayFile, now: float, *, everything: bool) -> Iterator[FoundDisplay]:
    """Return the oldest displays while the rank is below its limit; a large one may use what comes later."""
    file.allowed = min(_BURST, file.allowed + (now - file.read_at) * _RATE)
    file.read_at = now
    while file.waiting.items and (file.allowed > 0 or everything):
        display, size = file.waiting.pop()
        file.allowed -= size
        count, file.count = file.count - len(file.waiting.items), len(file.waiting.items)
        yield FoundDisplay(rank=file.rank, display=display, count=count)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    if len(line) > displays.MAX_BYTES + 1:
        line = displays.dump_display(Display(data={"text/plain": displays.describe_too_large(len(line))}))
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
