"""Programs that a notebook's user has started outside of its kernels: in terminals, by SSH, and detached from both.

Of detached programs (`nohup`, tmux) those count that have loaded the CUDA driver: they may wait for their next step on
the GPU, while an agent or an editor's server that was left behind says nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]

#: The driver's library, as part of its path, in the files that a process has mapped.
_CUDA_DRIVER = "libcuda.so"
#: Name of sshd's own process that serves SFTP.
_SFTP = "@internal-sftp"

#: Processes by their parent's id.
_Children = Mapping[int, list[psutil.Process]]


@dataclass(frozen=True, kw_only=True)
class UserPrograms:
    """The programs that run at one moment."""

    #: Processes that run; a shell at its prompt is not one.
    running: frozenset[psutil.Process]
    #: When the terminal of an SSH session at its prompt was last used; None without one.
    used_at: datetime | None


def find_programs(*, server: int, shells: Iterable[int], kernels: Iterable[int]) -> UserPrograms:
    """Return what runs in the container, by one pass over its processes.

    Args:
        server: The process id of the notebook's server, which has started sshd for each SSH session.
        shells: Those of the shells of JupyterLab's terminals.
        kernels: Those of the kernels, whose own processes do not count: their cells do.
    """
    children = _list_children()
    sessions = [found for child in children.get(server, ()) if _is_sshd(child) for found in _walk(child, children)]
    prompts = [process for process in sessions if _is_login_shell(process)]
    parents = [*shells, *(process.pid for process in prompts)]
    running = {child for parent in parents for child in children.get(parent, ())} | (set(sessions) - set(prompts))
    of_kernels = {server, *_list_descendants(kernels, children)}
    everything = [process for processes in children.values() for process in processes]
    running |= {process for process in everything if process.pid not in of_kernels and _has_cuda(process)}
    used_at = max(filter(None, map(_find_last_use, prompts)), default=None)
    return UserPrograms(running=frozenset(running), used_at=used_at)


def _list_children() -> _Children:
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    return children


def _walk(sshd: psutil.Process, children: _Children) -> Iterator[psutil.Process]:
    """Yield what an sshd serves: login shells, commands and SFTP, below its own processes."""
    for child in children.get(sshd.pid, ()):
        if not _is_sshd(child) or _SFTP in _read_command(child):
            yield child
        else:
            yield from _walk(child, children)


def _list_descendants(roots: Iterable[int], children: _Children) -> set[int]:
    left, found = list(roots), set[int]()
    while left:
        found.add(pid := left.pop())
        left += [child.pid for child in children.get(pid, ()) if child.pid not in found]
    return found


def _is_sshd(process: psutil.Process) -> bool:
    """Return whether a process is OpenSSH's server: `sshd`, from version 9.8 on also `sshd-session`."""
    with contextlib.suppress(psutil.Error):
        return bool(process.name().startswith("sshd"))
    return False


def _is_login_shell(process: psutil.Process) -> bool:
    """Return whether sshd has started a user's shell, whose name then begins with a hyphen, and not a command."""
    return _read_command(process).startswith("-")


def _read_command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[:4])
    return ""


def _find_last_use(shell: psutil.Process) -> datetime | None:
    """Return when a terminal was last read or written, to about 8 s; None if its shell has ended."""
    with contextlib.suppress(OSError):
        terminal = Path(f"/proc/{shell.pid}/fd/0").stat()
        return datetime.fromtimestamp(max(terminal.st_atime, terminal.st_mtime), UTC)
    return None


def _has_cuda(process: psutil.Process) -> bool:
    with contextlib.suppress(OSError):
        return _CUDA_DRIVER in Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
    return False
