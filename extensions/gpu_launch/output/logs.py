"""Reads a run's output from its files for `%gpu_logs`."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch.common import run_folder
from gpu_launch.errors import UsageError
from gpu_launch.options import value_types
from gpu_launch.output import history

USAGE = """\
%gpu_logs [RUN] [--rank N] [-f] [-n LINES]

  RUN        a run's id, or the end of it (the latest)
  --rank N   this rank's output only
  -f         follow until the run ends; an interrupt ends only the following
  -n LINES   the last LINES lines of each file (50), 0 for all
"""
_POLL_S = 0.2
_REQUEUED_POLL_S = 3.0
_CHUNK = 256 * 1024
_MAX_LINES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class LogsRequest:
    """Arguments of `%gpu_logs`."""

    run: str = ""
    rank: int | None = None
    follow: bool = False
    lines: int = 50


def parse_arguments(arguments: list[str]) -> LogsRequest:
    """Parse the arguments of `%gpu_logs`.

    Raises:
        UsageError: An argument is not valid.
    """
    request, rest = LogsRequest(), list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        if flag in ("-f", "--follow"):
            request = replace(request, follow=True)
        elif flag in ("--rank", "-n", "--lines"):
            if not has_value:
                if not rest:
                    raise UsageError(f"{flag} needs a value.")
                value = rest.pop(0)
            count = value_types.parse_number(flag, value, least=0, most=_MAX_LINES)
            request = replace(request, rank=count) if flag == "--rank" else replace(request, lines=count)
        elif argument.startswith("-") or request.run:
            raise UsageError(f"{argument} is not understood.\n{USAGE}")
        else:
            request = replace(request, run=argument)
    return request


def show_logs(
    request: LogsRequest,
    *,
    home: Path,
    write: Callable[[str, str], None],
    goes_on: Callable[[str], bool] = lambda _run_id: False,
) -> None:
    """Write (stream, text) of the run's output so far, and with `follow` of its later output.

    Args:
        request: Run, ranks and lines to show.
        home: The user's home.
        write: Receives stream and text.
        goes_on: Returns whether a cancelled run will start again: only the broker knows that it was preempted.

    Raises:
        UsageError: There is no such run or rank.
    """
    run = history.find_run(home, request.run)
    files = _open_files(run, request.rank)
    if not request.follow and not any(file.path.stat().st_size for file in files):
        status = history.read_status(run)
        write("stdout", f"{run.run_id} has no output" + (f" ({status.text or status.state})" if status else "") + "\n")
        return
    for file in files:
        write(file.stream, "".join(file.read_last(request.lines)))
    if request.follow:
        _follow(run, request.rank, files, write, goes_on)
    for file in files:
        write(file.stream, file.read_unfinished())


def _follow(
    run: run_folder.RunFolder,
    rank: int | None,
    files: list[_LogFile],
    write: Callable[[str, str], None],
    goes_on: Callable[[str], bool],
) -> None:
    while True:
        # Checked before reading, so that output written before the end is read after it.
        is_over = history.is_over(run) and not (history.was_cancelled(run) and goes_on(run.run_id))
        known_paths = {file.path for file in files}
        files += [file for file in _open_files(run, rank) if file.path not in known_paths]
        for file in files:
            if text := "".join(file.read_new()):
                write(file.stream, text)
        if is_over:
            return
        # A job that waits again has no output for a long time.
        time.sleep(_REQUEUED_POLL_S if history.was_cancelled(run) else _POLL_S)


def _open_files(run: run_folder.RunFolder, rank: int | None) -> list[_LogFile]:
    """Open a detached job's one output file, or the files of each rank and stream of any other run."""
    if rank is None and run.output.exists():
        return [_LogFile(run.output, "stdout", "")]
    logs = history.find_rank_logs(run)
    if rank is not None and logs and rank not in {log.rank for log in logs}:
        raise UsageError(f"--rank {rank}: {run.run_id} has ranks 0 to {logs[-1].rank}.")
    prefix = "[rank {}] " if rank is None else ""
    return [_LogFile(log.path, log.stream, prefix.format(log.rank)) for log in logs if rank in (None, log.rank)]


class _LogFile:
    """Reads a growing file line by line."""

    def __init__(self, path: Path, stream: str, prefix: str) -> None:
        self.path, self.stream = path, stream
        self._prefix, self._offset, self._rest = prefix, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read_last(self, lines: int) -> list[str]:
        """Return the last lines (0 for all); `read_new` continues after them."""
        size = self.path.stat().st_size
        start = 0 if not lines else _find_last_lines(self.path, size, lines)
        self._offset = start
        return list(self._until(size))

    def read_new(self) -> Iterator[str]:
        """Return the lines written since."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return iter(())
        return self._until(size)

    def read_unfinished(self) -> str:
        """Return the last line if it has no end yet."""
        text, self._rest = self._rest, ""
        return f"{self._prefix}{text}\n" if text else ""

    def _until(self, size: int) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while self._offset < size and (data := file.read(min(_CHUNK, size - self._offset))):
                self._offset += len(data)
                *complete, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
                for line in complete:
                    yield f"{self._prefix}{line}\n"


def _find_last_lines(path: Path, size: int, lines: int) -> int:
    """Return the offset of the last `lines` lines."""
    with path.open("rb") as file:
        end, count = size, 0
        while end > 0:
            begin = max(0, end - _CHUNK)
            file.seek(begin)
            block = file.read(end - begin)
            position = len(block) - (1 if end == size else 0)
            while (position := block.rfind(b"\n", 0, position)) >= 0:
                count += 1
                if count == lines:
                    return begin + position + 1
            end = begin
    return 0
