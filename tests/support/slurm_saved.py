"""What slurmctld has stored: up to 5 s later than a change, and what kills it before forgets that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.product import wait_for


def wait_saved(ask: Callable[..., object], state: Path, job: int) -> None:
    """Until slurmctld has written what it knows by now of its jobs to its state's folder; `ask` runs Slurm's commands."""
    file = state / "job_state"
    # The first one to be seen may have been composed before.
    for count in range(2):
        before = file.stat().st_mtime_ns if file.exists() else 0
        ask("scontrol", "update", f"jobid={job}", f"comment=gpuhub-{count}")
        wait_for(lambda: file.exists() and file.stat().st_mtime_ns > before, "slurmctld has saved its state")  # noqa: B023
