"""Whether a launch has to make way for others who need its GPUs, or may have more nodes, and how. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
#: Said of a worker that has ended, or cannot be reached, without the broker having told so.
UNHEARD = "it is not heard of any more"
#: How a worker's message begins whose GPUs the broker took back.
_GIVEN_BACK = "given back"


@dataclass(frozen=True, kw_only=True)
class Way:
    """What changes: all workers go, and the job waits again; or some of an elastic launch go, or come."""

    is_whole: bool
    #: Indexes of the workers that go.
    workers: frozenset[int]
    #: One that ended by itself, not by the broker's doing: that uses up one of --max-restarts.
    lost: Worker | None = None
    #: Nodes of workers that are there now and did not take part.
    joined: tuple[str, ...] = ()
    #: Nothing is started again here: this job was told to end.
    is_last: bool = False


def find_way(
    job: Job | None,
    roster: Roster,
    plan: Plan,
    *,
    workers: Sequence[Worker],
    leaving: Collection[int],
    gone: Collection[int] = (),
    joined: Sequence[str] = (),
) -> Way | None:
    """What the launch, begun with `roster`, has to give, or may have; None for nothing.

    `workers` are those that are counted on. Those in `leaving` tell that they have got SIGTERM; those in `gone` are not
    heard of any more. One that the broker took back may be known by its message, or no longer be among the workers.
    """
    everything = frozenset(roster.workers)
    # Of a detached job's containers, one may learn sooner than the driver's that all are to end.
    if job is not None and (job.state == wire.LEAVING or (job.detached and leaving and not plan.is_elastic)):
        return Way(is_whole=True, workers=everything, is_last=True)
    if job is not None and (job.state == wire.PREEMPTING or job.preemptions != roster.preemptions):
        return Way(is_whole=True, workers=everything)
    if not plan.is_elastic or (job is not None and not job.is_granted):
        return None
    silent = [_silent(roster, index) for index in gone if index in everything]
    exited = [worker for worker in workers if worker.state == wire.EXITED and worker.index in everything]
    going = everything.intersection(leaving) | {worker.index for worker in [*exited, *silent]}
    if job is not None:
        going |= everything - {worker.index for worker in workers}
    lost = [one for one in [*exited, *silent] if one.index not in leaving and not is_given_back(one)]
    if not going and not joined:
        return None
    return Way(is_whole=False, workers=going, lost=lost[0] if lost else None, joined=tuple(joined))


def _silent(roster: Roster, index: int) -> Worker:
    return Worker(index=index, node=roster.node_of(index), gpus=(), state=wire.EXITED, exit_code=None, message=UNHEARD)


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
    if way.is_last:
        return "told to end: the ranks get SIGTERM, and time for a checkpoint"
    if way.is_whole:
        return "preempted: others need the GPUs" + (f"; {grace_s:.0f} s for a checkpoint" if grace_s else "")
    left = count(roster.without(way.workers).nnodes + len(way.joined), "node")
    nodes = ", ".join(roster.node_of(worker) for worker in sorted(way.workers))
    why = "lost" if way.lost is not None else "given back, others need the GPUs"
    changes = [f"{nodes} {'is' if len(way.workers) == 1 else 'are'} {why}"] if way.workers else []
    changes += [f"{', '.join(way.joined)} {'takes' if len(way.joined) == 1 else 'take'} part now"] if way.joined else []
    return f"{'; '.join(changes)}; going on with {left}"


def check_left(left: Roster, plan: Plan) -> None:
    """Raises LaunchFailed when what is left is less than what was asked for."""
    if left.nnodes < plan.least_nnodes:
        needs = f"--nnodes {plan.least_nnodes}:{plan.nnodes} needs {plan.least_nnodes}"
        raise LaunchFailed(f"{count(left.nnodes, 'node')} left, and {needs}.")


def gone_text(nodes: Iterable[str], *, logs: object) -> str:
    """The error for nodes whose workers have ended, or cannot be reached, without the broker having told so."""
    return f"{', '.join(nodes)}: {UNHEARD}; the worker or the node is gone. Logs: {logs}"


def lost_text(worker: Worker, *, logs: str) -> str:
    """The error for a worker that ended by itself."""
    code = "no reason given" if worker.exit_code is None else f"exit code {worker.exit_code}"
    return f"The worker on {worker.node} ended: {worker.message or code}. Logs: {logs}"
