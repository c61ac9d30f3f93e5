"""The states of a launch, the transitions between them, and the result of a launch that has ended.

    STARTING ──────► RUNNING ───────────► ENDED
        │             │   ▲
        │    ┌────────┤   │ every node has confirmed the start
        ▼    ▼        ▼   │
    CHANGING_MEMBERS ⇄ RESTARTING

- A preemption, a worker that is lost, and a node that joins lead to CHANGING_MEMBERS: the ranks write their checkpoints
  and end.
- A rank's failure leads to RESTARTING: the other ranks end. When the broker's reason for it comes only then, members
  change after all.
- From CHANGING_MEMBERS the ranks start again (RESTARTING), when the GPUs are granted again or on the nodes that remain.
- Success, an error without a restart, and the user's interrupt lead from everywhere to ENDED.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpu_launch.common import exchange, job_manifest, run_folder
from gpu_launch.common.run_folder import RunFolder


class LaunchState(StrEnum):
    """The state of a launch; only `Launch` changes it."""

    #: Workers are requested, and the ranks started for the first time.
    STARTING = "starting"
    #: Every node has confirmed the start.
    RUNNING = "running"
    #: The ranks write checkpoints and end, because nodes leave or join.
    CHANGING_MEMBERS = "changing members"
    #: The ranks have ended, or are being ended after a failure, and start again.
    RESTARTING = "restarting"
    #: What is left of the ranks is removed, and the workers are released.
    ENDED = "ended"


_STARTING, _RUNNING, _RESTARTING = LaunchState.STARTING, LaunchState.RUNNING, LaunchState.RESTARTING
_CHANGING, _ENDED = LaunchState.CHANGING_MEMBERS, LaunchState.ENDED
#: The states that may follow each state.
TRANSITIONS: dict[LaunchState, frozenset[LaunchState]] = {
    _STARTING: frozenset({_RUNNING, _CHANGING, _RESTARTING, _ENDED}),
    _RUNNING: frozenset({_CHANGING, _RESTARTING, _ENDED}),
    _CHANGING: frozenset({_RESTARTING, _ENDED}),
    # A start may fail, or be overtaken by a preemption, before all nodes have confirmed it.
    _RESTARTING: frozenset({_RUNNING, _CHANGING, _RESTARTING, _ENDED}),
    _ENDED: frozenset(),
}


def check_transition(before: LaunchState, after: LaunchState) -> None:
    """Refuse a transition that is not in the table.

    Raises:
        RuntimeError: for a mistake of ours.
    """
    if after not in TRANSITIONS[before]:
        raise RuntimeError(f"A launch does not go from {before} to {after}.")


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
    #: The requested variables of the ranks, by name, then rank.
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
