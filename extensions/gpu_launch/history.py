"""Runs that left a folder: which there are, how they ended, and where their output is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpu_launch import order, runs
from gpu_launch.errors import UsageError

#: States after which one does not wait for more. A job that was preempted says "cancelled" too, and may begin again.
_OVER = order.FINAL | {"cancelled"}
_STAMP = re.compile(r"run-(\d{8}-\d{6})-\w+")
_NODE = re.compile(r"node(\d+)(?:-restart(\d+))?")


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """One stream of one rank."""

    rank: int
    #: `stdout` or `stderr`.
    stream: str
    path: Path


def latest(home: Path, *, most: int) -> list[runs.RunFolder]:
    """Launches and detached jobs, the last one first; folders of workers alone are none."""
    jobs = runs.jobs_folder(home)
    try:
        folders = [runs.folder(home, entry.name) for entry in jobs.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    found = (run for run in sorted(folders, key=_age, reverse=True) if is_launch(run))
    return [run for run, _ in zip(found, range(most), strict=False)]


def _age(run: runs.RunFolder) -> tuple[str, int]:
    """Names tell the second; of two in one second the files' times do."""
    try:
        changed = run.logs.stat().st_mtime_ns
    except OSError:
        changed = 0
    stamp = _STAMP.fullmatch(run.run_id)
    return (stamp[1] if stamp else "", changed)


def is_launch(run: runs.RunFolder) -> bool:
    """Whether ranks ran there, or will."""
    return any(path.exists() for path in (run.order, run.state, run.cell)) or any(run.logs.glob("node*"))


def find(home: Path, text: str) -> runs.RunFolder:
    """The run that `text` names, whole or by an end or beginning that no other has; the latest for no text.

    Raises UsageError.
    """
    known = latest(home, most=1000)
    if not text:
        if not known:
            raise UsageError("There is no run yet: %gpu_launch makes the first one.")
        return known[0]
    exact = [run for run in known if run.run_id == text]
    near = exact or [run for run in known if run.run_id.endswith(text) or run.run_id.startswith(text)]
    if len(near) == 1:
        return near[0]
    names = ", ".join(run.run_id for run in (near or known)[:5])
    if near:
        raise UsageError(f"{text} is not one run but several: {names}.")
    raise UsageError(f"There is no run {text}. " + (f"The latest are {names}." if names else "There is none at all."))


def began(run: runs.RunFolder) -> datetime | None:
    """When it was asked for, in this container's time."""
    match = _STAMP.fullmatch(run.run_id)
    return datetime.strptime(match[1], "%Y%m%d-%H%M%S") if match else None  # noqa: DTZ007 - shown as it is


def state(run: runs.RunFolder) -> order.State | None:
    """Where it is, as it tells itself; None where it tells nothing."""
    try:
        return order.parse_state(run.state.read_text())
    except (OSError, UsageError):
        return None


def is_over(run: runs.RunFolder) -> bool:
    """Whether nothing more comes of it, as far as its folder tells."""
    told = state(run)
    return told.state in _OVER if told is not None else not (run.lived.exists() or run.order.exists())


def was_told(run: runs.RunFolder) -> bool:
    """Whether it was told to end: cancelled, or preempted."""
    told = state(run)
    return told is not None and told.state == "cancelled"


def rank_logs(run: runs.RunFolder) -> list[RankLog]:
    """Every rank's streams in its latest start, as torchrun lays them out, by rank."""
    nodes = [(match, path) for path in run.logs.glob("node*") if (match := _NODE.fullmatch(path.name))]
    last = max((int(match[2] or 0) for match, _ in nodes), default=0)
    by_rank = {int(match[1]): path for match, path in nodes if int(match[2] or 0) == last}
    found: list[RankLog] = []
    first = 0
    for _, path in sorted(by_rank.items()):
        streams = list(_streams(path))
        found += [RankLog(rank=first + local, stream=stream, path=log) for local, stream, log in streams]
        first += len({local for local, _, _ in streams})
    return sorted(found, key=lambda log: (log.rank, log.stream != "stdout"))


def _streams(node: Path) -> Iterator[tuple[int, str, Path]]:
    """`<node>/<rdzv id>_<random>/attempt_0/<local rank>/stdout.log`, of the latest tree and attempt there."""
    attempts = sorted(node.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime_ns)
    for path in attempts[-1].glob("*/*.log") if attempts else ():
        if path.parent.name.isdecimal() and path.stem in ("stdout", "stderr"):
            yield int(path.parent.name), path.stem, path
