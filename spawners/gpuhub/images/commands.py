"""Runs the head node's own programs, showing what they say and ending them at a deadline."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from gpuhub.errors import SetupError
from gpuhub.images.progress import Report, Step

_KEPT_LINES = 15


def run_shown(
    command: Sequence[str], *, label: str, report: Report, deadline_s: float, env: Mapping[str, str] | None = None
) -> None:
    """Run it with its output as progress.

    Raises:
        SetupError: not installed, failed (with its last lines), or longer than the deadline.
    """
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise SetupError(f"{label}: {command[0]} is not installed on this machine") from error
    timer = threading.Timer(deadline_s, process.kill)
    timer.start()
    try:
        with process:
            for line in process.stdout or ():
                last.append(line.rstrip())
                report(Step(label=label, text=line.strip()))
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
    if is_late:
        raise SetupError(f"{label}: `{command[0]}` was not done after {deadline_s / 60:.0f} minutes")
    if process.returncode:
        raise SetupError(f"{label}: `{command[0]}` failed:\n" + "\n".join(last))


def read_output(command: Sequence[str]) -> str:
    """What it prints, or nothing when it is not installed or fails: for facts that have a default."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""
