"""Finding and ending every process of a run's ranks, whoever their parent is by now."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

#: In the environment of torchrun, of ranks and of what they start.
MARK = "GPU_LAUNCH_RANKS"


def marked(run_id: str) -> list[int]:
    """Process ids of a run's ranks on this machine that this user may see."""
    wanted = f"{MARK}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def kill_marked(run_id: str) -> int:
    """Kill them, until none is left that could have started another; how many were killed."""
    killed: set[int] = set()
    while left := [pid for pid in marked(run_id) if pid not in killed]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
