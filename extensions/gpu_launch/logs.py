"""`%gpu_logs`: a run's output from its files, to the end or as it grows."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch import history, options, runs
from gpu_launch.errors import UsageError

USAGE = """\
%gpu_logs [RUN] [--rank N] [-f] [-n LINES]

  RUN        a run's id, or the end of it (the latest)
  --rank N   this rank's output only
  -f         go on until the run ends; interrupt to stop looking, the run goes on
  -n LINES   so many lines of each file (50), 0 for all
"""
_POLL_S = 0.2
_WAITING_S = 3.0
_CHUNK = 256 * 1024
_MOST_LINES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be shown."""

    run: str = ""
    rank: int | None = None
    follow: bool = False
    lines: int = 50


def parse(words: list[str]) -> Wanted:
    """Raises UsageError."""
    wanted, rest = Wanted(), list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in ("-f", "--follow"):
            wanted = replace(wanted, follow=True)
        elif flag in ("--rank", "-n", "--lines"):
            if not has_value:
                if not rest:
                    raise UsageError(f"{flag} needs a value.")
                value = rest.pop(0)
            count = options.number(flag, value, least=0, most=_MOST_LINES)
            wanted = replace(wanted, rank=count) if flag == "--rank" else replace(wanted, lines=count)
        elif word.startswith("-") or wanted.run:
            raise UsageError(f"{word} is not understood.\n{USAGE}")
        else:
            wanted = replace(wanted, run=word)
    return wanted


def show(
    wanted: Wanted,
    *,
    home: Path,
    write: Callable[[str, str], None],
    goes_on: Callable[[str], bool] = lambda _run_id: False,
) -> None:
    """Write (stream, text) of what is there, and with `follow` of what comes. Raises UsageError.

    `goes_on` tells whether a run that was told to end begins again: only the broker knows that it was preempted.
    """
    run = history.find(home, wanted.run)
    files = _files(run, wanted.rank)
    if not wanted.follow and not any(file.path.stat().st_size for file in files):
        told = history.state(run)
        write("stdout", f"{run.run_id} has no output" + (f" ({told.text or told.state})" if told else "") + "\n")
        return
    for file in files:
        write(file.stream, "".join(file.last(wanted.lines)))
    if wanted.follow:
        _follow(run, wanted.rank, files, write, goes_on)
    for file in files:
        write(file.stream, file.rest())


def _follow(
    run: runs.RunFolder,
    rank: int | None,
    files: list[_File],
    write: Callable[[str, str], None],
    goes_on: Callable[[str], bool],
) -> None:
    while True:
        # Asked first: what was written before the end is read once more after it.
        is_over = history.is_over(run) and not (history.was_told(run) and goes_on(run.run_id))
        known = {file.path for file in files}
        files += [file for file in _files(run, rank) if file.path not in known]
        for file in files:
            if text := "".join(file.more()):
                write(file.stream, text)
        if is_over:
            return
        # A job that waits again has nothing to say for long.
        time.sleep(_WAITING_S if history.was_told(run) else _POLL_S)


def _files(run: runs.RunFolder, rank: int | None) -> list[_File]:
    """A detached job's whole output is one file; any other run's has one for each rank and stream."""
    if rank is None and run.output.exists():
        return [_File(run.output, "stdout", "")]
    logs = history.rank_logs(run)
    if rank is not None and logs and rank not in {log.rank for log in logs}:
        raise UsageError(f"--rank {rank}: {run.run_id} has ranks 0 to {logs[-1].rank}.")
    prefix = "[rank {}] " if rank is None else ""
    return [_File(log.path, log.stream, prefix.format(log.rank)) for log in logs if rank in (None, log.rank)]


class _File:
    """A growing file, line by line."""

    def __init__(self, path: Path, stream: str, prefix: str) -> None:
        self.path, self.stream = path, stream
        self._prefix, self._offset, self._rest = prefix, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def last(self, lines: int) -> list[str]:
        """The last lines there are (0 for all); what comes later follows on them."""
        size = self.path.stat().st_size
        start = 0 if not lines else _start_of_last(self.path, size, lines)
        self._offset = start
        return list(self._until(size))

    def more(self) -> Iterator[str]:
        """Lines that have come since."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return iter(())
        return self._until(size)

    def rest(self) -> str:
        """A last line that has no end yet."""
        text, self._rest = self._rest, ""
        return f"{self._prefix}{text}\n" if text else ""

    def _until(self, size: int) -> Iterator[str]:
        with self.path.open("rb") as opened:
            opened.seek(self._offset)
            while self._offset < size and (data := opened.read(min(_CHUNK, size - self._offset))):
                self._offset += len(data)
                *whole, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
                for line in whole:
                    yield f"{self._prefix}{line}\n"


def _start_of_last(path: Path, size: int, lines: int) -> int:
    """Where the last `lines` lines begin."""
    with path.open("rb") as opened:
        end, found = size, 0
        while end > 0:
            begin = max(0, end - _CHUNK)
            opened.seek(begin)
            block = opened.read(end - begin)
            at = len(block) - (1 if end == size else 0)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                found += 1
                if found == lines:
                    return begin + at + 1
            end = begin
    return 0
