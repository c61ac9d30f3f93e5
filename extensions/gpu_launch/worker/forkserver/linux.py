"""Linux calls that Python lacks: death signals, subreapers, and the environment that /proc shows of a process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Fields env_start and env_end of /proc/self/stat, counted from the state, see proc(5).
_ENV_START, _ENV_END = 47, 48

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent: int) -> None:
    """Have this process get a signal when the thread that started it ends; at once if `parent` has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pad_value(value: str, size: int = 256) -> str:
    """Pad a variable's value so that `set_visible_variable` can replace it with up to `size` characters."""
    return value.ljust(size, "=")


def set_visible_variable(name: str, value: str) -> bool:
    """Change the value that /proc/<pid>/environ shows for a variable; return whether that was possible.

    A forked process shows its parent's start environment, whatever it sets itself. The variable must exist there, and
    the new value must not be longer.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    if not start < end:
        return False
    area = ctypes.string_at(start, end - start)
    key = f"{name}=".encode()
    position = 0 if area.startswith(key) else area.find(b"\0" + key) + 1
    if not area.startswith(key, position):
        return False
    length = area.index(b"\0", position) - position
    text = key + os.fsencode(value)
    # The zeros after an earlier, shorter value belong to it.
    while position + length < len(area) and area[position + length] == 0:
        length += 1
    if len(text) >= length:
        return False
    ctypes.memmove(start + position, text.ljust(length, b"\0"), length)
    return True
