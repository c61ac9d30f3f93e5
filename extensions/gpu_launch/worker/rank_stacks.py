"""Stacks of running ranks: each rank dumps them into a file of its own on a signal, and the agent collects the files.

Python's `faulthandler` writes the dump in the signal handler itself, so that a rank that hangs in native code or holds
the GIL answers too. A rank may also serve torch's control plane on a Unix socket, whose flight recorders name the
collectives of the rank; see `start_torch_server`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The variable with the path of a rank's dump; each rank fills in `{rank}`.
VARIABLE = "GPU_LAUNCH_STACKS"
#: Prefix of the dump folder's name in $TMPDIR; followed by the process id.
PREFIX = "gpu_launch-stacks-"
#: Set by a user to serve torch's control plane in every rank of a launch.
SERVER_VARIABLE = "GPU_LAUNCH_TORCH_SERVER"
#: Libraries and schedulers use SIGUSR1 and SIGUSR2; nothing is known to use this one.
SIGNAL = int(signal.SIGRTMAX) - 1
#: Numbers of new files in the rank begin at 3 as without the dump.
_LEAST_FD = 400
_DUMP_S = 1.5  # seconds for all ranks of a node to write their dumps
_QUIET_S = 0.06  # a dump that has not grown for this many seconds is complete
_POLL_S = 0.01  # seconds
_SOCKET_S = 0.5  # seconds for an answer of torch's control plane
_MAX_BYTES = 512 * 1024  # of one dump
_MAX_TRACE_BYTES = 8 * 1024 * 1024
_SOCKET = ".socket"
#: Handlers of torch's control plane: the flight recorder of gloo, and that of NCCL, which only builds for CUDA have.
_RECORDERS = ("fr_trace_json", "dump_nccl_trace_json")
#: States in /proc/PID/stat, for people.
_STATES = {"D": "waits in the kernel, such as for a file", "T": "is stopped", "Z": "has ended"}

#: Kept for the life of the process: a dump needs the file, and the destructor of a server writes to stderr.
_kept: list[Any] = []


def create_pattern() -> str:
    """Create a folder that only this user can enter; return the path of a rank's dump in it, with `{rank}`.

    Folders of processes that were killed are removed.
    """
    remove_left_folders()
    return str(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")) / "{rank}")


def remove_left_folders() -> None:
    """Remove this user's folders of processes that have ended: a node without containers is not emptied after a job."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder)


def install(environ: dict[str, str] | os._Environ[str]) -> None:
    """Let this rank dump its stacks on `SIGNAL`; do nothing outside a launch, or if the dump cannot be written."""
    path = _fill_in(environ)
    if path is None:
        return
    try:
        descriptor = _open_dump(path)
    except OSError:
        return
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
    if environ.get(SERVER_VARIABLE, "") not in ("", "0"):
        start_torch_server(environ)


def start_torch_server(environ: dict[str, str] | os._Environ[str]) -> None:
    """Serve torch's control plane on a Unix socket next to the dump, for this user alone.

    It adds threads to the process. Does nothing outside a launch, and with a torch that has no such server.
    """
    path = _fill_in(environ)
    if path is None:
        return
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:
        return
    Path(path + _SOCKET).unlink(missing_ok=True)
    with contextlib.suppress(RuntimeError), _muted_stderr():
        _kept.append(_WorkerServer(path + _SOCKET))


def _fill_in(environ: dict[str, str] | os._Environ[str]) -> str | None:
    pattern = environ.get(VARIABLE)
    return pattern.replace("{rank}", environ.get("RANK", "0")) if pattern else None


def _open_dump(path: str) -> int:
    """Open the dump with a first line that says which process writes it, and which of its threads is the main one."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    pid = os.getpid()
    header = {"pid": pid, "started": read_stat(pid)[1], "main": threading.main_thread().ident}
    header["run"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
    os.write(number, json.dumps(header).encode() + b"\n")
    try:
        high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _LEAST_FD)
    except OSError:
        return number
    os.close(number)
    return high


@contextlib.contextmanager
def _muted_stderr() -> Any:
    """Drop what native code writes to stderr: the server logs its start as a warning."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


@dataclass
class _Dump:
    """The dump of one rank while it is written."""

    rank: int
    path: Path
    problem: str = ""
    main: int = 0
    #: Bytes before the dump.
    begin: int = 0
    size: int = 0
    grown_at: float = 0.0
    is_complete: bool = False


def collect(pattern: str, ranks: Iterable[int]) -> list[dict[str, Any]]:
    """Return the stacks of ranks of this container, at most about `_DUMP_S` seconds later.

    Each is `{"rank", "main", "text", "problem", "trace"}`: the id of the main thread, faulthandler's text, the reason
    for a person if there is none, and the trace of the flight recorders, empty without torch's control plane.
    """
    dumps = [_start_dump(rank, Path(pattern.replace("{rank}", str(rank)))) for rank in ranks]
    pending = [dump for dump in dumps if not dump.problem]
    deadline = time.monotonic() + _DUMP_S
    while pending and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        pending = [dump for dump in pending if not _is_written(dump, time.monotonic())]
    return [_read_dump(dump) for dump in dumps]


def _start_dump(rank: int, path: Path) -> _Dump:
    """Send the signal to a rank; not to a process that has no handler for it, which would end."""
    dump = _Dump(rank=rank, path=path)
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
        dump.begin = dump.size = path.stat().st_size
        pid, dump.main = int(header["pid"]), int(header["main"])
        state, started = read_stat(pid)
        if started != header["started"] or state == "Z":
            dump.problem = "has ended"
        elif not handles_signal(pid):
            dump.problem = "its program replaced the handler of the signal that dumps stacks"
        else:
            os.kill(pid, SIGNAL)
            dump.problem = ""
    except (FileNotFoundError, ProcessLookupError):
        is_ours = path.exists()
        dump.problem = "has ended" if is_ours else "its stacks cannot be read: torchrun or a command started it"
    except (OSError, ValueError, KeyError, TypeError) as error:
        dump.problem = f"its stacks cannot be read ({type(error).__name__})"
    return dump


def _is_written(dump: _Dump, now: float) -> bool:
    size = dump.path.stat().st_size
    if size != dump.size:
        dump.size, dump.grown_at = size, now
    dump.is_complete = size > dump.begin and now - dump.grown_at >= _QUIET_S
    return dump.is_complete


def _read_dump(dump: _Dump) -> dict[str, Any]:
    text = ""
    if not dump.problem:
        with dump.path.open("rb") as file:
            header = json.loads(file.readline())
            file.seek(dump.begin)
            text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        if not text:
            dump.problem = f"does not answer the signal; it {_describe_state(int(header['pid']))}"
        # The file of a long run stays small; the rank appends.
        os.truncate(dump.path, dump.begin)
    return {
        "rank": dump.rank,
        "main": dump.main,
        "text": text,
        "problem": dump.problem,
        "trace": _read_trace(f"{dump.path}{_SOCKET}"),
    }


def _describe_state(pid: int) -> str:
    try:
        return _STATES.get(read_stat(pid)[0], "may block signals")
    except OSError:
        return "has ended"


def _read_trace(path: str) -> str:
    """Return the entries of torch's flight recorders as JSON; empty where the rank serves none."""
    if not Path(path).is_socket():
        return ""
    entries: list[Any] = []
    with contextlib.suppress(OSError):
        for handler in _RECORDERS:
            with contextlib.suppress(ValueError):
                entries += json.loads(_ask_torch(path, handler)).get("entries", [])
    return json.dumps({"entries": entries}) if entries else ""


def _ask_torch(path: str, handler: str) -> str:
    """Return the answer of a handler of torch's control plane, which closes the connection after it.

    Raises:
        OSError: The control plane does not answer.
        ValueError: It has no such handler.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SOCKET_S)
        connection.connect(path)
        connection.sendall(
            f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        data = b""
        while (more := connection.recv(65536)) and len(data) < _MAX_TRACE_BYTES:
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ValueError(head[:80])
    return body.decode()


def read_stat(pid: int) -> tuple[str, str]:
    """Return the state and the start time of a process, from `7 (a b) S 1 …`; the start is field 22 of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def handles_signal(pid: int, number: int = SIGNAL) -> bool:
    """Return whether the process has a handler for a signal, from the line `SigCgt:	0000000180004002`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (number - 1) & 1)
    return False
