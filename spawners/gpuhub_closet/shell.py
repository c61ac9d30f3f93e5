"""Commands, conditions to wait for, and files that are replaced as a whole."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuhub.common.errors import SetupError


def run_command(command: Sequence[str]) -> str:
    """Run a command and return its output.

    Raises:
        SetupError: It is not installed, or failed; the text has its message.
    """
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is not installed; it is needed for: {' '.join(command)}") from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise SetupError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout


def is_successful(command: Sequence[str]) -> bool:
    """Run a command and return whether its exit status is 0.

    Raises:
        SetupError: It is not installed.
    """
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is not installed; it is needed for: {' '.join(command)}") from error


def wait_until(condition: Callable[[], bool], *, timeout_s: float, interval_s: float = 0.05) -> bool:
    """Wait for a condition, and return whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_s)
    return True


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step: a reader sees the old or the new content, never a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    temporary.chmod(mode)
    temporary.replace(path)
