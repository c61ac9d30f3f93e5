"""The command `shell`: a remote terminal, shown in the local one in raw mode, or key by key on Windows."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from gpu_launch.broker import models
from gpu_launch.cli.connection.credentials import Hub
from gpu_launch.cli.connection.http import describe_error
from gpu_launch.cli.connection.websockets import build_job_url, open_websocket, start_pings
from gpu_launch.cli.context import Context, exit_with, pass_context
from gpu_launch.cli.follow import convert_exit_code
from gpu_launch.cli.job_lookup import complete_run
from gpu_launch.cli.jobs import find_job
from gpu_launch.errors import BrokerError, UsageError

#: Seconds between checks for a new window size and for the other side's end.
_TICK_S = 0.1
#: Key codes of Windows for keys without a character, and the sequences that terminals send for them.
_WINDOWS_KEYS = {
    "H": "\x1b[A", "P": "\x1b[B", "M": "\x1b[C", "K": "\x1b[D", "G": "\x1b[H", "O": "\x1b[F",
    "I": "\x1b[5~", "Q": "\x1b[6~", "R": "\x1b[2~", "S": "\x1b[3~",
}  # fmt: skip


def _get_size() -> tuple[int, int]:
    """Return columns and rows."""
    terminal_size = shutil.get_terminal_size((80, 24))
    return max(1, terminal_size.columns), max(1, terminal_size.lines)


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Switch to raw mode: keys arrive at once and are not echoed. The old mode is always restored."""
    if os.name == "nt" or not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Keep what was typed before: it is input for the other side.
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read_keys(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    """Send typed keys, or the content of stdin, until it ends or `is_over` is set."""
    if os.name == "nt" and sys.stdin.isatty():
        _read_windows(send, on_tick, is_over)
    elif os.name == "nt":
        _read_all(send, on_tick, is_over)
    else:
        _read_posix(send, on_tick, is_over)


def _read_posix(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    import select

    descriptor, last = sys.stdin.fileno(), b"\n"
    while not is_over.is_set():
        ready, _, _ = select.select([descriptor], [], [], _TICK_S)
        on_tick()
        if not ready:
            continue
        if not (data := os.read(descriptor, 65536)):
            _send_end(send, is_over, is_at_line_start=last.endswith(b"\n"))
            return
        send(data)
        last = data


def _read_all(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    """Read a pipe on Windows, where select does not support pipes."""
    last = b"\n"
    while not is_over.is_set() and (data := os.read(sys.stdin.fileno(), 65536)):
        on_tick()
        send(data)
        last = data
    _send_end(send, is_over, is_at_line_start=last.endswith(b"\n"))


def _send_end(send: Callable[[bytes], None], is_over: threading.Event, *, is_at_line_start: bool) -> None:
    """Send the end of piped input as a terminal does, then wait for the command's end."""
    # Within a line the first Ctrl-D only submits the line's beginning.
    send(b"\x04" if is_at_line_start else b"\x04\x04")
    is_over.wait()


def _read_windows(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    import msvcrt

    while not is_over.is_set():
        on_tick()
        if not msvcrt.kbhit():  # type: ignore[attr-defined]
            is_over.wait(0.02)
            continue
        key: str = msvcrt.getwch()  # type: ignore[attr-defined]
        if key in ("\x00", "\xe0"):
            key = _WINDOWS_KEYS.get(msvcrt.getwch(), "")  # type: ignore[attr-defined]
        send(key.encode())


def build_url(hub: Hub, job_id: str, *, worker: int, columns: int, rows: int, command: str) -> str:
    """Return the URL of the shell; an empty `command` starts a login shell."""
    query = {"worker": worker, "cols": columns, "rows": rows} | ({"command": command} if command else {})
    return build_job_url(hub, job_id, "shell", query)


@dataclass
class TerminalSession:
    """One remote terminal."""

    socket: Any
    exit_code: int | None = None
    #: Reason for an end without an exit status, empty if unknown.
    problem: str = ""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _size: tuple[int, int] = field(default_factory=_get_size)

    def run(self) -> int:
        """Show the terminal until it ends; return its exit status.

        Raises:
            BrokerError: The connection broke.
        """
        with _raw_mode():
            threading.Thread(target=self._receive, daemon=True).start()
            start_pings(self.socket, self._is_over)
            try:
                _read_keys(self._send, self._check_size, self._is_over)
                self._is_over.wait()
            finally:
                self._is_over.set()
                self.socket.shutdown()
        if self.exit_code is None:
            raise BrokerError(f"The terminal connection broke{f': {self.problem}' if self.problem else ''}.")
        return self.exit_code

    def _send(self, data: bytes) -> None:
        import websocket

        try:
            self.socket.send_binary(data)
        except (websocket.WebSocketException, OSError) as error:
            self.problem = self.problem or describe_error(error)
            self._is_over.set()

    def _check_size(self) -> None:
        size = _get_size()
        if size != self._size:
            self._size = size
            self._send_json({"resize": list(size)})

    def _send_json(self, value: dict[str, Any]) -> None:
        import websocket

        try:
            self.socket.send(json.dumps(value))
        except (websocket.WebSocketException, OSError):
            self._is_over.set()

    def _receive(self) -> None:
        import websocket

        try:
            while True:
                kind, data = self.socket.recv_data()
                if kind == websocket.ABNF.OPCODE_BINARY:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                elif kind == websocket.ABNF.OPCODE_TEXT:
                    self._handle_text(data)
                elif kind == websocket.ABNF.OPCODE_CLOSE:
                    self.problem = data[2:].decode("utf-8", "replace")
                    return
        except (websocket.WebSocketException, OSError) as error:
            self.problem = self.problem or describe_error(error)
        finally:
            self._is_over.set()

    def _handle_text(self, data: bytes) -> None:
        try:
            message = json.loads(data)
        except ValueError:
            return
        if isinstance(message, dict) and message.get("error"):
            self.problem = str(message["error"])
        elif isinstance(message, dict) and isinstance(message.get("exit"), int):
            self.exit_code = message["exit"]


def open_shell(hub: Hub, job_id: str, *, worker: int, command: str) -> TerminalSession:
    """Open a terminal in a worker.

    Raises:
        BrokerError: The terminal cannot be opened.
    """
    columns, rows = _get_size()
    url = build_url(hub, job_id, worker=worker, columns=columns, rows=rows, command=command)
    return TerminalSession(socket=open_websocket(hub, url))


@click.command(short_help="Open a terminal in a running job.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option(
    "--worker", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="The worker to use."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]...")
@pass_context
def shell(context: Context, run: str, worker: int, command: tuple[str, ...]) -> None:
    """Open a terminal in a running job, or run COMMAND there; the exit status is its own."""
    job = find_job(context, run)
    if job.state not in (models.RUNNING, models.PREEMPTING):
        raise UsageError(f"{job.run_id} is not running: its state is {job.state}.")
    if worker not in {member.index for member in job.workers}:
        workers = ", ".join(f"{member.index} ({member.node})" for member in job.workers)
        raise UsageError(f"--worker {worker}: {job.run_id} has the workers {workers}.")

    session = open_shell(context.hub, job.id, worker=worker, command=shlex.join(command))
    code = session.run()
    if code:
        exit_with(convert_exit_code(code))


COMMANDS: tuple[click.Command, ...] = (shell,)
