"""One process of a kind an instance: a lock on this machine."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gpuhub.errors import SetupError


def take_lock(file: Path, refusal: str) -> int:
    """A lock that is held for as long as the returned descriptor is open; the kernel lets it go with the process.

    Raises:
        SetupError: another process holds it; says `refusal`, with the file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SetupError(f"{refusal} (it holds {file}): stop it first") from None
    return lock
