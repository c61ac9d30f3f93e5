"""What killed processes left in /dev/shm: nobody else ever removes it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108 - read, and cleared of what is known to be left
#: Names that torch, Python's multiprocessing, NCCL, CUDA and OpenMP give.
_KNOWN = re.compile(r"(torch_|psm_|wnsm_|sem\.mp-|mp-|pymp-|nccl-|cuda\.shm\.|__KMP_REGISTERED_LIB_|gloo)")


def names(folder: Path = SHM) -> frozenset[str]:
    """What is there now."""
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208 - names
    except OSError:
        return frozenset()


def sweep(before: frozenset[str], folder: Path = SHM) -> list[str]:
    """Remove what came since, is ours by its name and owner, and in nobody's use; its names."""
    came = {name: found for name in names(folder) - before if _KNOWN.match(name) and (found := _own(folder / name))}
    if not came:
        return []
    used = _in_use()
    left = sorted(name for name, found in came.items() if found not in used)
    for name in left:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return left


def _own(path: Path) -> tuple[int, int] | None:
    """The device and inode of a file of this user; None for anything else."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() else None


def _in_use() -> set[tuple[int, int]]:
    """Devices and inodes of files that any process has mapped or open.

    Not their names: a semaphore is mapped under another one than it has.
    """
    found: set[tuple[int, int]] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                found.update(parse_maps((process / "maps").read_text(errors="replace")))
            with contextlib.suppress(OSError):
                for entry in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        found.add((status.st_dev, status.st_ino))
    return found


def parse_maps(text: str) -> set[tuple[int, int]]:
    """Files of /proc/<pid>/maps: `7f5e9f259000-7f5e9f25a000 rw-s 00000000 00:1b 596   /dev/shm/sem.DQe (deleted)`."""
    found = set()
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) >= 5 and fields[4] != "0":
            major, minor = fields[3].split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return found
