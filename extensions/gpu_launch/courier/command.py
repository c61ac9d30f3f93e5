"""The command `gpu-launch-courier`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from gpu_launch.courier import files, logs
from gpu_launch.courier.frames import BEGIN, END, Gone, Incoming, Refused, read_frame, say

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def build_parser() -> argparse.ArgumentParser:
    """Its words."""
    parser = argparse.ArgumentParser("gpu-launch-courier", description="Used by gpuhub's broker.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve")
    for name in ("put", "get"):
        one = commands.add_parser(name)
        one.add_argument("--limit", type=int, required=True)
        one.add_argument("path")
    one = commands.add_parser("logs")
    one.add_argument("--offset", type=int, default=0)
    one.add_argument("--follow", action="store_true")
    one.add_argument("--rank", type=int)
    one.add_argument("--per-node", type=int, default=1)
    one.add_argument("run")
    commands.add_parser("state").add_argument("run")
    one = commands.add_parser("shell")
    one.add_argument("--columns", type=int, default=80)
    one.add_argument("--rows", type=int, default=24)
    one.add_argument("--run", default="")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Do one thing for the broker, see `frames`."""
    asked = build_parser().parse_args(words)
    if asked.command == "serve":
        return _serve()
    os.umask(0o077)
    incoming = Incoming()
    try:
        # Docker's client loses what comes together with the answer to its request: nothing may, before it speaks.
        if read_frame()[0] == BEGIN:
            say(done=_do(asked, incoming))
    except Gone:
        return 1
    except Refused as error:
        return _refuse(asked, incoming, error.code, str(error))
    except OSError as error:
        return _refuse(asked, incoming, "no-space" if error.errno in _FULL else "failed", _words(error))
    return 0


def _do(asked: argparse.Namespace, incoming: Incoming) -> dict[str, int]:
    home, sink = Path(os.environ["HOME"]), sys.stdout.buffer
    if asked.command == "put":
        say(ready=True)
        return files.put(home, asked.path, asked.limit, incoming)
    if asked.command == "shell":
        from gpu_launch.courier import terminal

        say(ready=True)
        return terminal.run(asked.run, asked.columns, asked.rows, sink)
    is_over = _watch()
    done: dict[str, int] = {}
    if asked.command == "get":
        found = files.find(home, asked.path, asked.limit)
        say(ready=True)
        done = files.get(found, sink)
    elif asked.command == "logs":
        found = logs.run_folder(home, asked.run)
        say(ready=True)
        if not asked.follow:
            is_over.set()
        logs.follow(logs.Logs(found, offset=asked.offset, rank=asked.rank, per_node=asked.per_node), sink, is_over)
    else:
        state = logs.read_state(logs.run_folder(home, asked.run))
        say(ready=True)
        sink.write(state)
    sink.flush()
    return done


def _watch() -> threading.Event:
    """Set when the broker says that no more will come; when the client goes away instead, this process ends."""
    is_over = threading.Event()

    def watch() -> None:
        try:
            while True:
                if read_frame()[0] == END:
                    is_over.set()
        except Gone:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return is_over


def _refuse(asked: argparse.Namespace, incoming: Incoming, code: str, text: str) -> int:
    say(error={"code": code, "text": text})
    if asked.command == "put":
        with contextlib.suppress(Gone):
            incoming.drain()
    return 1


def _serve() -> int:
    """Be there, so that others can be started beside it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()


def _words(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
