"""The debugger in a rank: pdb on a Unix socket that this user alone can open, and on request debugpy on loopback.

A rank stops at `breakpoint()`, when a debugger asks for it by a signal, and, with `--debug`, where it failed. It then
waits for a debugger, see `debugger_client`, and continues without one after a while. The other ranks run on, and wait
in their next collective.

The debugger sends JSON lines: first `{"action": "attach"}`, `{"action": "continue"}` or `{"action": "listen", "port":
5678}`, then `{"line": "p loss"}`. The rank sends `{"text": "…", "is_ready": true}`, and `{"is_over": true}` at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import pdb
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from gpu_launch.common.import_hook import call_after_import
from gpu_launch.common.run_folder import write_secret_json
from gpu_launch.worker import rank_stacks
from gpu_launch.worker.rank_stops import SUFFIX, RankStop

#: The rank of `--debug`: it alone stops at `breakpoint()`, and also where it fails.
VARIABLE = "GPU_LAUNCH_DEBUG"
#: How long a rank waits for a debugger, seconds.
WAIT_VARIABLE = "GPU_LAUNCH_DEBUG_WAIT_S"
#: Stops a rank for a debugger that is about to connect.
SIGNAL = int(signal.SIGRTMAX) - 2
SOCKET = ".debug"
WAIT_S = 1800.0
_ATTACH_S = 20.0  # seconds for the debugger that sent the signal to connect
_HELLO_S = 5.0  # seconds for a debugger to send its first line
#: With `--debug`, ranks wait this long in a collective unless the script sets another time.
_COLLECTIVE_TIMEOUT = timedelta(hours=24)
#: Steps do not enter these modules.
_SKIPPED = ("gpu_launch.worker.*", "gpu_launch.sessions.*", "contextlib")
_MAX_LINE = 64 * 1024  # bytes
_MAX_TEXT = 256 * 1024  # characters of one answer


_installed: list[RankDebugger] = []


class RankDebugger:
    """The debugger of this process. Only `install` makes one that is used."""

    def __init__(self, path: str, rank: int, *, chosen: int | None, wait_s: float = WAIT_S) -> None:
        """`path` is that of the rank's stack dump; `chosen` the rank of `--debug`, None without it."""
        self._socket, self._stop = Path(path + SOCKET), Path(path + SUFFIX)
        self._rank, self._chosen, self._wait_s = rank, chosen, wait_s
        self._pid = os.getpid()
        self._connection: _Connection | None = None
        self._pdb: _RankPdb | None = None
        #: The user let the rank run without further stops.
        self._is_released = False
        #: What a cell of a rank session raised last, and whether the rank waits for a cell.
        self.failure: BaseException | None = None
        self.is_idle = False

    def install(self) -> None:
        """Take over `breakpoint()`, `pdb.set_trace()` and `SIGNAL`."""
        sys.breakpointhook = self._handle_breakpoint
        call_after_import("pdb", self._replace_set_trace)
        signal.signal(SIGNAL, self._handle_signal)
        if self._chosen is not None:
            call_after_import("torch.distributed.distributed_c10d", _extend_timeouts)

    def stop_after_failure(self, error: BaseException) -> None:
        """Stop where `error` was raised, if this is the rank of `--debug`."""
        if self._rank == self._chosen and isinstance(error, Exception):
            self._examine(error, wait_s=self._wait_s)

    def _replace_set_trace(self, module: ModuleType) -> None:
        module.set_trace = self._handle_breakpoint  # type: ignore[attr-defined]

    def _handle_breakpoint(self, *arguments: Any, **options: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT"):
            sys.__breakpointhook__(*arguments, **options)
        elif os.getpid() != self._pid:
            # Such as a DataLoader's: the rank's debugger is not theirs.
            sys.stderr.write("gpu_launch: breakpoint() in a process that a rank has forked is ignored\n")
        elif not self._is_released and self._chosen in (None, self._rank):
            self._trace(sys._getframe(1), "breakpoint", wait_s=self._wait_s)

    def _handle_signal(self, _number: int, frame: FrameType | None) -> None:
        if self._connection is not None and self._connection.is_waiting:
            return
        self._is_released = False
        if self.is_idle and self.failure is not None:
            self._examine(self.failure, wait_s=_ATTACH_S, reason="attach")
        elif self.is_idle:
            if connection := self._connect(RankStop(reason="attach", place=""), wait_s=_ATTACH_S):
                self._end(
                    connection,
                    f"Rank {self._rank} runs no cell, and its last cell raised nothing. "
                    "Put breakpoint() into a cell, or ask while one runs.\n",
                )
        elif frame is not None:
            self._trace(frame, "attach", wait_s=_ATTACH_S)

    def _trace(self, frame: FrameType, reason: str, *, wait_s: float) -> None:
        """Stop at the next line of `frame`."""
        if self._connection is not None and self._connection.is_open() and self._pdb is not None:
            self._pdb.set_trace(frame)
            return
        stop = RankStop(reason=reason, place=_describe_frame(frame))
        if connection := self._connect(stop, wait_s=wait_s):
            self._pdb = _RankPdb(connection, self)
            self._pdb.set_trace(frame)

    def _examine(self, error: BaseException, *, wait_s: float, reason: str = "exception") -> None:
        """Show the frames of an exception until the debugger leaves them."""
        trace = error.__traceback__
        last = trace
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        detail = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        place = _describe_frame(last.tb_frame, last.tb_lineno) if last is not None else ""
        connection = self._connection
        if connection is not None and connection.is_open():
            connection.write(f"rank {self._rank} failed at {place}: {detail}\n")
        else:
            connection = self._connect(RankStop(reason=reason, place=place, detail=detail), wait_s=wait_s)
        if connection is None:
            return
        debugger = _RankPdb(connection, self)
        debugger.reset()
        debugger.interaction(None, trace)
        self._end(connection, "")

    def release(self) -> None:
        """Stop at no further `breakpoint()`, until a debugger attaches."""
        self._is_released = True
        if self._connection is not None:
            self._end(self._connection, f"Rank {self._rank} continues, and stops at no breakpoint() any more.\n")

    def forget(self) -> None:
        """Close the connection of a debugger that has gone."""
        if self._connection is not None:
            self._end(self._connection, "")

    def _end(self, connection: _Connection, text: str) -> None:
        connection.send(text=text, is_over=True)
        connection.close()
        self._connection = self._pdb = None

    def _connect(self, stop: RankStop, *, wait_s: float) -> _Connection | None:
        """Wait for a debugger; None if none came, or it wants nothing more of this stop."""
        with _listen(self._socket) as listener:
            listener.settimeout(wait_s)
            write_secret_json(self._stop, asdict(stop))
            try:
                connection = _Connection(listener.accept()[0])
            except TimeoutError:
                if stop.reason != "attach":
                    sys.stderr.write(f"gpu_launch: no debugger came within {wait_s:.0f} s, the rank continues\n")
                return None
            finally:
                self._stop.unlink(missing_ok=True)
        hello = connection.receive(limit_s=_HELLO_S)
        action = hello.get("action")
        if action == "attach":
            self._connection = connection
            return connection
        text = listen_for_editor(hello.get("port"), rank=self._rank) if action == "listen" else ""
        connection.send(text=text, is_over=True)
        connection.close()
        return None


class _Connection:
    """The connection to a debugger, as the file that pdb reads and writes."""

    encoding = "utf-8"

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._text = connection, ""
        self._reader = connection.makefile("rb")
        self._is_closed = False
        #: It waits for a line of the user.
        self.is_waiting = False

    def is_open(self) -> bool:
        """Return whether the debugger is still there."""
        if self._is_closed:
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def write(self, text: str) -> None:
        if len(self._text) < _MAX_TEXT:
            self._text += text[:_MAX_TEXT]

    def flush(self) -> None:
        """Do nothing: text is sent when the debugger is asked for a line."""

    def readline(self) -> str:
        """Ask for a line; return an empty one if the debugger has gone."""
        text, self._text = self._text, ""
        self.is_waiting = True
        try:
            self.send(text=text, is_ready=True)
            line = self.receive().get("line")
        finally:
            self.is_waiting = False
        return f"{line.rstrip()}\n" if isinstance(line, str) else ""

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, *, limit_s: float | None = None) -> dict[str, Any]:
        """Return the next message; an empty one if there is none."""
        try:
            self._socket.settimeout(limit_s)
            message = json.loads(self._reader.readline(_MAX_LINE))
        except (OSError, ValueError):
            return {}
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._reader.close()
        self._socket.close()


class _RankPdb(pdb.Pdb):
    """pdb whose commands cannot end the rank by accident."""

    def __init__(self, connection: _Connection, debugger: RankDebugger) -> None:
        super().__init__(stdin=connection, stdout=connection, nosigint=True, readrc=False, skip=_SKIPPED)  # type: ignore[arg-type]
        self.prompt = ""
        self._debugger = debugger

    def canonic(self, filename: str) -> str:
        # The lines of a cell are found by its label alone.
        return filename if filename.startswith("Cell In[") else str(super().canonic(filename))

    def _cmdloop(self) -> None:
        # pdb's own catches KeyboardInterrupt: an interrupt of the launch must reach the script.
        self.cmdloop()

    def do_quit(self, arg: str) -> bool | None:
        """Let the rank run, without further stops at breakpoint()."""
        del arg
        self.clear_all_breaks()
        self.set_continue()
        self._debugger.release()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, _argument: str) -> bool:  # noqa: N802 - cmd's name
        """Let the rank run: the debugger has gone."""
        self.clear_all_breaks()
        self.set_continue()
        self._debugger.forget()
        return True

    def do_run(self, arg: str) -> bool | None:
        """Refuse: a launch starts its ranks."""
        del arg
        self.error("a rank cannot be started again from here; run the launch again")
        return None

    do_restart = do_run

    def do_interact(self, _argument: str) -> None:
        """Refuse: there is no terminal."""
        self.error("there is no terminal here; type statements at this prompt")


def install(environ: Mapping[str, str]) -> RankDebugger | None:
    """Let this rank be debugged; return its debugger, None outside a launch."""
    pattern = environ.get(rank_stacks.VARIABLE)
    if not pattern:
        return None
    rank, chosen = environ.get("RANK", "0"), environ.get(VARIABLE, "")
    wait = environ.get(WAIT_VARIABLE, "")
    debugger = RankDebugger(
        pattern.replace("{rank}", rank),
        int(rank),
        chosen=int(chosen) if chosen.isdecimal() else None,
        wait_s=float(wait) if wait.isdecimal() else WAIT_S,
    )
    debugger.install()
    _installed.append(debugger)
    return debugger


def find_installed() -> RankDebugger | None:
    """Return the debugger of this process; None outside a launch."""
    return _installed[-1] if _installed else None


def listen_for_editor(port: Any, *, rank: int) -> str:
    """Start debugpy's server on this container's loopback; return a text for the user."""
    if not isinstance(port, int) or not 1024 <= port <= 65535:
        return f"{port} is not a port from 1024 to 65535.\n"
    if not Path("/.dockerenv").exists():
        return f"Rank {rank} runs outside a container, where other users could reach the port. Use the prompt.\n"
    try:
        import debugpy
    except ImportError:
        return "This environment has no debugpy: pip install debugpy.\n"
    try:
        debugpy.listen(("127.0.0.1", port))
    except (RuntimeError, OSError) as error:
        return f"debugpy cannot listen on port {port}: {error}\n"
    return f"debugpy listens on 127.0.0.1:{port} of rank {rank}'s container.\n"


@contextlib.contextmanager
def shorten_path(path: Path) -> Iterator[str]:
    """Return another path of a file, for a socket, whose path may have only 107 characters."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@contextlib.contextmanager
def _listen(path: Path) -> Iterator[socket.socket]:
    """Listen in the folder of the dump, which only this user can enter."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            with shorten_path(path) as short:
                listener.bind(short)
            path.chmod(0o600)
            listener.listen(1)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _describe_frame(frame: FrameType, line: int | None = None) -> str:
    code, number = frame.f_code, line or frame.f_lineno
    where = f"{Path(code.co_filename).name}:{number}"
    return where if code.co_name == "<module>" else f"{where} in {code.co_name}"


def _extend_timeouts(module: ModuleType) -> None:
    """Let the other ranks wait for the debugged one: a script that sets no timeout gets a long one."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if getattr(module, name, None) is not None:
            setattr(module, name, _COLLECTIVE_TIMEOUT)
