"""Removes files that killed processes left in /dev/shm, where no other process removes them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

SHM_DIR = Path("/dev/shm")  # noqa: S108 - read, and cleared of what is known to be left
#: Name prefixes used by torch, Python's multiprocessing, NCCL, CUDA and OpenMP.
_KNOWN_NAMES = re.compile(r"(torch_|psm_|wnsm_|sem\.mp-|mp-|pymp-|nccl-|cuda\.shm\.|__KMP_REGISTERED_LIB_|gloo)")


def list_names(folder: Path = SHM_DIR) -> frozenset[str]:
    """Return the names in the folder now."""
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208 - names
    except OSError:
        return frozenset()


def remove_leftovers(before: frozenset[str], folder: Path = SHM_DIR) -> list[str]:
    """Remove new files with a known name that belong to this user and are not in use; return their names."""
    new_files = {
        name: file_id
        for name in list_names(folder) - before
        if _KNOWN_NAMES.match(name) and (file_id := _own_file_id(folder / name))
    }
    if not new_files:
        return []
    in_use = _files_in_use()
    leftovers = sorted(name for name, file_id in new_files.items() if file_id not in in_use)
    for name in leftovers:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return leftovers


def _own_file_id(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a regular file of this user, None for other files."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() else None


def _files_in_use() -> set[tuple[int, int]]:
    """Return devices and inodes of files that any process has mapped or open.

    Names would not do: a semaphore is mapped under a name that differs from its file's.
    """
    file_ids: set[tuple[int, int]] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                file_ids.update(parse_maps((process / "maps").read_text(errors="replace")))
            with contextlib.suppress(OSError):
                for entry in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        file_ids.add((status.st_dev, status.st_ino))
    return file_ids


def parse_maps(text: str) -> set[tuple[int, int]]:
    """Return the files of a /proc/<pid>/maps: `7f5e9f259000-7f5e9f25a000 rw-s 00000000 00:1b 596 /dev/shm/sem.DQe`."""
    file_ids = set()
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) >= 5 and fields[4] != "0":
            major, minor = fields[3].split(":")
            file_ids.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return file_ids
