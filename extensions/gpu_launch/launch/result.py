"""The result of a launch, for its caller and for other notebooks."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_launch.common import exchange, job_manifest, run_folder
from gpu_launch.common.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """A launch that ended well."""

    run_id: str
    seconds: float
    ranks: int
    nodes: tuple[str, ...]
    #: The folder with every rank's complete output.
    logs: Path
    #: What the function returned, by rank; empty for a script or a cell.
    results: list[Any] = field(default_factory=list)
    #: The ranks' variables that were asked for, by name, then rank.
    returned: dict[str, list[Any]] = field(default_factory=dict)


def write_status(run: RunFolder, outcome: str) -> None:
    """Write the outcome for `%gpu_status` and `%gpu_logs`, in other notebooks too."""
    if run.manifest.exists():
        # A detached job writes its own status, and may start again.
        return
    if outcome != "done":
        exchange.remove_folder(run.exchange)
    state = "done" if outcome == "done" else "failed"
    status = job_manifest.JobStatus(state=state, text="" if state == outcome else outcome, ended_at=time.time())
    with contextlib.suppress(OSError):
        run_folder.write_private(run.status, job_manifest.dump_json(status).encode())
