"""Requests checked against the settings and what there is, before anything is kept. Pure."""

from __future__ import annotations

import secrets

from gpuhub import gpus
from gpuhub.broker.ledger import Draft
from gpuhub.broker.refusals import TooManyWaiting
from gpuhub.broker.rows import Ask, JobRow, LeaseRow
from gpuhub.broker.schedule import build_request
from gpuhub.broker.schemas import JobRequest, LeaseRequest, LeaseState, Purpose
from gpuhub.engines.base import Engine
from gpuhub.errors import InvalidRequest
from gpuhub.nodes.inventory import Inventory
from gpuhub.settings import Cluster, gpu_requirement

DEFAULT_IMAGE = "gpuhub/notebook:latest"


def new_id(prefix: str) -> str:
    """An id that nobody can guess: `l` for leases, `j` for jobs."""
    return f"{prefix}{secrets.token_hex(8)}"


def build_notebook_lease(*, cluster: Cluster, draft: Draft, owner: str, request: LeaseRequest) -> LeaseRow:
    """A waiting lease for a notebook.

    Raises:
        InvalidRequest: there is no such profile.
    """
    profile = cluster.profile(request.profile)
    if profile is None:
        valid = ", ".join(known.name for known in cluster.profiles)
        raise InvalidRequest(f"there is no profile {request.profile!r}; there are: {valid}")
    requirement = gpu_requirement(profile)
    return LeaseRow(
        id=new_id("l"),
        seq=draft.next_seq(),
        key=request.key,
        owner=owner,
        purpose=Purpose.NOTEBOOK,
        subject=request.server,
        profile=profile.name,
        ask=Ask(
            gpus_per_node=profile.gpu_count,
            model=requirement.model,
            least_memory_mib=requirement.least_memory_mib,
        ),
        created_at=draft.now,
        since=draft.now,
        time_limit_s=profile.time_limit,
    )


def build_job(
    *, cluster: Cluster, draft: Draft, owner: str, request: JobRequest, notebook: LeaseRow | None
) -> tuple[JobRow, LeaseRow]:
    """A waiting job and its lease; it runs the notebook's own image."""
    job_id = new_id("j")
    model = None if request.model is None else gpus.short_model(request.model)
    lease = LeaseRow(
        id=new_id("l"),
        seq=draft.next_seq(),
        key=f"job:{request.run_id}",
        owner=owner,
        purpose=Purpose.JOB,
        subject=job_id,
        profile=None,
        ask=Ask(
            nodes=request.nnodes,
            gpus_per_node=request.nproc_per_node,
            model=model or None,
            exclude=tuple(sorted(set(request.exclude_nodes))),
        ),
        created_at=draft.now,
        since=draft.now,
        time_limit_s=cluster.jobs.time_limit,
    )
    profile = cluster.profile(notebook.profile) if notebook is not None and notebook.profile else None
    job = JobRow(
        id=job_id,
        run_id=request.run_id,
        owner=owner,
        server=request.server,
        notebook_lease=None if notebook is None else notebook.id,
        lease_id=lease.id,
        image=DEFAULT_IMAGE if profile is None else profile.image,
        nnodes=request.nnodes,
        nproc_per_node=request.nproc_per_node,
        created_at=draft.now,
        since=draft.now,
    )
    return job, lease


def refuse_hopeless(
    *, lease: LeaseRow, notebook: LeaseRow | None, cluster: Cluster, inventory: Inventory, engine: Engine
) -> None:
    """Refuse what can never be granted.

    Raises:
        InvalidRequest: with what there is.
    """
    why = engine.infeasible(build_request(lease), inventory.cards())
    if why is not None:
        raise InvalidRequest(why)
    limit = cluster.users.max_gpus
    # A job ends with its notebook, so the notebook's own GPUs stay held for as long as the job waits.
    kept = 0 if notebook is None else len(notebook.held)
    if limit is not None and lease.ask.size and lease.ask.size + kept > limit:
        beside = f" besides the notebook's {kept}" if kept else ""
        raise InvalidRequest(f"{lease.ask.size} GPUs were asked for{beside}; one user may hold at most {limit}")


def refuse_too_many(draft: Draft, owner: str, max_waiting: int) -> None:
    """Refuse a request of an owner who has enough waiting ones.

    Raises:
        TooManyWaiting: with the limit.
    """
    waits = sum(row.owner == owner and row.state is LeaseState.WAITING for row in draft.leases.values())
    if waits >= max_waiting:
        raise TooManyWaiting(
            f"{owner} has {waits} waiting requests, and {max_waiting} is the most one may have: "
            "end one, or wait until one is served"
        )


def notebook_lease(draft: Draft, owner: str, server: str) -> LeaseRow | None:
    """The lease of an owner's notebook server that is not ending."""
    live = {LeaseState.WAITING, LeaseState.GRANTED, LeaseState.ACTIVE}
    return next(
        (
            row
            for row in draft.leases.values()
            if row.owner == owner and row.purpose is Purpose.NOTEBOOK and row.subject == server and row.state in live
        ),
        None,
    )
