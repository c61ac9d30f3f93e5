"""The states of a launch, and the transitions between them.

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

from enum import StrEnum


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
