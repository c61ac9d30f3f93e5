"""Checks of requests against the settings and the inventory; `limits` checks what their owner may use.

`extend` checks the longest duration of a lease.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuhub.broker.state import effects
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import JobRequest, LeaseRequest, LeaseState, Purpose
from gpuhub.common import gpu
from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.common.names import DEFAULT_IMAGE
from gpuhub.common.units import format_span
from gpuhub.config.containers.container_size import SizeRequest, build_profile_size, build_size_request
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.domain import job_states, owner_limits
from gpuhub.domain.models import JobRow, LeaseRow, ResourceRequest, new_id
from gpuhub.scheduler.interface import Quota

#: All GPUs of a detached job are listed in one environment variable of its workers, whose length Linux limits.
MAX_DETACHED_GPUS = 512
_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Requester:
    """The owner for whom a request is made, with groups and quota."""

    owner: str
    #: The hub's groups and those of the settings.
    groups: frozenset[str]
    quota: Quota
    #: May give a request a priority above 0.
    may_prioritize: bool = False


# -- rows -------------------------------------------------------------------------------------------------------------


def build_notebook_lease(
    *, cluster: ClusterSettings, transaction: Transaction, requester: Requester, request: LeaseRequest
) -> LeaseRow:
    """Build the waiting lease of a notebook.

    Raises:
        InvalidRequest: The profile does not exist, or the time limit is longer than allowed.
        NotAllowed: The profile is restricted to groups that the owner is not in.
    """
    profile = find_profile(cluster, request.profile, requester)
    longest = owner_limits.find_max_lease_s(requester.quota)
    return LeaseRow(
        id=new_id("l"),
        seq=transaction.next_seq(),
        key=request.key,
        owner=requester.owner,
        groups=tuple(sorted(requester.groups)),
        purpose=Purpose.NOTEBOOK,
        subject=request.server,
        profile=profile.name,
        resources=replace(build_profile_resources(cluster, profile), suspendable=request.suspendable),
        created_at=transaction.now,
        since=transaction.now,
        time_limit_s=choose_time_limit(asked=request.time_limit_s, usual=profile.time_limit, longest=longest),
        is_persistent=request.persistent,
        image=request.image,
    )


def find_profile(cluster: ClusterSettings, name: str, requester: Requester) -> ProfileSettings:
    """Return the profile of that name.

    Raises:
        InvalidRequest: There is none; the message lists the profiles.
        NotAllowed: It is restricted to groups that the owner is not in.
    """
    profile = cluster.profile(name)
    if profile is None:
        valid = ", ".join(known.name for known in cluster.profiles if known.admits(requester.groups))
        raise InvalidRequest(f"there is no profile {name!r}; there are: {valid}")
    profile.check_groups(requester.owner, requester.groups)
    return profile


def build_profile_resources(cluster: ClusterSettings, profile: ProfileSettings) -> ResourceRequest:
    """Return the resources of a notebook with this profile."""
    size = build_profile_size(profile, follows_gpus=cluster.counts_machines)
    return ResourceRequest(
        gpus_per_node=profile.gpu_count,
        models=tuple(gpu.shorten_model(model) for model in profile.models),
        least_memory_mib=profile.gpu_memory // _MIB,
        least_driver=profile.gpu_driver,
        least_capability=None if profile.gpu_capability is None else gpu.parse_capability(profile.gpu_capability),
        share=profile.gpu_share,
        exclusive=profile.exclusive,
        stage=_list_staged(cluster, profile.stage),
        cpu_milli=size.cpu_milli,
        memory_mib=size.memory_mib,
        cpu_by_gpu=size.cpu_by_gpu,
        memory_by_gpu=size.memory_by_gpu,
    )


def build_job(
    *,
    cluster: ClusterSettings,
    transaction: Transaction,
    requester: Requester,
    request: JobRequest,
    notebook: LeaseRow | None,
    joined: JobRow | None = None,
    array: str | None = None,
    array_limit: int | None = None,
    after: str | None = None,
    is_held: bool = False,
    bundle: str | None = None,
    auxiliary_s: int | None = None,
) -> tuple[JobRow, LeaseRow]:
    """Build a waiting job and its lease. The job ends with `notebook`, unless it is detached, and with `joined`.

    Raises:
        InvalidRequest: Its demands contradict each other, the time limit is longer than allowed, or the profile does
            not exist.
        NotAllowed: A priority above 0 from a user who is not an administrator, or a profile of groups that the owner is
            not in.
    """
    check_consistency(request)
    if request.guests:
        check_guest_request(cluster, request)
    if request.priority > 0 and not requester.may_prioritize:
        raise NotAllowed(f"priority {request.priority}: only an administrator may ask for more than 0")
    job_id, lease_id = new_id("j"), new_id("l")
    lease = LeaseRow(
        is_held=is_held,
        id=lease_id,
        seq=transaction.next_seq(),
        key=effects.job_key(lease_id),
        owner=requester.owner,
        groups=tuple(sorted(requester.groups)),
        purpose=Purpose.JOB,
        subject=job_id,
        profile=None,
        resources=replace(build_job_resources(cluster, request), bundle=bundle, auxiliary_s=auxiliary_s),
        created_at=transaction.now,
        since=transaction.now,
        time_limit_s=choose_time_limit(
            asked=request.time_limit_s,
            usual=cluster.jobs.time_limit,
            longest=owner_limits.find_max_lease_s(requester.quota),
            is_usual_the_most=True,
        ),
    )
    job = JobRow(
        id=job_id,
        run_id=request.run_id,
        owner=requester.owner,
        server=request.server,
        notebook_lease=None if notebook is None or request.detached else notebook.id,
        lease_id=lease.id,
        image=choose_image(cluster, requester, request, notebook, joined),
        nnodes=request.nnodes,
        min_nnodes=lease.resources.least_nodes,
        nproc_per_node=request.nproc_per_node,
        gpus=request.gpus,
        array=array,
        array_limit=array_limit,
        after=after,
        max_retries=request.max_retries,
        sleeps=request.sleeps,
        detached=request.detached,
        name=request.name,
        port=request.port,
        port_users=tuple(sorted({*request.port_users} - {requester.owner})),
        joins=request.joins,
        first_worker=request.first_worker,
        created_at=transaction.now,
        since=transaction.now,
    )
    return job, lease


def choose_image(
    cluster: ClusterSettings,
    requester: Requester,
    request: JobRequest,
    notebook: LeaseRow | None,
    joined: JobRow | None,
) -> str:
    """Return the image of a job's workers: the named one, or that of the named profile, the joined run, the notebook's
    profile, or the default.

    Raises:
        InvalidRequest: The profile does not exist, it does not offer the image, or the run to join has another image.
        NotAllowed: The profile is restricted to groups that the owner is not in.
    """
    named = find_named_image(cluster, requester, request)
    if joined is not None:
        if named not in {None, joined.image}:
            asked = "the job" if request.profile is None else f"profile {request.profile!r}"
            raise InvalidRequest(f"{asked} has the image {named}; {joined.run_id} runs {joined.image}")
        return joined.image
    if named is not None:
        return named
    profile = cluster.profile(notebook.profile) if notebook is not None and notebook.profile else None
    return DEFAULT_IMAGE if profile is None else profile.image


def find_named_image(cluster: ClusterSettings, requester: Requester, request: JobRequest) -> str | None:
    """Return the image that a request names, itself or by its profile; None if it names neither.

    Raises:
        InvalidRequest: The profile does not exist, or no profile of the owner offers the image.
        NotAllowed: The profile is restricted to groups that the owner is not in.
    """
    if request.profile is not None:
        return find_profile(cluster, request.profile, requester).with_image(request.image).image
    if request.image is None:
        return None
    profiles = [profile for profile in cluster.profiles if profile.admits(requester.groups)]
    offered = dict.fromkeys(image for profile in profiles for image in profile.offered_images)
    if request.image not in offered:
        raise InvalidRequest(f"no profile offers the image {request.image!r}; they offer: {', '.join(offered)}")
    return request.image


def find_joined(transaction: Transaction, owner: str, run_id: str) -> JobRow:
    """Return the live job of a run that workers should join.

    Raises:
        InvalidRequest: The owner has no such run.
    """
    job = effects.find_run(transaction, owner, run_id)
    if job is None or job_states.is_over(job):
        raise InvalidRequest(f"joins: {owner} has no run {run_id!r} that is still running")
    if job.joins is not None:
        raise InvalidRequest(f"joins: {run_id} has itself joined {job.joins}: name that one")
    return job


def build_job_resources(cluster: ClusterSettings, request: JobRequest) -> ResourceRequest:
    """Return the resources of a job."""
    least = request.nnodes if request.min_nnodes is None else request.min_nnodes
    own_nodes = {node.name for node in cluster.own_nodes} if request.guests else set()
    capability = request.least_capability
    size = build_job_size(cluster, request)
    return ResourceRequest(
        nodes=request.nnodes,
        least_nodes=least,
        gpus_per_node=request.nproc_per_node,
        spread=request.gpus,
        models=tuple(dict.fromkeys(model for one in request.models if (model := gpu.shorten_model(one)))),
        least_memory_mib=request.least_memory_mib,
        least_driver=request.least_driver,
        least_capability=None if capability is None else gpu.parse_capability(capability),
        exclude=tuple(sorted(own_nodes.union(request.exclude_nodes))),
        exclusive=request.exclusive,
        same_model=request.same_model,
        stage=() if request.guests else _list_staged(cluster, request.stage),
        batch=request.batch,
        scavenge=request.scavenge,
        guests=request.guests,
        priority=request.priority,
        cpu_milli=size.cpu_milli,
        memory_mib=size.memory_mib,
        cpu_by_gpu=size.cpu_by_gpu,
        memory_by_gpu=size.memory_by_gpu,
        shm_mib=request.shm_mib,
    )


def build_job_size(cluster: ClusterSettings, request: JobRequest) -> SizeRequest:
    """Return CPU and memory of a job's workers: its own numbers, else those of `[jobs]`, else its GPUs' share."""
    jobs = cluster.jobs
    return build_size_request(
        cpus=jobs.cpus if request.cpus is None else request.cpus,
        memory=jobs.memory if request.ram_mib is None else request.ram_mib * _MIB,
        cpus_or_more=request.cpus_or_more,
        memory_or_more=request.ram_mib_or_more,
        follows_gpus=cluster.counts_machines,
    )


def _list_staged(cluster: ClusterSettings, datasets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the datasets of a request and of the settings, without those within others."""
    if datasets and cluster.storage.datasets is None:
        raise InvalidRequest("stage: this cluster has no datasets: the administrator sets datasets in [storage]")
    named = {*cluster.storage.stage, *datasets}
    return tuple(sorted(name for name in named if not any(name.startswith(f"{other}/") for other in named)))


def check_consistency(request: JobRequest) -> None:
    """Check that the demands of a job do not contradict each other.

    Raises:
        InvalidRequest: They do; the message names them.
    """
    if request.gpus is not None and (request.nnodes, request.nproc_per_node) != (1, 1):
        raise InvalidRequest("gpus: replaces nnodes and nproc_per_node, which must then be 1")
    if request.gpus is not None and request.min_nnodes is not None:
        raise InvalidRequest("gpus: a job on any nodes cannot be elastic; leave min_nnodes out")
    if request.min_nnodes is not None and request.min_nnodes > request.nnodes:
        raise InvalidRequest(f"min_nnodes: {request.min_nnodes} is more than nnodes, {request.nnodes}")
    if request.joins is None and request.first_worker:
        raise InvalidRequest("first_worker: goes with joins; the workers of a run of its own count from 0")
    if request.joins is not None and request.detached:
        raise InvalidRequest("joins: a detached job leads its own workers; leave one of the two out")
    if request.joins == request.run_id:
        raise InvalidRequest(f"joins: {request.run_id} cannot join itself")
    if (request.after is not None or request.max_retries) and not request.detached:
        raise InvalidRequest("after, max_retries: they are for detached jobs; the notebook of any other decides itself")
    if request.port is None and request.port_users:
        raise InvalidRequest("port_users: they are for a job's port; name the port as well")
    if request.sleeps and request.port is None:
        raise InvalidRequest("sleeps: a request to the job's port wakes it; name the port as well")
    if request.port is not None and not request.detached:
        raise InvalidRequest("port: it is for detached jobs; a notebook's own servers are reached through the notebook")
    _check_size(request)
    if request.after == request.run_id:
        raise InvalidRequest(f"after: {request.run_id} cannot wait for itself")
    if request.detached and (request.gpus or request.nnodes * request.nproc_per_node) > MAX_DETACHED_GPUS:
        raise InvalidRequest(f"a detached job may have {MAX_DETACHED_GPUS} GPUs at most")


def _check_size(request: JobRequest) -> None:
    if (request.cpus_or_more and request.cpus is None) or (request.ram_mib_or_more and request.ram_mib is None):
        raise InvalidRequest("cpus_or_more, ram_mib_or_more: they say how cpus and ram_mib are meant; name these too")
    if request.shm_mib and request.ram_mib and request.shm_mib > request.ram_mib and not request.ram_mib_or_more:
        raise InvalidRequest(
            f"shm_mib: /dev/shm counts in the memory of its container, and {request.shm_mib} MiB are more than "
            f"ram_mib, {request.ram_mib}: ask for less, or for more memory"
        )


def check_guest_request(cluster: ClusterSettings, request: JobRequest) -> None:
    """Check that a job can run on a guest.

    Raises:
        InvalidRequest: There is no guest, or the job needs what guests do not have.
    """
    if not any(node.guest for node in cluster.nodes):
        raise InvalidRequest("guests: this cluster has no guests: leave guests out, or `gpuhub node invite` adds one")
    if not request.detached:
        raise InvalidRequest(
            "guests: only detached jobs run on guests, because a notebook cannot be reached from there"
        )
    if request.nnodes != 1 or request.gpus not in {None, 1}:
        raise InvalidRequest(
            "guests: a job on guests runs on one node, because guests do not reach each other: nnodes must be 1, and "
            "gpus is set by nproc_per_node"
        )
    if request.stage:
        raise InvalidRequest("stage: guests get no datasets: put the data into the job's folder, or let it download it")


def choose_time_limit(
    *, asked: int | None, usual: int | None, longest: float | None, is_usual_the_most: bool = False
) -> int | None:
    """Return a lease's time limit in seconds; None for none.

    Raises:
        InvalidRequest: More than the longest allowed time was requested.
    """
    most = [limit for limit in (longest, usual if is_usual_the_most else None) if limit is not None]
    if asked is not None and most and asked > min(most):
        raise InvalidRequest(
            f"time_limit_s: {format_span(asked)} were requested; the longest allowed time is {format_span(min(most))}"
        )
    limits = [limit for limit in (asked, usual, longest) if limit is not None]
    return round(min(limits)) if limits else None


def find_notebook_lease(transaction: Transaction, owner: str, server: str) -> LeaseRow | None:
    """Return the lease of an owner's notebook server, unless it is ending."""
    live = {LeaseState.REQUESTED, LeaseState.GRANTED, LeaseState.ACTIVE}
    rows = [transaction.leases[lease_id] for lease_id in sorted(transaction.index.find("server", owner, server))]
    return next((row for row in sorted(rows, key=lambda row: row.seq) if row.state in live), None)
