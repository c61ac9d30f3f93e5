"""Past and current runs: their folders, states and log files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpu_launch.common import job_manifest, run_folder
from gpu_launch.errors import UsageError

#: States in which a reader stops waiting for output. A preempted job is "cancelled" too, and may start again.
_END_STATES = job_manifest.FINAL_STATES | {"cancelled"}
_STAMP = re.compile(r"run-(\d{8}-\d{6})-\w+")
_NODE = re.compile(r"node(\d+)(?:-restart(\d+))?")


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
