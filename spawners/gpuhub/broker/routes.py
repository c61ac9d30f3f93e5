"""The broker's HTTP API: parse, authorise, call, translate."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.security import APIKeyHeader

from gpuhub.broker.auth import Identities, Identity
from gpuhub.broker.problems import documented
from gpuhub.broker.schemas import Activation, ClusterView, Job, JobRequest, Lease, LeaseRequest
from gpuhub.broker.service import Broker

#: The longest a long poll waits, seconds.
MAX_WAIT_S = 30.0

_header = APIKeyHeader(
    name="Authorization", auto_error=False, description="`token …` with a token of the hub", scheme_name="hub token"
)


async def identify(request: Request, authorization: Annotated[str | None, Depends(_header)]) -> Identity:
    """Who asks."""
    identities = cast("Identities", request.app.state.identities)
    return await identities.identify(authorization)


def get_broker(request: Request) -> Broker:
    """The one broker of the app."""
    return cast("Broker", request.app.state.broker)


Who = Annotated[Identity, Depends(identify)]
TheBroker = Annotated[Broker, Depends(get_broker)]
WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Wait so long for a change, seconds")]
Version = Annotated[int | None, Query(description="Answer at once when the version is another one")]

public = APIRouter()
api = APIRouter(prefix="/api/v1")


@public.get("/health", response_model_exclude_none=True)
async def health() -> dict[str, str]:
    """The broker runs."""
    return {"status": "ok"}


@public.get("/", include_in_schema=False)
async def root(request: Request) -> RedirectResponse:
    """People find their notebooks in the hub."""
    return RedirectResponse(request.app.state.hub_home)


@api.get("/cluster", responses=documented())
async def get_cluster(who: Who, broker: TheBroker) -> ClusterView:
    """Every node, GPU, profile and waiting request."""
    return broker.cluster_view()


@api.post("/leases", status_code=201, responses=documented(409, 422, 429))
async def post_lease(body: LeaseRequest, who: Who, broker: TheBroker) -> Lease:
    """Ask for a notebook's lease; the server's own one is returned when it has one already."""
    return await broker.request_lease(who, body)


@api.get("/leases", responses=documented())
async def get_leases(who: Who, broker: TheBroker) -> list[Lease]:
    """Leases that have not ended: one's own, or all for an administrator."""
    return broker.leases(who)


@api.get("/leases/{lease_id}", responses=documented(404, 422))
async def get_lease(lease_id: str, who: Who, broker: TheBroker, wait_s: WaitS = 0.0, version: Version = None) -> Lease:
    """One lease; with `wait_s` and `version`, as soon as its version is another one."""
    return await broker.wait_lease(who, lease_id, version, wait_s)


@api.post("/leases/{lease_id}/activate", responses=documented(404, 409, 422))
async def post_activate(lease_id: str, body: Activation, who: Who, broker: TheBroker) -> Lease:
    """The notebook's container is created, and may be started when this succeeds."""
    return await broker.activate(who, lease_id, body)


@api.delete("/leases/{lease_id}", responses=documented(404))
async def delete_lease(lease_id: str, who: Who, broker: TheBroker) -> Lease:
    """End a lease; its GPUs are free when its containers are known to be gone."""
    return await broker.release(who, lease_id)


@api.post("/jobs", status_code=201, responses=documented(422, 429))
async def post_job(body: JobRequest, who: Who, broker: TheBroker) -> Job:
    """Ask for workers, all or none; the run's own job is returned when it has one already."""
    return await broker.request_job(who, body)


@api.get("/jobs", responses=documented())
async def get_jobs(who: Who, broker: TheBroker) -> list[Job]:
    """Jobs that have not ended: one's own, or all for an administrator."""
    return await broker.jobs(who)


@api.get("/jobs/{job_id}", responses=documented(404, 422))
async def get_job(job_id: str, who: Who, broker: TheBroker, wait_s: WaitS = 0.0, version: Version = None) -> Job:
    """One job; with `wait_s` and `version`, as soon as its version is another one."""
    return await broker.wait_job(who, job_id, version, wait_s)


@api.post("/jobs/{job_id}/renew", status_code=204, response_class=Response, responses=documented(404, 409))
async def post_renew(job_id: str, who: Who, broker: TheBroker) -> None:
    """The launch is still there; a job that nobody renews ends."""
    await broker.renew(who, job_id)


@api.delete("/jobs/{job_id}", responses=documented(404))
async def delete_job(job_id: str, who: Who, broker: TheBroker) -> Job:
    """Stop a job; its GPUs are free when its state is `ended`."""
    return await broker.stop_job(who, job_id)
