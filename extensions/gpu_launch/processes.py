"""Finding and ending every process of a run's ranks, or of a worker, whoever their parent is by now."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

#: In the environment of torchrun, of ranks and of what they start.
MARK = "GPU_LAUNCH_RANKS"


def mark(run_id: str, worker: int | None) -> str:
    """What a container's ranks carry; `worker` is None in the notebook's own."""
    return f"{run_id}/{'notebook' if worker is None else worker}"


def marked(mark: str) -> list[int]:
    """Process ids of a run's ranks in this container that this user may see."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def kill_marked(mark: str) -> int:
    """Kill them, until none is left that could have started another; how many were killed."""
    return _kill_all(lambda: marked(mark))


def descendants(ancestor: int) -> list[int]:
    """Process ids of its children, of theirs, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # `1234 (a name) S 1 ...`: the state, then the parent.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [ancestor]
    while left:
        for child in children.get(left.pop(), []):
            found.append(child)
            left.append(child)
    return found


def kill_descendants() -> int:
    """Kill all of this process's, until none is left; how many were killed. For a process that adopts orphans."""
    return _kill_all(lambda: descendants(os.getpid()))


def _kill_all(find: Callable[[], list[int]]) -> int:
    killed: set[int] = set()
    while left := [pid for pid in find() if pid not in killed]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
