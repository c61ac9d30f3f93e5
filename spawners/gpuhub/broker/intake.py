"""Requests checked against the settings and what there is, before anything is kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuhub import gpus
from gpuhub.broker import allowances, job_rules, schedule
from gpuhub.broker.drafts import Draft
from gpuhub.broker.index import Index
from gpuhub.broker.refusals import TooManyJobs, TooManyWaiting
from gpuhub.broker.rows import Ask, JobRow, LeaseRow, new_id
from gpuhub.broker.schemas import JobRequest, LeaseRequest, LeaseState, Purpose
from gpuhub.engines.base import Limits, Rights
from gpuhub.errors import InvalidRequest, NotAllowed
from gpuhub.quantities import format_span
from gpuhub.settings import Cluster, Profile

DEFAULT_IMAGE = "gpuhub/notebook:latest"
#: Workers of a detached job are told of all its GPUs in one variable of their environment, which Linux limits.
DETACHED_GPUS = 512
_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """For whom something is asked."""

    owner: str
    #: All groups: the hub's and those of the settings.
    groups: frozenset[str]
    rights: Rights
    #: May ask to go before others.
    may_hurry: bool = False


# -- requests as rows -------------------------------------------------------------------------------------------------


def build_notebook_lease(*, cluster: Cluster, draft: Draft, asker: Asker, request: LeaseRequest) -> LeaseRow:
    """A waiting lease for a notebook.

    Raises:
        InvalidRequest: there is no such profile, or the time asked for is more than one may have.
    """
    profile = find_profile(cluster, request.profile)
    longest = allowances.longest_lease(asker.rights)
    return LeaseRow(
        id=new_id("l"),
        seq=draft.next_seq(),
        key=request.key,
        owner=asker.owner,
        groups=tuple(sorted(asker.groups)),
        purpose=Purpose.NOTEBOOK,
        subject=request.server,
        profile=profile.name,
        ask=build_profile_ask(profile),
        created_at=draft.now,
        since=draft.now,
        time_limit_s=choose_time(asked=request.time_limit_s, usual=profile.time_limit, longest=longest),
    )


def find_profile(cluster: Cluster, name: str) -> Profile:
    """The profile of that name.

    Raises:
        InvalidRequest: with the names that there are.
    """
    profile = cluster.profile(name)
    if profile is None:
        valid = ", ".join(known.name for known in cluster.profiles)
        raise InvalidRequest(f"there is no profile {name!r}; there are: {valid}")
    return profile


def build_profile_ask(profile: Profile) -> Ask:
    """What a notebook with this profile asks for."""
    return Ask(
        gpus_per_node=profile.gpu_count,
        models=tuple(gpus.short_model(model) for model in profile.models),
        least_memory_mib=profile.gpu_memory // _MIB,
        least_driver=profile.gpu_driver,
        least_capability=None if profile.gpu_capability is None else gpus.parse_capability(profile.gpu_capability),
        share=profile.gpu_share,
        exclusive=profile.exclusive,
        cpu_milli=round(profile.cpus * 1000),
        memory_mib=profile.memory // _MIB,
    )


def build_job(
    *,
    cluster: Cluster,
    draft: Draft,
    asker: Asker,
    request: JobRequest,
    notebook: LeaseRow | None,
    joined: JobRow | None = None,
    array: str | None = None,
) -> tuple[JobRow, LeaseRow]:
    """A waiting job and its lease. It ends with `notebook`, unless it is detached, and with `joined`.

    Raises:
        InvalidRequest: its demands contradict each other, the time asked for is more than one may have, or there is no
            such profile.
        NotAllowed: a priority above 0 from somebody who is no administrator.
    """
    refuse_contradictions(request)
    if request.priority > 0 and not asker.may_hurry:
        raise NotAllowed(f"priority {request.priority}: only an administrator may ask for more than 0")
    job_id, lease_id = new_id("j"), new_id("l")
    lease = LeaseRow(
        id=lease_id,
        seq=draft.next_seq(),
        key=schedule.job_key(lease_id),
        owner=asker.owner,
        groups=tuple(sorted(asker.groups)),
        purpose=Purpose.JOB,
        subject=job_id,
        profile=None,
        ask=build_job_ask(cluster, request),
        created_at=draft.now,
        since=draft.now,
        time_limit_s=choose_time(
            asked=request.time_limit_s,
            usual=cluster.jobs.time_limit,
            longest=allowances.longest_lease(asker.rights),
            is_usual_the_most=True,
        ),
    )
    job = JobRow(
        id=job_id,
        run_id=request.run_id,
        owner=asker.owner,
        server=request.server,
        notebook_lease=None if notebook is None or request.detached else notebook.id,
        lease_id=lease.id,
        image=choose_image(cluster, request, notebook, joined),
        nnodes=request.nnodes,
        min_nnodes=lease.ask.least_nodes,
        nproc_per_node=request.nproc_per_node,
        gpus=request.gpus,
        array=array,
        detached=request.detached,
        name=request.name,
        joins=request.joins,
        first_worker=request.first_worker,
        created_at=draft.now,
        since=draft.now,
    )
    return job, lease


def choose_image(cluster: Cluster, request: JobRequest, notebook: LeaseRow | None, joined: JobRow | None) -> str:
    """What a job's workers run: the image of the profile that it names, of the run that it joins, of its notebook's
    profile, or the default one.

    Raises:
        InvalidRequest: there is no such profile, or its image is not that of the run to join.
    """
    named = None if request.profile is None else find_profile(cluster, request.profile).image
    if joined is not None:
        if named not in {None, joined.image}:
            raise InvalidRequest(
                f"profile {request.profile!r} has the image {named}; {joined.run_id} runs {joined.image}"
            )
        return joined.image
    if named is not None:
        return named
    profile = cluster.profile(notebook.profile) if notebook is not None and notebook.profile else None
    return DEFAULT_IMAGE if profile is None else profile.image


def find_joined(draft: Draft, owner: str, run_id: str) -> JobRow:
    """The live job of a run that workers are to join.

    Raises:
        InvalidRequest: the owner has none.
    """
    job = schedule.find_run(draft, owner, run_id)
    if job is None or job_rules.is_over(job):
        raise InvalidRequest(f"joins: {owner} has no run {run_id!r} that goes on")
    if job.joins is not None:
        raise InvalidRequest(f"joins: {run_id} has itself joined {job.joins}: name that one")
    return job


def build_job_ask(cluster: Cluster, request: JobRequest) -> Ask:
    """What a job asks for."""
    least = request.nnodes if request.min_nnodes is None else request.min_nnodes
    capability = request.least_capability
    return Ask(
        nodes=request.nnodes,
        least_nodes=least,
        gpus_per_node=request.nproc_per_node,
        spread=request.gpus,
        models=tuple(dict.fromkeys(model for one in request.models if (model := gpus.short_model(one)))),
        least_memory_mib=request.least_memory_mib,
        least_driver=request.least_driver,
        least_capability=None if capability is None else gpus.parse_capability(capability),
        exclude=tuple(sorted(set(request.exclude_nodes))),
        exclusive=request.exclusive,
        same_model=request.same_model,
        batch=request.batch,
        scavenge=request.scavenge,
        priority=request.priority,
        cpu_milli=round(cluster.jobs.cpus * 1000),
        memory_mib=cluster.jobs.memory // _MIB,
    )


def refuse_contradictions(request: JobRequest) -> None:
    """Refuse demands that cannot stand together.

    Raises:
        InvalidRequest: naming them.
    """
    if request.gpus is not None and (request.nnodes, request.nproc_per_node) != (1, 1):
        raise InvalidRequest("gpus: stands instead of nnodes and nproc_per_node, which must then be 1")
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
    if request.detached and (request.gpus or request.nnodes * request.nproc_per_node) > DETACHED_GPUS:
        raise InvalidRequest(f"a detached job may have {DETACHED_GPUS} GPUs at most")


def choose_time(
    *, asked: int | None, usual: int | None, longest: float | None, is_usual_the_most: bool = False
) -> int | None:
    """A lease's time limit in seconds; None for none.

    Raises:
        InvalidRequest: more was asked for than one may have; said is how much that is.
    """
    most = [limit for limit in (longest, usual if is_usual_the_most else None) if limit is not None]
    if asked is not None and most and asked > min(most):
        raise InvalidRequest(
            f"time_limit_s: {format_span(asked)} were asked for, and {format_span(min(most))} are the most one may have"
        )
    limits = [limit for limit in (asked, usual, longest) if limit is not None]
    return round(min(limits)) if limits else None


# -- what is refused --------------------------------------------------------------------------------------------------


def refuse_beyond(lease: LeaseRow, rights: Rights, *, notebook: int = 0, joined: int = 0) -> None:
    """Refuse more GPUs than the owner could ever hold, besides those that the notebook and the run to join keep for as
    long as the request can wait. A detached job outlives its notebook, which therefore keeps nothing.

    Raises:
        InvalidRequest: with the limit.
    """
    limit = allowances.most_gpus(rights)
    least = schedule.build_request(lease).least_size
    if limit is not None and least and least + notebook + joined > limit:
        kept = {"the notebook's": notebook, "the joined run's": joined}
        beside = " and ".join(f"{whose} {count}" for whose, count in kept.items() if count)
        raise InvalidRequest(
            f"{least} GPUs were asked for{f' besides {beside}' if beside else ''}; one user may hold at most {limit}"
        )


def refuse_too_many(draft: Draft, asker: Asker, *, jobs: int = 0) -> None:
    """Refuse one more request, with so many jobs, of an owner who has enough. An array counts as one request.

    Raises:
        TooManyWaiting, TooManyJobs: with the limit.
    """
    _refuse_more(draft, who=asker.owner, limits=asker.rights.each, tag="of", name=asker.owner, jobs=jobs)
    for group, limits in sorted(asker.rights.together.items()):
        _refuse_more(draft, who=f"the group {group}", limits=limits, tag="in", name=group, jobs=jobs)


def _refuse_more(draft: Draft, *, who: str, limits: Limits, tag: str, name: str, jobs: int) -> None:
    if limits.max_waiting is not None:
        waits = count_requests(draft.index, draft.jobs, f"waiting {tag}", name)
        if waits >= limits.max_waiting:
            raise TooManyWaiting(
                f"{who} has {waits} waiting requests, and {limits.max_waiting} is the most one may have: "
                "end one, or wait until one is served"
            )
    if limits.max_jobs is not None and jobs:
        has = len(draft.index.find(f"jobs {tag}", name))
        if has + jobs > limits.max_jobs:
            raise TooManyJobs(
                f"{who} has {has} jobs and asks for {jobs} more; {limits.max_jobs} is the most one may have: "
                "end one, or wait until one ends"
            )


def count_requests(index: Index, jobs: Mapping[str, JobRow], tag: str, name: str) -> int:
    """Waiting requests as limits count them; `tag` is `waiting of` an owner or `waiting in` a group."""
    found: set[str] = set()
    for lease_id in index.find(tag, name):
        job = jobs.get(index.one("job of lease", lease_id) or "")
        found.add((None if job is None else job.array) or lease_id)
    return len(found)


def notebook_lease(draft: Draft, owner: str, server: str) -> LeaseRow | None:
    """The lease of an owner's notebook server that is not ending."""
    live = {LeaseState.REQUESTED, LeaseState.GRANTED, LeaseState.ACTIVE}
    rows = [draft.leases[lease_id] for lease_id in sorted(draft.index.find("server", owner, server))]
    return next((row for row in sorted(rows, key=lambda row: row.seq) if row.state in live), None)
