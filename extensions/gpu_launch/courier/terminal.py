"""A terminal in a worker: keys come in frames, what is shown goes to stdout."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import termios
import time
from pathlib import Path
from typing import BinaryIO, NoReturn

from gpu_launch.courier.frames import DATA, HEADER, RESIZE, STDIN, Gone, parse_header

#: Keys that the terminal has not taken yet; beyond that no more are read, bytes.
_MOST_KEYS = 256 * 1024
#: From SIGHUP to SIGKILL for what runs in a terminal that is closed, seconds.
_HANGUP_S = 2.0
#: Between two looks whether the shell has ended: what it left in the background keeps its terminal open. Seconds.
_LOOK_MS = 100


def run(command: str, columns: int, rows: int, sink: BinaryIO, *, source: int = STDIN) -> dict[str, int]:
    """Run a login shell, or `command` in one, in a terminal of its own; returns its exit code, 128 + N for signal N.

    When the client goes away, everything in the terminal is hung up, and killed where that does not help; then this
    raises Gone.
    """
    child, terminal = pty.fork()
    if child == 0:
        _become_shell(command)
    try:
        os.set_blocking(terminal, False)
        _resize(terminal, columns, rows)
        return {"exit": _Relay(child, terminal, source, sink).run()}
    except Gone:
        _hang_up(child)
        raise
    finally:
        os.close(terminal)


def _become_shell(command: str) -> NoReturn:
    try:
        os.environ.setdefault("TERM", "xterm-256color")
        with contextlib.suppress(OSError):
            os.chdir(os.environ.get("HOME", "/"))
        known = (os.environ.get("SHELL", ""), "/bin/bash")
        shell = next((path for path in known if os.access(path, os.X_OK)), "/bin/sh")
        os.execv(shell, [f"-{Path(shell).name}", *(["-c", command] if command else [])])  # noqa: S606
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(127)


def _resize(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class _Relay:
    """Between a client and a terminal, until the shell has ended."""

    def __init__(self, child: int, terminal: int, source: int, sink: BinaryIO) -> None:
        self._child, self._terminal, self._source, self._sink = child, terminal, source, sink
        self._frames, self._keys = b"", b""
        self._poll = select.poll()

    def run(self) -> int:
        """The shell's exit code. Raises Gone."""
        code = None
        while True:
            is_shown = self._step(_LOOK_MS if code is None else 0)
            if code is not None and not is_shown:
                return code
            code = _ended(self._child) if code is None else code

    def _step(self, wait_ms: int) -> bool:
        """Take what is ready; whether the terminal showed anything."""
        # An end of the input is told in any case, also while nobody takes the keys.
        self._poll.register(self._source, select.POLLIN if len(self._keys) < _MOST_KEYS else 0)
        self._poll.register(self._terminal, select.POLLIN | (select.POLLOUT if self._keys else 0))
        ready = dict(self._poll.poll(wait_ms))
        if ready.get(self._source, 0) & select.POLLIN:
            self._take(os.read(self._source, 65536))
        elif ready.get(self._source, 0):
            raise Gone
        if ready.get(self._terminal, 0) & select.POLLOUT:
            with contextlib.suppress(BlockingIOError):
                self._keys = self._keys[os.write(self._terminal, self._keys) :]
        return bool(ready.get(self._terminal, 0) & select.POLLIN) and self._show()

    def _show(self) -> bool:
        try:
            data = os.read(self._terminal, 65536)
        except OSError:
            return False  # nobody has it open any more
        self._sink.write(data)
        self._sink.flush()
        return bool(data)

    def _take(self, data: bytes) -> None:
        if not data:
            raise Gone
        self._frames += data
        while len(self._frames) >= HEADER.size:
            kind, size = parse_header(self._frames[: HEADER.size])
            if len(self._frames) < HEADER.size + size:
                return
            payload = self._frames[HEADER.size : HEADER.size + size]
            self._frames = self._frames[HEADER.size + size :]
            if kind == DATA:
                self._keys += payload
            elif kind == RESIZE:
                _resize(self._terminal, *json.loads(payload))


def _ended(child: int) -> int | None:
    """The exit code of a child that has ended, as shells tell it."""
    found, status = os.waitpid(child, os.WNOHANG)
    if not found:
        return None
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _hang_up(child: int) -> None:
    """End what runs in the shell's session, jobs in the background too."""
    for number in (signal.SIGHUP, signal.SIGCONT):
        _signal_all(child, number)
    end = time.monotonic() + _HANGUP_S
    while time.monotonic() < end and _members(child):
        time.sleep(0.02)
    _signal_all(child, signal.SIGKILL)


def _signal_all(child: int, number: int) -> None:
    for pid in _members(child):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _members(session: int) -> list[int]:
    """Living processes of a session."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if _session(pid) == session]


def _session(pid: int) -> int | None:
    """The session of a process that lives: from `/proc/PID/stat`, such as `7 (a b) S 1 7 7 …`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[3])
