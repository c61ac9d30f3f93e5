"""Past and current runs: their folders, states and log files, and their output for `%gpu_logs`."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from gpu_launch.common import job_manifest, run_folder
from gpu_launch.errors import UsageError
from gpu_launch.options import value_types

#: States in which a reader stops waiting for output. A preempted job is "cancelled" too, and may start again.
_END_STATES = job_manifest.FINAL_STATES | {"cancelled", job_manifest.ASLEEP}
_STAMP = re.compile(r"run-(\d{8}-\d{6})-\w+")
_NODE = re.compile(r"node(\d+)(?:-restart(\d+))?")
USAGE = """\
%gpu_logs [RUN] [--rank N] [-f] [-n LINES]

  RUN        a run's id, or the end of it (the latest)
  --rank N   this rank's output only
  -f         follow until the run ends; an interrupt ends only the following
  -n LINES   the last LINES lines of each file (50), 0 for all
"""
#: Interval between two reads of a followed run, seconds.
_POLL_S = 0.2
#: Interval between two reads of a run that waits to start again, seconds.
_REQUEUED_POLL_S = 3.0
_CHUNK = 256 * 1024
_MAX_LINES = 10_000_000
#: Log files of which `read_tail` reads the end.
_TAIL_FILES = 32


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """The log file of one stream of one rank."""

    rank: int
    #: `stdout` or `stderr`.
    stream: str
    path: Path


def list_runs(home: Path, *, most: int) -> list[run_folder.RunFolder]:
    """Return launches and detached jobs, the latest first, without folders that only workers used."""
    jobs = run_folder.jobs_folder(home)
    try:
        folders = [run_folder.open_run(home, entry.name) for entry in jobs.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    runs = (run for run in sorted(folders, key=_sort_key, reverse=True) if is_launch(run))
    return [run for run, _ in zip(runs, range(most), strict=False)]


def _sort_key(run: run_folder.RunFolder) -> tuple[str, int]:
    """Sort by the second in the name, then by the time of the log folder."""
    try:
        changed = run.logs.stat().st_mtime_ns
    except OSError:
        changed = 0
    stamp = _STAMP.fullmatch(run.run_id)
    return (stamp[1] if stamp else "", changed)


def is_launch(run: run_folder.RunFolder) -> bool:
    """Return whether ranks ran in this run, or will."""
    return any(path.exists() for path in (run.manifest, run.status, run.cell)) or any(run.logs.glob("node*"))


def find_run(home: Path, text: str) -> run_folder.RunFolder:
    """Return the run with this id, or with a unique beginning or end of it; the latest for an empty text.

    Raises:
        UsageError: No run matches, or several do.
    """
    runs = list_runs(home, most=1000)
    if not text:
        if not runs:
            raise UsageError("There is no run yet: %gpu_launch makes the first one.")
        return runs[0]
    exact = [run for run in runs if run.run_id == text]
    matches = exact or [run for run in runs if run.run_id.endswith(text) or run.run_id.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(run.run_id for run in (matches or runs)[:5])
    if matches:
        raise UsageError(f"{text} matches several runs: {names}.")
    raise UsageError(f"There is no run {text}. " + (f"The latest are {names}." if names else "There is none at all."))


def find_active_run(home: Path, text: str) -> run_folder.RunFolder:
    """Return the run with this id, or with a unique beginning or end of it; the latest active one for an empty text.

    Raises:
        UsageError: No run matches, several do, or it has ended.
    """
    if not text:
        active = (run for run in list_runs(home, most=1000) if not is_over(run))
        run = next(active, None)
        if run is None:
            raise UsageError("None of your runs is active. %gpu_status shows the last ones.")
        return run
    run = find_run(home, text)
    if is_over(run):
        raise UsageError(f"{run.run_id} has ended. %gpu_logs {run.run_id} shows its output.")
    return run


def parse_start_time(run: run_folder.RunFolder) -> datetime | None:
    """Return the time of the request in this container's time zone."""
    match = _STAMP.fullmatch(run.run_id)
    return datetime.strptime(match[1], "%Y%m%d-%H%M%S") if match else None  # noqa: DTZ007 - shown as it is


def read_status(run: run_folder.RunFolder) -> job_manifest.JobStatus | None:
    """Return the status that the run has written, None if it has written none."""
    try:
        return job_manifest.parse_status(run.status.read_text())
    except (OSError, UsageError):
        return None


def is_over(run: run_folder.RunFolder) -> bool:
    """Return whether the run's folder shows that it has ended."""
    status = read_status(run)
    return status.state in _END_STATES if status is not None else not (run.heartbeat.exists() or run.manifest.exists())


def was_cancelled(run: run_folder.RunFolder) -> bool:
    """Return whether the run was ended from outside: cancelled, or preempted."""
    status = read_status(run)
    return status is not None and status.state == "cancelled"


def find_rank_logs(run: run_folder.RunFolder) -> list[RankLog]:
    """Return the log files of every rank's latest start, by rank."""
    nodes = [(match, path) for path in run.logs.glob("node*") if (match := _NODE.fullmatch(path.name))]
    last = max((int(match[2] or 0) for match, _ in nodes), default=0)
    by_rank = {int(match[1]): path for match, path in nodes if int(match[2] or 0) == last}
    logs: list[RankLog] = []
    first = 0
    for _, path in sorted(by_rank.items()):
        streams = list(_iter_streams(path))
        logs += [RankLog(rank=first + local, stream=stream, path=log) for local, stream, log in streams]
        first += len({local for local, _, _ in streams})
    return sorted(logs, key=lambda log: (log.rank, log.stream != "stdout"))


def _iter_streams(node: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield local rank, stream and path in the latest `<node>/<rdzv id>_<random>/attempt_0/<local rank>/`."""
    attempts = sorted(node.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime_ns)
    for path in attempts[-1].glob("*/*.log") if attempts else ():
        if path.parent.name.isdecimal() and path.stem in ("stdout", "stderr"):
            yield int(path.parent.name), path.stem, path


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
    will_restart: Callable[[str], bool] = lambda _run_id: False,
) -> None:
    """Write (stream, text) of the run's output so far, and with `follow` of its later output.

    Args:
        request: Run, ranks and lines to show.
        home: The user's home.
        write: Receives stream and text.
        will_restart: Returns whether a cancelled run will start again: only the broker knows that it was preempted.

    Raises:
        UsageError: There is no such run or rank.
    """
    run = find_run(home, request.run)
    files = _open_files(run, request.rank)
    if not request.follow and not any(file.path.stat().st_size for file in files):
        status = read_status(run)
        write("stdout", f"{run.run_id} has no output" + (f" ({status.text or status.state})" if status else "") + "\n")
        return
    for file in files:
        write(file.stream, "".join(file.read_last(request.lines)))
    if request.follow:
        _follow(run, request.rank, files, write, will_restart)
    for file in files:
        write(file.stream, file.read_unfinished())


def read_tail(run: run_folder.RunFolder, *, most_bytes: int) -> str:
    """Return the end of the run's output, at most `most_bytes` of all ranks together; empty if there is none."""
    files = _open_files(run, None)[:_TAIL_FILES]
    return "".join(file.read_end(most_bytes // len(files)) for file in files)


def _follow(
    run: run_folder.RunFolder,
    rank: int | None,
    files: list[_LogFile],
    write: Callable[[str, str], None],
    will_restart: Callable[[str], bool],
) -> None:
    while True:
        # Checked before reading, so that output written before the end is read after it.
        has_ended = is_over(run) and not (was_cancelled(run) and will_restart(run.run_id))
        known_paths = {file.path for file in files}
        files += [file for file in _open_files(run, rank) if file.path not in known_paths]
        for file in files:
            if text := "".join(file.read_new()):
                write(file.stream, text)
        if has_ended:
            return
        # A job that waits again has no output for a long time.
        time.sleep(_REQUEUED_POLL_S if was_cancelled(run) else _POLL_S)


def _open_files(run: run_folder.RunFolder, rank: int | None) -> list[_LogFile]:
    """Open a detached job's one output file, or the files of each rank and stream of any other run."""
    if rank is None and run.output.exists():
        return [_LogFile(run.output, "stdout", "")]
    logs = find_rank_logs(run)
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

    def read_end(self, most_bytes: int) -> str:
        """Return the last bytes, from the begin of a line if one begins in them."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - most_bytes))
            text = file.read(most_bytes).decode("utf-8", "replace")
        if size > most_bytes and "\n" in text:
            text = text.partition("\n")[2]
        return "".join(f"{self._prefix}{line}\n" for line in text.splitlines())

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
