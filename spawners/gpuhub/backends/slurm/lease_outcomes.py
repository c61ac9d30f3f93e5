"""What follows for a lease from the state of its Slurm job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from gpuhub.domain import lease_states
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.slurm_client import messages
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState
from gpuhub.slurm_jobs.scripts import build_log_path

SUSPENDED = "Slurm suspended its job: what it has started keeps running, and its time limit is paused"
REQUEUED = "Slurm requeued its job"
RESTARTED = "Slurm requeued its job and started it again"
#: Moments that differ by less are the same, seconds.
_SAME_S = 1.0
#: The clocks of the head node and of slurmctld's machine differ by less, seconds: munge refuses all requests otherwise.
MAX_CLOCK_DIFFERENCE_S = 300.0


def explain_over(
    lease: LeaseRow, job: SlurmJob | None, node_names: Mapping[str, str], started_at: float | None = None
) -> str | None:
    """Return why a waiting or live lease is over; None when it is not.

    Args:
        lease: The lease.
        job: Its job; None where Slurm does not know it, which ends the lease.
        node_names: gpuhub's names of nodes by Slurm's.
        started_at: When the job had started by which the lease was granted; None where another run of the broker
            granted it.
    """
    if job is None or job.state not in LIVE_STATES:
        return messages.explain_end(job)
    if lease.state is LeaseState.REQUESTED:
        return messages.explain_pending(job) if messages.can_never_start(job) else None
    if job.state is SlurmJobState.PENDING:
        return REQUEUED
    if _has_restarted(lease, job, started_at):
        return RESTARTED
    kept = set(lease_states.list_live_nodes(lease)) - find_lost_nodes(lease, job, node_names)
    return None if kept <= {node_names.get(node, node) for node in job.nodes} else RESTARTED


def find_exit(launch: JobRow, job: SlurmJob | None) -> int | None:
    """Return the exit code of a detached job that its Slurm job led; None where something else ended it."""
    if not launch.detached or job is None or job.state not in {SlurmJobState.COMPLETED, SlurmJobState.FAILED}:
        return None
    return job.exit_code


def awaits_exit(launch: JobRow, job: SlurmJob | None) -> bool:
    """Return whether a Slurm job is over whose exit code Slurm reports only when its nodes are clean."""
    return launch.detached and job is not None and job.state is SlurmJobState.COMPLETING


def name_log(launch: JobRow, job: SlurmJob | None, reason: str) -> str:
    """Return the reason for which a launch's Slurm job is over; where it failed, with the file of its output."""
    if job is None or job.state is not SlurmJobState.FAILED:
        return reason
    return f"{reason}; its output is in {build_log_path(launch.joins or launch.run_id, job.id)}"


def find_lost_nodes(lease: LeaseRow, job: SlurmJob, node_names: Mapping[str, str]) -> frozenset[str]:
    """Return the nodes that Slurm took from an elastic job which continues with enough others."""
    has = {node_names.get(node, node) for node in job.nodes}
    live = lease_states.list_live_nodes(lease)
    lost = frozenset(live) - has
    is_elastic = lease.resources.least_nodes < lease.resources.nodes
    is_enough = len(live) - len(lost) >= lease.resources.least_nodes
    continues = lease.state in lease_states.LIVE and job.state is not SlurmJobState.PENDING
    return lost if is_elastic and is_enough and continues else frozenset()


def find_kept_nodes(lease: LeaseRow, job: SlurmJob, node_names: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the nodes that a running job keeps, by Slurm's names; None where it keeps all.

    Nodes go that the lease has released and that are proven clear. The first one stays, as the job's script runs there.
    """
    if lease.state not in lease_states.LIVE or job.state is not SlurmJobState.RUNNING:
        return None
    released = {gpu.node for gpu in lease.gpus} - {gpu.node for gpu in lease.held}
    kept = tuple(node for at, node in enumerate(job.nodes) if at == 0 or node_names.get(node, node) not in released)
    return kept if len(kept) < len(job.nodes) else None


def has_new_end(lease: LeaseRow, job: SlurmJob) -> bool:
    """Return whether a live lease without its own time limit must follow a new end of its job."""
    is_following = lease.state in lease_states.LIVE and lease.time_limit_s is None
    return is_following and not _is_close(lease.expires_at, job.ends_at)


def has_new_note(lease: LeaseRow, job: SlurmJob) -> bool:
    """Return whether a live lease's job was suspended or resumed since its note was written."""
    if lease.state not in lease_states.LIVE:
        return False
    is_noted = lease.note == SUSPENDED
    return (job.state is SlurmJobState.SUSPENDED and not is_noted) or (job.state is SlurmJobState.RUNNING and is_noted)


def _has_restarted(lease: LeaseRow, job: SlurmJob, started_at: float | None) -> bool:
    """Return whether a live lease's job has started again: its owner may requeue it, and change it while it waits."""
    if started_at is not None:
        return not _is_close(job.started_at, started_at)
    if job.started_at is None or lease.granted_at is None:
        return False
    return job.started_at > lease.granted_at + MAX_CLOCK_DIFFERENCE_S


def _is_close(moment: float | None, other: float | None) -> bool:
    return moment is other or (moment is not None and other is not None and abs(moment - other) < _SAME_S)


def find_unwanted(
    jobs: Iterable[SlurmJob], leases: Mapping[str, LeaseRow], *, instance: str, has_containers: bool
) -> set[int]:
    """Return the numbers of this instance's jobs that no lease needs any more.

    Args:
        jobs: All jobs.
        leases: The open leases by id.
        instance: The prefix of the names of gpuhub's jobs.
        has_containers: Jobs only hold GPUs for containers, and stay until these are proven gone; else they are what
            runs.
    """
    unwanted: set[int] = set()
    for job in jobs:
        lease_id = names.find_slurm_lease(instance, job.name)
        if job.state not in LIVE_STATES or lease_id is None:
            continue
        lease = leases.get(lease_id)
        # Its lease has ended or has another job: it is from a submission whose outcome was not known.
        is_orphan = lease is None or lease.slurm_job not in {None, job.id}
        is_ending = lease is not None and lease.state in lease_states.ENDING
        if is_orphan or (is_ending and (job.state is SlurmJobState.PENDING or not has_containers)):
            unwanted.add(job.id)
    return unwanted
