"""What Python has no call for: death signals, subreapers, and the mark that /proc shows of a forked process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Of /proc/self/stat, counted from the state: env_start and env_end, see proc(5).
_ENV_START, _ENV_END = 47, 48

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent: int) -> None:
    """Get this signal when the thread that started this process ends; at once where `parent` has gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own has ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def padded(value: str, size: int = 256) -> str:
    """A variable's value for a process that is to change it with `show_as`: as long as it may become."""
    return value.ljust(size, "=")


def show_as(name: str, value: str) -> bool:
    """Have /proc/<pid>/environ show `value` for a variable that this process was started with; whether it could.

    A forked process shows what its parent was started with, whatever it sets. The new value must not be longer.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    if not start < end:
        return False
    area = ctypes.string_at(start, end - start)
    key = f"{name}=".encode()
    at = 0 if area.startswith(key) else area.find(b"\0" + key) + 1
    if not area.startswith(key, at):
        return False
    room = area.index(b"\0", at) - at
    text = key + os.fsencode(value)
    # What follows an earlier, shorter value is zeros, and belongs to it.
    while at + room < len(area) and area[at + room] == 0:
        room += 1
    if len(text) >= room:
        return False
    ctypes.memmove(start + at, text.ljust(room, b"\0"), room)
    return True
