"""Whether a launch has to make way for others who need its GPUs, and how. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from gpu_launch import wire
from gpu_launch.errors import LaunchFailed
from gpu_launch.plan import Plan
from gpu_launch.render import count
from gpu_launch.roster import Roster
from gpu_launch.wire import Job, Worker

#: For checkpoints, where the broker does not say how long there is.
CHECKPOINT_S = 60.0
_MOST_CHECKPOINT_S = 24 * 3600.0
#: How a worker's message begins whose GPUs the broker took back.
_GIVEN_BACK = "given back"


@dataclass(frozen=True, kw_only=True)
class Way:
    """What goes: all of the broker's workers, and the job waits again; or some of an elastic launch's."""

    is_whole: bool
    #: Indexes of the workers that go.
    workers: frozenset[int]
    #: One that ended by itself, not by the broker's doing: that uses up one of --max-restarts.
    lost: Worker | None = None


def find_way(job: Job | None, roster: Roster, plan: Plan, *, leaving: Collection[int]) -> Way | None:
    """What the launch, begun with `roster`, has to give; None for nothing.

    The workers in `leaving` tell that they have got SIGTERM. One that the broker took back may be known by its message,
    or no longer be among the job's workers.
    """
    if job is None:
        return None
    everything = frozenset(roster.workers)
    if job.state == wire.PREEMPTING or job.preemptions != roster.preemptions:
        return Way(is_whole=True, workers=everything)
    if not plan.is_elastic or not job.is_granted:
        return None
    exited = [worker for worker in job.workers if worker.state == wire.EXITED and worker.index in everything]
    going = everything.intersection(leaving) | {worker.index for worker in exited}
    going |= everything - {worker.index for worker in job.workers}
    lost = [worker for worker in exited if worker.index not in leaving and not is_given_back(worker)]
    return Way(is_whole=False, workers=going, lost=lost[0] if lost else None) if going else None


def is_given_back(worker: Worker) -> bool:
    """Whether the broker ended this worker because others need its GPUs."""
    return (worker.message or "").startswith(_GIVEN_BACK)


def grace(job: Job | None, now: datetime) -> float:
    """Seconds left for checkpoints."""
    if job is None or job.checkpoint_until is None:
        return CHECKPOINT_S
    left = (job.checkpoint_until - now).total_seconds()
    # Clocks of two machines may differ by more than the grace.
    return left if 0 < left <= _MOST_CHECKPOINT_S else CHECKPOINT_S


def describe(way: Way, roster: Roster, *, grace_s: float | None) -> str:
    """For the person, when the ranks of `roster` are told; no grace: it is over."""
    if way.is_whole:
        return "preempted: others need the GPUs" + (f"; {grace_s:.0f} s for a checkpoint" if grace_s else "")
    nodes = ", ".join(roster.node_of(worker) for worker in sorted(way.workers))
    why = "lost" if way.lost is not None else "given back, others need the GPUs"
    left = count(roster.without(way.workers).nnodes, "node")
    return f"{nodes} {'is' if len(way.workers) == 1 else 'are'} {why}; going on with {left}"


def check_left(left: Roster, plan: Plan) -> None:
    """Raises LaunchFailed when what is left is less than what was asked for."""
    if left.nnodes < plan.least_nnodes:
        needs = f"--nnodes {plan.least_nnodes}:{plan.nnodes} needs {plan.least_nnodes}"
        raise LaunchFailed(f"{count(left.nnodes, 'node')} left, and {needs}.")


def lost_text(worker: Worker, *, logs: str) -> str:
    """The error for a worker that ended by itself."""
    code = "no reason given" if worker.exit_code is None else f"exit code {worker.exit_code}"
    return f"The worker on {worker.node} ended: {worker.message or code}. Logs: {logs}"
