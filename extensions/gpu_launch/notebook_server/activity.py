"""What happens in a notebook: its kernels, terminals, programs, ranks and files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psutil  # type: ignore[import-untyped]

from gpu_launch.notebook_server.programs import UserPrograms

#: The program of ranks in the notebook's own container, as a part of its command line.
_RANK_PROGRAM = "gpu_launch.worker"


@dataclass(frozen=True, kw_only=True)
class Activity:
    """A notebook at one moment."""

    #: Whether a cell or ranks run; such a notebook must not be stopped.
    is_busy: bool
    #: Seconds since the last activity of a kernel, terminal or file.
    inactive_s: float


def assess(
    *,
    now: datetime,
    started_at: datetime,
    kernels: Iterable[Mapping[str, Any]],
    terminals: Iterable[Mapping[str, Any]],
    programs: UserPrograms,
    saved_at: datetime | None,
) -> Activity:
    """Return what happens in the notebook.

    Args:
        now: The current time, with a time zone.
        started_at: When the server started.
        kernels: The models of the server's kernels, as its API has them.
        terminals: Those of its terminals.
        programs: The programs that run outside of the kernels. Each of them is activity.
        saved_at: When a file was last saved; None if none was.
    """
    kernels = list(kernels)
    times = [started_at, *filter(None, [saved_at, programs.used_at])]
    times += [_parse(model["last_activity"]) for model in (*kernels, *terminals)]
    return Activity(
        is_busy=any(model.get("execution_state") == "busy" for model in kernels) or has_ranks(),
        inactive_s=0.0 if programs.running else max(0.0, (now - max(times)).total_seconds()),
    )


def _parse(moment: str | datetime) -> datetime:
    return moment if isinstance(moment, datetime) else datetime.fromisoformat(moment)


def has_ranks() -> bool:
    """Return whether ranks, or the workers that wait for the next launch, run in the notebook's own container."""
    return any(_RANK_PROGRAM in command for command in _list_commands())


def _list_commands() -> Iterator[str]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield " ".join(process.cmdline()[:4])
