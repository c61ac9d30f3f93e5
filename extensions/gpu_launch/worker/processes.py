"""Finds and kills the processes of ranks and workers, also after their parents have ended.

Has the Linux calls for that which Python lacks, and removes what killed processes left in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path

#: Set in the environment of torchrun, of ranks and of their child processes.
MARK_VARIABLE = "GPU_LAUNCH_RANKS"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Fields env_start and env_end of /proc/self/stat, counted from the state, see proc(5).
_ENV_START, _ENV_END = 47, 48
_SHM = Path("/dev/shm")  # noqa: S108 - read, and cleared of what is known to be left
#: Name prefixes of files there by torch, Python's multiprocessing, NCCL, CUDA and OpenMP.
_KNOWN_SHM_NAMES = re.compile(r"(torch_|psm_|wnsm_|sem\.mp-|mp-|pymp-|nccl-|cuda\.shm\.|__KMP_REGISTERED_LIB_|gloo)")

_libc = ctypes.CDLL(None, use_errno=True)


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


def die_with_parent(number: int, parent: int) -> None:
    """Send this process a signal when the thread that started it ends; at once if `parent` has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pad_value(value: str, size: int = 256) -> str:
    """Pad a variable's value so that `set_visible_variable` can replace it with up to `size` characters."""
    return value.ljust(size, "=")


def set_visible_variable(name: str, value: str) -> bool:
    """Change the value that /proc/<pid>/environ shows for a variable; return whether that was possible.

    A forked process shows its parent's start environment, whatever it sets itself. The variable must exist there, and
    the new value must not be longer.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    if not start < end:
        return False
    area = ctypes.string_at(start, end - start)
    key = f"{name}=".encode()
    position = 0 if area.startswith(key) else area.find(b"\0" + key) + 1
    if not area.startswith(key, position):
        return False
    length = area.index(b"\0", position) - position
    text = key + os.fsencode(value)
    # The zeros after an earlier, shorter value belong to it.
    while position + length < len(area) and area[position + length] == 0:
        length += 1
    if len(text) >= length:
        return False
    ctypes.memmove(start + position, text.ljust(length, b"\0"), length)
    return True


def list_shm_names(folder: Path = _SHM) -> frozenset[str]:
    """Return the names of the files in /dev/shm now."""
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208 - names
    except OSError:
        return frozenset()


def remove_shm_leftovers(before: frozenset[str], folder: Path = _SHM) -> list[str]:
    """Remove new files with a known name that belong to this user and are not in use; return their names."""
    new_files = {
        name: file_id
        for name in list_shm_names(folder) - before
        if _KNOWN_SHM_NAMES.match(name) and (file_id := _own_file_id(folder / name))
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
                file_ids.update(_parse_maps((process / "maps").read_text(errors="replace")))
            with contextlib.suppress(OSError):
                for entry in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        file_ids.add((status.st_dev, status.st_ino))
    return file_ids


def _parse_maps(text: str) -> set[tuple[int, int]]:
    """Return the files of a /proc/<pid>/maps: `7f5e9f259000-7f5e9f25a000 rw-s 00000000 00:1b 596 /dev/shm/sem.DQe`."""
    file_ids = set()
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) >= 5 and fields[4] != "0":
            major, minor = fields[3].split(":")
            file_ids.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return file_ids
