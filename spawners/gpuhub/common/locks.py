"""File locks that let one process of a kind run for each instance on this machine."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gpuhub.common.errors import SetupError


def acquire_lock(file: Path, refusal: str) -> int:
    """Lock a file; the lock lasts as long as the returned descriptor is open, at most until the process ends.

    Raises:
        SetupError: another process has the lock; the text begins with `refusal` and names the file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SetupError(f"{refusal} (it locks {file}): stop it first") from None
    return lock
