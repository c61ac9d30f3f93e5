"""Which change of members a launch must or may make: nodes that leave, are lost, or join."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpu_launch.broker import models
from gpu_launch.broker.models import Job, Worker
from gpu_launch.common.launch_spec import Membership
from gpu_launch.errors import LaunchFailed
from gpu_launch.launch.plan import LaunchPlan
from gpu_launch.output.text import format_count

#: Seconds for checkpoints, where the broker gives no time.
CHECKPOINT_S = 60.0
_MOST_CHECKPOINT_S = 24 * 3600.0
#: Describes a worker that has ended, or cannot be reached, although the broker has not reported it.
UNRESPONSIVE = "it does not respond any more"


@dataclass(frozen=True, kw_only=True)
class MembershipChange:
    """A due change: all workers leave, and the job waits again; or some of an elastic launch leave, or join."""

    is_complete: bool
    #: Indexes of the workers that leave.
    leaving: frozenset[int]
    #: A worker that ended without the broker; it uses up one of --max-restarts.
    lost: Worker | None = None
    #: Nodes of workers that are connected now and did not take part.
    joined: tuple[str, ...] = ()
    #: Nothing starts again in these containers: the job ends.
    is_final: bool = False


def find_change(
    job: Job | None,
    membership: Membership,
    plan: LaunchPlan,
    *,
    workers: Sequence[Worker],
    leaving: Collection[int],
    gone: Collection[int] = (),
    joined: Sequence[str] = (),
) -> MembershipChange | None:
    """Return the change that is due for a launch that started with `membership`; None for none.

    `workers` are those in use. The agents of those in `leaving` report SIGTERM; those in `gone` do not respond. A
    worker whose node was released for others is no longer among the workers.
    """
    everything = frozenset(membership.workers)
    # When a detached job ends, another container may get SIGTERM before the driver's.
    if job is not None and (job.state == models.LEAVING or (job.detached and leaving and not plan.is_elastic)):
        return MembershipChange(is_complete=True, leaving=everything, is_final=True)
    if job is not None and (job.state == models.PREEMPTING or job.preemptions != membership.preemptions):
        return MembershipChange(is_complete=True, leaving=everything)
    if not plan.is_elastic or (job is not None and not job.is_granted):
        return None
    silent = [_silent(membership, index) for index in gone if index in everything]
    exited = [worker for worker in workers if worker.state == models.EXITED and worker.index in everything]
    leaving_workers = everything.intersection(leaving) | {worker.index for worker in (*exited, *silent)}
    if job is not None:
        leaving_workers |= everything - {worker.index for worker in workers}
    ended = [*exited, *silent]
    lost = [worker for worker in ended if worker.index not in leaving]
    if not leaving_workers and not joined:
        return None
    return MembershipChange(
        is_complete=False, leaving=leaving_workers, lost=lost[0] if lost else None, joined=tuple(joined)
    )


def _silent(membership: Membership, index: int) -> Worker:
    return Worker(
        index=index, node=membership.node_of(index), gpus=(), state=models.EXITED, exit_code=None, message=UNRESPONSIVE
    )


def checkpoint_seconds(job: Job | None, now: datetime) -> float:
    """Return the seconds left for checkpoints."""
    if job is None or job.checkpoint_until is None:
        return CHECKPOINT_S
    left = (job.checkpoint_until - now).total_seconds()
    # Clocks of two machines may differ by more than the grace.
    return left if 0 < left <= _MOST_CHECKPOINT_S else CHECKPOINT_S


def describe_change(change: MembershipChange, membership: Membership, *, grace_s: float | None) -> str:
    """Return the change as a person reads it; `grace_s` is None when the time for checkpoints is over."""
    if change.is_final:
        return "the job ends: the ranks get SIGTERM, and time for a checkpoint"
    if change.is_complete:
        return "preempted: others need the GPUs" + (f"; {grace_s:.0f} s for a checkpoint" if grace_s else "")
    left = format_count(membership.without(change.leaving).nnodes + len(change.joined), "node")
    nodes = ", ".join(membership.node_of(worker) for worker in sorted(change.leaving))
    reason = "lost" if change.lost is not None else "released, others need the GPUs"
    changes = [f"{nodes} {'is' if len(change.leaving) == 1 else 'are'} {reason}"] if change.leaving else []
    changes += (
        [f"{', '.join(change.joined)} {'takes' if len(change.joined) == 1 else 'take'} part now"]
        if change.joined
        else []
    )
    return f"{'; '.join(changes)}; continuing with {left}"


def check_enough_nodes(left: Membership, plan: LaunchPlan) -> None:
    """Refuse to continue with fewer nodes than the request permits.

    Raises:
        LaunchFailed: with both numbers.
    """
    if left.nnodes < plan.least_nnodes:
        needs = f"--nnodes {plan.least_nnodes}:{plan.nnodes} needs {plan.least_nnodes}"
        raise LaunchFailed(f"{format_count(left.nnodes, 'node')} left, and {needs}.")


def format_silent_nodes(nodes: Iterable[str], *, logs: object) -> str:
    """Return the error for nodes that do not respond, although the broker has not reported an end."""
    return f"{', '.join(nodes)}: {UNRESPONSIVE}; the worker or the node is gone. Logs: {logs}"


def format_lost_worker(worker: Worker, *, logs: str) -> str:
    """Return the error for a worker that ended."""
    code = "no reason given" if worker.exit_code is None else f"exit code {worker.exit_code}"
    return f"The worker on {worker.node} ended: {worker.message or code}. Logs: {logs}"
