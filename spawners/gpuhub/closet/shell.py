"""Running commands and waiting for conditions."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from gpuhub.errors import SetupError


def run(command: Sequence[str]) -> str:
    """Run it and return what it printed; SetupError with its message when it fails or is not installed."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is not installed; it is needed for: {' '.join(command)}") from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise SetupError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout


def succeeds(command: Sequence[str]) -> bool:
    """Whether it runs and exits with 0."""
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is not installed; it is needed for: {' '.join(command)}") from error


def wait_until(condition: Callable[[], bool], *, timeout_s: float, interval_s: float = 0.05) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_s)
    return True
