"""Finding and ending every process of a run's ranks in a container, whoever their parent is by now."""

from __future__ import annotations

import contextlib
import os
import signal
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
    killed: set[int] = set()
    while left := [pid for pid in marked(mark) if pid not in killed]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
