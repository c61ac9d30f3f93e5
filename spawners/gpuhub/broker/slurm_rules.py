"""What follows for leases from what Slurm says of their jobs, and what Slurm does not offer. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from gpuhub import names
from gpuhub.batch.workers import log_path
from gpuhub.broker import leases as rules
from gpuhub.broker.intake import DEFAULT_IMAGE
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobRequest, LeaseState
from gpuhub.errors import InvalidRequest
from gpuhub.settings import Cluster
from gpuhub.slurm import reasons
from gpuhub.slurm.site import Wish, check_wish, find_terms
from gpuhub.slurm.values import LIVE, Job, Site, State

SUSPENDED = "Slurm has suspended its job: what it started goes on, and its time limit stands still"
REQUEUED = "Slurm has put its job back into the queue"
MOVED = "Slurm has started its job anew"
#: Moments that differ by less are the same, seconds.
_SAME_S = 1.0


#: As `rows.new_id` makes them: what others call their jobs is their own.
_LEASE_ID = r"l[0-9a-f]{16}"


# -- a lease and its job ----------------------------------------------------------------------------------------------


def why_over(lease: LeaseRow, job: Job | None, ours: Mapping[str, str], started_at: float | None = None) -> str | None:
    """Why a lease that waits or goes on is over, given its job; None when it is not. A job that Slurm does not know
    (None) is over. `ours` are node names by Slurm's; `started_at` is when the job had started that the lease was
    granted by, where that is known.
    """
    if job is None or job.state not in LIVE:
        return reasons.explain_end(job)
    if lease.state is LeaseState.REQUESTED:
        return reasons.explain(job) if reasons.is_hopeless(job) else None
    if job.state is State.PENDING:
        return REQUEUED
    if started_at is not None and not _is_close(job.started_at, started_at):
        return MOVED
    kept = set(rules.live_nodes(lease)) - lost_nodes(lease, job, ours)
    return None if kept <= {ours.get(node, node) for node in job.nodes} else MOVED


def find_exit(launch: JobRow, job: Job | None) -> int | None:
    """The exit code of a detached job whose Slurm job is what leads it; None for one that did not end by itself."""
    if not launch.detached or job is None or job.state not in {State.COMPLETED, State.FAILED}:
        return None
    return job.exit_code


def awaits_exit(launch: JobRow, job: Job | None) -> bool:
    """Whether its Slurm job is over, and how is said only when its nodes are clean."""
    return launch.detached and job is not None and job.state is State.COMPLETING


def say_where(launch: JobRow, job: Job | None, why: str) -> str:
    """Why the Slurm job that runs a launch is over and, where it failed, the file with what it said."""
    if job is None or job.state is not State.FAILED:
        return why
    return f"{why}; {log_path(launch.joins or launch.run_id, job.id)} has what it said"


def lost_nodes(lease: LeaseRow, job: Job, ours: Mapping[str, str]) -> frozenset[str]:
    """Nodes that Slurm took from an elastic job which goes on with enough others."""
    has = {ours.get(node, node) for node in job.nodes}
    live = rules.live_nodes(lease)
    lost = frozenset(live) - has
    is_elastic = lease.ask.least_nodes < lease.ask.nodes
    is_enough = len(live) - len(lost) >= lease.ask.least_nodes
    goes_on = lease.state in rules.LIVE and job.state is not State.PENDING
    return lost if is_elastic and is_enough and goes_on else frozenset()


def kept_nodes(lease: LeaseRow, job: Job, ours: Mapping[str, str]) -> tuple[str, ...] | None:
    """What a running job is to keep of its nodes, by Slurm's names: without those that its lease has given back and
    that are proven clear. None where nothing is to go. The first one stays, as the job's script runs there.
    """
    if lease.state not in rules.LIVE or job.state is not State.RUNNING:
        return None
    given = {gpu.node for gpu in lease.gpus} - {gpu.node for gpu in lease.held}
    kept = tuple(node for at, node in enumerate(job.nodes) if at == 0 or ours.get(node, node) not in given)
    return kept if len(kept) < len(job.nodes) else None


def find_changes(lease: LeaseRow, job: Job) -> list[Callable[[LeaseRow], LeaseRow]]:
    """What changes of a lease that goes on, because of its job: when it ends, and what its owner is to know."""
    if lease.state not in rules.LIVE:
        return []
    changes: list[Callable[[LeaseRow], LeaseRow]] = []
    if lease.time_limit_s is None and not _is_close(lease.expires_at, job.ends_at):
        changes.append(partial(rules.follow_end, ends_at=job.ends_at))
    if job.state is State.SUSPENDED and lease.note != SUSPENDED:
        changes.append(partial(rules.warn, note=SUSPENDED))
    elif job.state is State.RUNNING and lease.note == SUSPENDED:
        changes.append(partial(rules.warn, note=None))
    return changes


def _is_close(moment: float | None, other: float | None) -> bool:
    return moment is other or (moment is not None and other is not None and abs(moment - other) < _SAME_S)


def find_unwanted(jobs: Iterable[Job], leases: Mapping[str, LeaseRow], *, instance: str, is_holding: bool) -> set[int]:
    """Jobs of this instance that nobody wants any more. With `is_holding` they keep GPUs for containers, and stay until
    these are proven gone; else they are what runs.
    """
    prefix = names.slurm_job(instance, "")
    found: set[int] = set()
    for job in jobs:
        lease_id = job.name.removeprefix(prefix)
        if job.state not in LIVE or lease_id == job.name or not re.fullmatch(_LEASE_ID, lease_id):
            continue
        lease = leases.get(lease_id)
        # Its lease has ended, or has another: of a submission nobody knew whether it went through.
        is_nobodys = lease is None or lease.slurm_job not in {None, job.id}
        is_ending = lease is not None and lease.state in rules.ENDING
        if is_nobodys or (is_ending and (job.state is State.PENDING or not is_holding)):
            found.add(job.id)
    return found


# -- what Slurm does not offer ----------------------------------------------------------------------------------------


def refuse_notebook(cluster: Cluster, profile_name: str) -> None:
    """Refuse a profile that Slurm cannot serve.

    Raises:
        InvalidRequest: with what to do instead.
    """
    profile = cluster.profile(profile_name)
    if profile is not None and profile.gpu_share > 1:
        raise InvalidRequest(
            f"profile {profile.name!r} gives parts of GPUs (gpu_share), and with Slurm gpuhub gets whole ones: choose "
            "another profile; the administrator may cut cards by MIG and give their parts types of their own in "
            "gres.conf"
        )


def refuse_job(cluster: Cluster, request: JobRequest) -> None:
    """Refuse a job that cannot run under Slurm.

    Raises:
        InvalidRequest: with what to do instead.
    """
    if not cluster.has_docker:
        _refuse_without_docker(cluster, request)
    if request.priority > 0:
        raise InvalidRequest(
            f"priority {request.priority}: with Slurm only its operators let a job go before others: scontrol update "
            "jobid=… nice=-…, or a QOS with a higher Priority"
        )
    if request.scavenge:
        raise InvalidRequest(
            "scavenge: who is preempted is Slurm's to say: ask the administrator for a partition or QOS that may be, "
            "and submit there with sbatch"
        )


def _refuse_without_docker(cluster: Cluster, request: JobRequest) -> None:
    """Workers are tasks of one step there, one on each node, in what all of the site's jobs run in."""
    if request.gpus is not None:
        raise InvalidRequest(
            f"gpus: {request.gpus} GPUs on any nodes need containers, and this site runs jobs with "
            f"{cluster.slurm.runtime}: ask for nnodes and nproc_per_node, the same number of GPUs on each node"
        )
    for node in cluster.nodes:
        if ":" in node.address and node.name not in request.exclude_nodes:
            raise InvalidRequest(
                f"workers find each other by the nodes' IPv4 addresses, and the address of {node.name}, "
                f"{node.address}, is none: the administrator may write another one in its [[nodes]] table; or leave "
                "that node out (exclude_nodes)"
            )
    profile = cluster.profile(request.profile or "")
    if profile is not None and profile.image != DEFAULT_IMAGE:
        raise InvalidRequest(
            f"profile {profile.name!r} has an image of its own, {profile.image}, and this site runs jobs with "
            f"{cluster.slurm.runtime}, all in the same environment: leave the profile out"
        )


def refuse_wish(cluster: Cluster, site: Site | None, lease: LeaseRow) -> None:
    """Refuse what no partition, account or QOS of the site allows; nothing, where the site is not known.

    Raises:
        InvalidRequest: with what there is.
    """
    ask = lease.ask
    wish = Wish(
        nodes=ask.least_nodes,
        gpus_per_node=0 if ask.spread is not None else ask.gpus_per_node,
        spread=ask.spread,
        models=ask.models,
        cpus=ask.cpu_milli / 1000,
        memory_mib=ask.memory_mib,
        time_limit_s=lease.time_limit_s,
        terms=find_terms(cluster.slurm, cluster.profile(lease.profile or "")),
    )
    mistakes = [] if site is None else check_wish(cluster, site, wish)
    if mistakes:
        raise InvalidRequest("; ".join(mistakes))


def no_cordons(cluster: Cluster, node: str) -> InvalidRequest:
    """Why a node is not cordoned or drained here: Slurm would go on to give it."""
    theirs = next((one.slurm_name for one in cluster.nodes if one.name == node), node)
    return InvalidRequest(
        f"with Slurm, nodes are drained there: scontrol update nodename={theirs} state=drain reason=…; and back with "
        "state=resume"
    )


def no_reservations() -> InvalidRequest:
    """Why GPUs are not kept for somebody here: Slurm would go on to give them."""
    return InvalidRequest(
        "with Slurm, reservations are made there: scontrol create reservation starttime=… duration=… users=… nodes=…; "
        "a profile uses one that its reservation names"
    )
