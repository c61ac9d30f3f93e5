"""Connects to the debugger of a rank in this container: for the launch agent, and as a program in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch.errors import LaunchFailed
from gpu_launch.worker import rank_debugger, rank_stacks

_CONNECT_S = 15.0  # seconds for a rank to reach Python code, where it can stop
_POLL_S = 0.02
_MAX_ANSWER = 1024 * 1024  # bytes
_ENDED = "has ended"


@dataclass(kw_only=True)
class DebuggerAnswer:
    """What a rank's debugger wrote, and whether it waits for a line or has ended the conversation."""

    text: str = ""
    is_ready: bool = False
    is_over: bool = False


class DebuggerClient:
    """A connection to the debugger of one rank."""

    def __init__(self, path: Path, **hello: Any) -> None:
        """Connect to the rank whose stack dump has this path, with the first message.

        Raises:
            OSError: The rank does not wait for a debugger.
        """
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with rank_debugger.shorten_path(Path(f"{path}{rank_debugger.SOCKET}")) as short:
                self._socket.connect(short)
            self._data = b""
            self._is_over = False
            self._send({"action": "attach"} | hello)
        except OSError:
            self._socket.close()
            raise

    def send_line(self, line: str) -> None:
        """Send a line for the debugger's prompt."""
        with contextlib.suppress(OSError):
            self._send({"line": line})

    def receive(self, wait_s: float) -> DebuggerAnswer:
        """Return what has come within the time; at once when the debugger waits for a line."""
        answer, deadline = DebuggerAnswer(), time.monotonic() + wait_s
        while not (answer.is_ready or answer.is_over):
            line = self._read_line(deadline)
            if line is None:
                break
            answer.text += str(line.get("text", ""))
            answer.is_ready, answer.is_over = bool(line.get("is_ready")), bool(line.get("is_over"))
        self._is_over = answer.is_over = answer.is_over or self._is_over
        return answer

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.settimeout(5.0)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read_line(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message; None if there is none in time, or the rank has gone."""
        while b"\n" not in self._data and not self._is_over:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                return None
            except OSError:
                data = b""
            self._data += data
            self._is_over = not data or len(self._data) > _MAX_ANSWER
        line, separator, self._data = self._data.partition(b"\n")
        if not separator:
            return None
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None


def find_rank(rank: int, run_id: str = "") -> Path | None:
    """Return the path of the stack dump of a living rank in this container; `run_id` is empty for any run."""
    for path in Path(tempfile.gettempdir()).glob(f"{rank_stacks.PREFIX}*/{rank}"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            header = _read_header(path)
            is_same = rank_stacks.read_stat(int(header["pid"]))[1] == header["started"]
            if path.stat().st_uid == os.getuid() and is_same and run_id in ("", header.get("run")):
                return path
    return None


def list_ranks(run_id: str = "") -> list[int]:
    """Return the living ranks in this container."""
    names = {path.name for path in Path(tempfile.gettempdir()).glob(f"{rank_stacks.PREFIX}*/*")}
    return sorted(int(name) for name in names if name.isdecimal() and find_rank(int(name), run_id))


def request_stop(path: Path) -> None:
    """Ask a rank to stop as soon as it runs Python code, unless it waits for a debugger already.

    Raises:
        LaunchFailed: It has ended, or has no debugger.
    """
    if Path(f"{path}{rank_debugger.SOCKET}").exists():
        return
    try:
        header = _read_header(path)
        pid = int(header["pid"])
        state, started = rank_stacks.read_stat(pid)
        if state == "Z" or started != header["started"]:
            raise LaunchFailed(f"Rank {path.name} {_ENDED}.")
        if not rank_stacks.handles_signal(pid, rank_debugger.SIGNAL):
            raise LaunchFailed(f"Rank {path.name} has no debugger: its program replaced the handler of the signal.")
        os.kill(pid, rank_debugger.SIGNAL)
    except (OSError, ValueError, KeyError) as error:
        raise LaunchFailed(f"Rank {path.name} {_ENDED}.") from error


def connect(path: Path, *, limit_s: float = _CONNECT_S, **hello: Any) -> DebuggerClient:
    """Stop a rank and connect to its debugger.

    Raises:
        LaunchFailed: It does not stop in time, or another debugger is connected.
    """
    request_stop(path)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return DebuggerClient(path, **hello)
        except OSError:
            if time.monotonic() > deadline:
                raise LaunchFailed(
                    f"Rank {path.name} has not stopped within {limit_s:.0f} s: another debugger is connected, or it is "
                    "in native code such as a collective. gpu-launch stacks shows where it is."
                ) from None
            time.sleep(_POLL_S)


def run_terminal(rank: int, *, run_id: str = "", port: int = 0) -> int:
    """Debug a rank of this container in this terminal; return the exit code."""
    path = find_rank(rank, run_id)
    if path is None:
        ranks = ", ".join(map(str, list_ranks(run_id))) or "none"
        sys.stderr.write(f"Rank {rank} does not run in this container, or torchrun started it. Ranks here: {ranks}.\n")
        return 1
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines
    hello: dict[str, Any] = {"action": "listen", "port": port} if port else {}
    if not port:
        sys.stdout.write(f"{USAGE}\n")
    try:
        client = connect(path, **hello)
    except LaunchFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    with contextlib.closing(client):
        return _converse(client, path, rank)


#: What a user must know at the prompt.
USAGE = (
    "c continues, n and s step, p and l show values and lines, w where it is; h lists all commands.\n"
    "q lets the rank run and stops at no breakpoint() any more. While it runs, Ctrl-C stops it, twice leaves it."
)


def _converse(client: DebuggerClient, path: Path, rank: int) -> int:
    interrupted_at = float("-inf")
    while True:
        try:
            for answer in _answers(client):
                sys.stdout.write(answer.text)
                sys.stdout.flush()
                if answer.is_over:
                    return 0
                if answer.is_ready:
                    client.send_line(_read_line(f"(rank {rank}) "))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if time.monotonic() - interrupted_at < 1.0:
                return 0
            interrupted_at = time.monotonic()
            with contextlib.suppress(LaunchFailed):
                request_stop(path)


def _answers(client: DebuggerClient) -> Iterator[DebuggerAnswer]:
    while True:
        yield client.receive(1.0)


def _read_line(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError:
        return "q"


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.readline())
    return header
