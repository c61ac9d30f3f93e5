"""Finds and kills the processes of a run's ranks or of a worker, even after their parents have ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

#: Set in the environment of torchrun, of ranks and of their child processes.
MARK_VARIABLE = "GPU_LAUNCH_RANKS"


def build_mark(run_id: str, worker: int | None) -> str:
    """Return the mark of a container's ranks; `worker` is None in the notebook's own container."""
    return f"{run_id}/{'notebook' if worker is None else worker}"


def find_marked(mark: str) -> list[int]:
    """Return the process ids of a run's ranks in this container that this user can see."""
    entry_bytes = f"{MARK_VARIABLE}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if entry_bytes in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def kill_marked(mark: str) -> int:
    """Kill marked processes until none is left; return how many were killed."""
    return _kill_all(lambda: find_marked(mark))


def find_descendants(ancestor: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # `1234 (a name) S 1 ...`: the parent follows the state.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    pids, pending = [], [ancestor]
    while pending:
        for child in children.get(pending.pop(), []):
            pids.append(child)
            pending.append(child)
    return pids


def kill_descendants() -> int:
    """Kill all descendants of this process until none is left; return how many. For a process that adopts orphans."""
    return _kill_all(lambda: find_descendants(os.getpid()))


def _kill_all(find: Callable[[], list[int]]) -> int:
    killed: set[int] = set()
    while remaining := [pid for pid in find() if pid not in killed]:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
