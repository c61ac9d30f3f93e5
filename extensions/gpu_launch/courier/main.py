"""The command `gpu-launch-courier`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from gpu_launch.courier import files
from gpu_launch.courier.protocol import BEGIN, END, ClientGone, CourierError, IncomingData, read_frame, write_report

#: Memory in which an archive is unpacked, bytes: the names in its headers may be of any length.
_UNPACK_MEMORY = 512 * 1024**2
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser("gpu-launch-courier", description="Used by gpuhub's broker.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve")
    for name in ("put", "get"):
        subparser = commands.add_parser(name)
        subparser.add_argument("--limit", type=int, required=True)
        subparser.add_argument("path")
    subparser = commands.add_parser("logs")
    subparser.add_argument("--offset", type=int, default=0)
    subparser.add_argument("--tail", type=int)
    subparser.add_argument("--follow", action="store_true")
    subparser.add_argument("--rank", type=int)
    subparser.add_argument("--per-node", type=int, default=1)
    subparser.add_argument("run")
    commands.add_parser("state").add_argument("run")
    subparser = commands.add_parser("notebook")
    subparser.add_argument("--only-check", action="store_true")
    subparser.add_argument("path")
    subparser = commands.add_parser("shell")
    subparser.add_argument("--columns", type=int, default=80)
    subparser.add_argument("--rows", type=int, default=24)
    subparser.add_argument("--run", default="")
    commands.add_parser("job-folder").add_argument("run")
    subparser = commands.add_parser("pack-job")
    subparser.add_argument("--limit", type=int, required=True)
    subparser.add_argument("run")
    subparser = commands.add_parser("put-results")
    subparser.add_argument("--limit", type=int, required=True)
    subparser.add_argument("--part", choices=["run", "folder"], required=True)
    subparser.add_argument("run")
    commands.add_parser("port").add_argument("--port", type=int, required=True)
    commands.add_parser("ssh").add_argument("--key", required=True)
    return parser


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command for the broker, see `protocol`."""
    arguments = build_parser().parse_args(command_line)
    if arguments.command == "serve":
        return _serve()
    os.umask(0o077)
    if arguments.command in {"put", "put-results"}:
        resource.setrlimit(resource.RLIMIT_DATA, (_UNPACK_MEMORY, _UNPACK_MEMORY))
    incoming = IncomingData()
    try:
        # Docker's client loses output that arrives together with the answer to its request, so the courier waits for
        # the client's first frame.
        if read_frame()[0] == BEGIN:
            write_report(done=_run_command(arguments, incoming))
    except ClientGone:
        return 1
    except CourierError as error:
        return _report_error(arguments, incoming, error.code, str(error))
    except MemoryError:
        return _report_error(arguments, incoming, "invalid", "the archive takes too much memory: a header is too long")
    except OSError as error:
        return _report_error(
            arguments, incoming, "no-space" if error.errno in _FULL_ERRORS else "failed", _format_os_error(error)
        )
    return 0


def _run_command(arguments: argparse.Namespace, incoming: IncomingData) -> dict[str, int]:
    home, sink = Path(os.environ["HOME"]), sys.stdout.buffer
    if arguments.command == "put":
        write_report(ready=True)
        return files.unpack_into(home, arguments.path, arguments.limit, incoming)
    if arguments.command in {"put-results", "pack-job", "job-folder"}:
        return _run_guest_command(arguments, home, incoming)
    if arguments.command in {"shell", "ssh", "port"}:
        return _connect(arguments, sink)
    if arguments.command == "notebook":
        return _show_notebook(arguments, home)
    is_over = _watch_client()
    done: dict[str, int] = {}
    if arguments.command == "get":
        target = files.find_file(home, arguments.path, arguments.limit)
        write_report(ready=True)
        done = files.write_tar(target, sink)
    elif arguments.command == "logs":
        target = files.resolve_run_folder(home, arguments.run)
        write_report(ready=True)
        if not arguments.follow:
            is_over.set()
        files.follow_logs(
            files.RunLogs(
                target,
                offset=arguments.offset,
                rank=arguments.rank,
                per_node=arguments.per_node,
                tail=arguments.tail,
            ),
            sink,
            is_over,
        )
    else:
        state = files.read_state(files.resolve_run_folder(home, arguments.run))
        write_report(ready=True)
        sink.write(state)
    sink.flush()
    return done


def _connect(arguments: argparse.Namespace, sink: BinaryIO) -> dict[str, int]:
    """Connect the client to a terminal, the SSH server or a port."""
    if arguments.command == "shell":
        from gpu_launch.courier import terminal

        write_report(ready=True)
        return terminal.run_terminal(arguments.run, arguments.columns, arguments.rows, sink)
    if arguments.command == "ssh":
        from gpu_launch.courier import ssh

        return ssh.run_ssh(arguments.key, sink)
    from gpu_launch.courier import port

    return port.run_port(arguments.port, sink)


def _show_notebook(arguments: argparse.Namespace, home: Path) -> dict[str, int]:
    """Report when a notebook was saved, and render it unless that is all."""
    from gpu_launch.courier import notebook_view

    _watch_client()
    with notebook_view.open_notebook(home, arguments.path) as file:
        done = notebook_view.describe(file)
        page = b"" if arguments.only_check else notebook_view.render(file, arguments.path)
    write_report(ready=True)
    sys.stdout.buffer.write(page)
    sys.stdout.buffer.flush()
    return done


def _run_guest_command(arguments: argparse.Namespace, home: Path, incoming: IncomingData) -> dict[str, int]:
    """Send a job's files to a guest, or take what it wrote there."""
    from gpu_launch.courier import guest_jobs

    sink = sys.stdout.buffer
    manifest = guest_jobs.read_manifest(home, arguments.run)
    write_report(ready=True)
    if arguments.command == "put-results":
        return guest_jobs.put_results(home, arguments.run, arguments.part, arguments.limit, incoming)
    _watch_client()
    done: dict[str, int] = {}
    if arguments.command == "pack-job":
        done = guest_jobs.pack_job(home, arguments.run, arguments.limit, sink)
    else:
        sink.write(manifest.folder.encode())
    sink.flush()
    return done


def _watch_client() -> threading.Event:
    """Return an event that the broker's end frame sets; end this process if the client goes away."""
    is_over = threading.Event()

    def watch() -> None:
        try:
            while True:
                if read_frame()[0] == END:
                    is_over.set()
        except ClientGone:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return is_over


def _report_error(arguments: argparse.Namespace, incoming: IncomingData, code: str, text: str) -> int:
    write_report(error={"code": code, "text": text})
    if arguments.command in {"put", "put-results"}:
        with contextlib.suppress(ClientGone):
            incoming.drain()
    return 1


def _serve() -> int:
    """Keep the container running, so that other commands can be started in it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()


def _format_os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
