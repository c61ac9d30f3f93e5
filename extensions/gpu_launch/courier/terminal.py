"""Runs a terminal: keys arrive in frames, output goes to stdout."""

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

from gpu_launch.courier.protocol import DATA, HEADER, RESIZE, STDIN, ClientGone, parse_header

#: While more keys than this are pending, no more are read, bytes.
_MAX_PENDING_KEYS = 256 * 1024
#: Seconds from SIGHUP to SIGKILL for the processes of a closed terminal.
_HANGUP_S = 2.0
#: Milliseconds between checks for the shell's end: background processes may keep its terminal open.
_POLL_MS = 100


def run_terminal(command: str, columns: int, rows: int, sink: BinaryIO, *, source: int = STDIN) -> dict[str, int]:
    """Run a login shell, or `command` in one, in a new terminal; return its exit code, 128 + N for signal N.

    Raises:
        ClientGone: The client has gone; the processes in the terminal were hung up and, if needed, killed.
    """
    child, terminal = pty.fork()
    if child == 0:
        _become_shell(command)
    try:
        os.set_blocking(terminal, False)
        _set_size(terminal, columns, rows)
        return {"exit": _Relay(child, terminal, source, sink).run()}
    except ClientGone:
        _hang_up(child)
        raise
    finally:
        os.close(terminal)


def _become_shell(command: str) -> NoReturn:
    try:
        os.environ.setdefault("TERM", "xterm-256color")
        with contextlib.suppress(OSError):
            os.chdir(os.environ.get("HOME", "/"))
        shells = (os.environ.get("SHELL", ""), "/bin/bash")
        shell = next((path for path in shells if os.access(path, os.X_OK)), "/bin/sh")
        os.execv(shell, [f"-{Path(shell).name}", *(["-c", command] if command else [])])  # noqa: S606
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(127)


def _set_size(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class _Relay:
    """Passes data between a client and a terminal until the shell has ended."""

    def __init__(self, child: int, terminal: int, source: int, sink: BinaryIO) -> None:
        self._child, self._terminal, self._source, self._sink = child, terminal, source, sink
        self._frames, self._keys = b"", b""
        self._poller = select.poll()

    def run(self) -> int:
        """Return the shell's exit code."""
        code = None
        while True:
            is_shown = self._poll_once(_POLL_MS if code is None else 0)
            if code is not None and not is_shown:
                return code
            code = _find_exit_code(self._child) if code is None else code

    def _poll_once(self, wait_ms: int) -> bool:
        """Handle what is ready; return whether the terminal wrote output."""
        # The end of the input is reported even if no keys are read.
        self._poller.register(self._source, select.POLLIN if len(self._keys) < _MAX_PENDING_KEYS else 0)
        self._poller.register(self._terminal, select.POLLIN | (select.POLLOUT if self._keys else 0))
        ready = dict(self._poller.poll(wait_ms))
        if ready.get(self._source, 0) & select.POLLIN:
            self._handle_input(os.read(self._source, 65536))
        elif ready.get(self._source, 0):
            raise ClientGone
        if ready.get(self._terminal, 0) & select.POLLOUT:
            with contextlib.suppress(BlockingIOError):
                self._keys = self._keys[os.write(self._terminal, self._keys) :]
        return bool(ready.get(self._terminal, 0) & select.POLLIN) and self._write_output()

    def _write_output(self) -> bool:
        try:
            data = os.read(self._terminal, 65536)
        except OSError:
            return False  # no process has it open any more
        self._sink.write(data)
        self._sink.flush()
        return bool(data)

    def _handle_input(self, data: bytes) -> None:
        if not data:
            raise ClientGone
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
                _set_size(self._terminal, *json.loads(payload))


def _find_exit_code(child: int) -> int | None:
    """Return the exit code of an ended child as shells report it, None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        return None
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _hang_up(child: int) -> None:
    """End all processes in the shell's session, including background jobs."""
    for number in (signal.SIGHUP, signal.SIGCONT):
        _signal_all(child, number)
    end = time.monotonic() + _HANGUP_S
    while time.monotonic() < end and _list_members(child):
        time.sleep(0.02)
    _signal_all(child, signal.SIGKILL)


def _signal_all(child: int, number: int) -> None:
    for pid in _list_members(child):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _list_members(session: int) -> list[int]:
    """Return the living processes of a session."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if _read_session(pid) == session]


def _read_session(pid: int) -> int | None:
    """Return the session of a living process from `/proc/PID/stat`, such as `7 (a b) S 1 7 7 …`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[3])
