"""The broker's HTTP API: parse, authorise, call, translate."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from gpuhub.broker.asking import Id, TheBroker, Who, identify, refuse_unknown_query
from gpuhub.broker.problems import documented
from gpuhub.broker.schemas import (
    Activation,
    ArrayRequest,
    ClusterView,
    CordonRequest,
    Event,
    Extension,
    Job,
    JobRequest,
    Lease,
    LeaseRequest,
    LeaseState,
    NodeView,
    Reservation,
    ReservationRequest,
    UsageView,
    UserName,
    Why,
)

#: The longest a long poll waits, seconds.
MAX_WAIT_S = 30.0
#: The most events of one answer.
MAX_EVENTS = 1000
#: What a database column holds.
_MAX_INT = 2**63 - 1

WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Wait so long for a change, seconds")]
Version = Annotated[int | None, Query(ge=0, le=_MAX_INT, description="Answer at once when the version is another one")]
After = Annotated[int | None, Query(ge=0, le=_MAX_INT, description="Only events later than this `seq`")]
Limit = Annotated[int, Query(ge=1, le=MAX_EVENTS, description="So many at most: the newest, or those next after")]
Owner = Annotated[UserName | None, Query(description="One owner's alone")]
State = Annotated[LeaseState | None, Query(description="In this state alone")]
OnNode = Annotated[str | None, Query(max_length=64, description="With containers on this node alone")]
Ended = Annotated[bool, Query(description="Also those that ended within `[jobs] remember`: newest first, 200 at most")]
Node = Annotated[str, Path(max_length=64)]


#: What every route that needs a token begins with.
API = "/api/v1"

public = APIRouter()
api = APIRouter(prefix=API, dependencies=[Depends(identify), Depends(refuse_unknown_query)])


@public.get("/health", response_model_exclude_none=True)
async def health() -> dict[str, str]:
    """The broker runs."""
    return {"status": "ok"}


@public.get("/", include_in_schema=False)
async def root(request: Request) -> RedirectResponse:
    """People find the GPUs in the hub."""
    return RedirectResponse(request.app.state.hub_page)


# -- leases -----------------------------------------------------------------------------------------------------------


@api.post("/leases", status_code=201, tags=["leases"], responses=documented(409, 413, 422, 429))
async def post_lease(body: LeaseRequest, who: Who, broker: TheBroker) -> Lease:
    """Ask for a notebook's lease; the server's own one is returned when it has one already."""
    return await broker.request_lease(who, body)


@api.get("/leases", tags=["leases"], responses=documented(422))
async def get_leases(
    who: Who, broker: TheBroker, owner: Owner = None, state: State = None, node: OnNode = None
) -> list[Lease]:
    """Leases that have not ended: one's own, or all for an administrator."""
    return [
        lease
        for lease in broker.leases(who)
        if (owner is None or lease.owner == owner)
        and (state is None or lease.state is state)
        and (node is None or node in lease.nodes)
    ]


@api.get("/leases/{lease_id}", tags=["leases"], responses=documented(404, 422))
async def get_lease(lease_id: Id, who: Who, broker: TheBroker, wait_s: WaitS = 0.0, version: Version = None) -> Lease:
    """One lease; with `wait_s` and `version`, as soon as its version is another one."""
    return await broker.wait_lease(who, lease_id, version, wait_s)


@api.delete("/leases/{lease_id}", tags=["leases"], responses=documented(404, 422))
async def delete_lease(lease_id: Id, who: Who, broker: TheBroker) -> Lease:
    """End a lease; its GPUs are free when its containers are known to be gone."""
    return await broker.release(who, lease_id)


@api.post("/leases/{lease_id}/activate", tags=["leases"], responses=documented(404, 409, 413, 422))
async def post_activate(lease_id: Id, body: Activation, who: Who, broker: TheBroker) -> Lease:
    """The notebook's container is created, and may be started when this succeeds."""
    return await broker.activate(who, lease_id, body)


@api.get("/leases/{lease_id}/why", tags=["leases"], responses=documented(404, 409, 422))
async def get_why(lease_id: Id, who: Who, broker: TheBroker) -> Why:
    """Why a request waits: what for, since when, and what each of its own demands costs it."""
    return await broker.why(who, lease_id)


@api.post("/leases/{lease_id}/extend", tags=["leases"], responses=documented(404, 409, 413, 422))
async def post_extend(lease_id: Id, body: Extension, who: Who, broker: TheBroker) -> Lease:
    """More time, within the limits and while nobody waits for these GPUs."""
    return await broker.extend(who, lease_id, body)


@api.post("/leases/{lease_id}/force", tags=["leases"], responses=documented(404, 409, 422))
async def post_force(lease_id: Id, who: Who, broker: TheBroker) -> Lease:
    """Free a lease's GPUs without proof that its containers are gone. Administrators only."""
    return await broker.force(who, lease_id)


# -- jobs -------------------------------------------------------------------------------------------------------------


@api.post("/jobs", status_code=201, tags=["jobs"], responses=documented(409, 413, 422, 429))
async def post_job(body: JobRequest, who: Who, broker: TheBroker) -> Job:
    """Ask for workers, all or none; the run's own job is returned when it has one already."""
    return await broker.request_job(who, body)


@api.get("/jobs", tags=["jobs"], responses=documented(422))
async def get_jobs(who: Who, broker: TheBroker, ended: Ended = False) -> list[Job]:
    """Jobs that have not ended: one's own, or all for an administrator. With `ended`, also those that ended lately."""
    return await broker.jobs(who, ended=ended)


@api.post("/jobs/arrays", status_code=201, tags=["jobs"], responses=documented(409, 413, 422, 429))
async def post_array(body: ArrayRequest, who: Who, broker: TheBroker) -> list[Job]:
    """Ask for many jobs of one GPU each; all of them are kept, or none."""
    return await broker.request_array(who, body)


@api.get("/jobs/{job_id}", tags=["jobs"], responses=documented(404, 422))
async def get_job(job_id: Id, who: Who, broker: TheBroker, wait_s: WaitS = 0.0, version: Version = None) -> Job:
    """One job; with `wait_s` and `version`, as soon as its version is another one."""
    return await broker.wait_job(who, job_id, version, wait_s)


@api.delete("/jobs/{job_id}", tags=["jobs"], responses=documented(404, 422))
async def delete_job(job_id: Id, who: Who, broker: TheBroker) -> Job:
    """Stop a job; its GPUs are free when its state is `ended`."""
    return await broker.stop_job(who, job_id)


@api.post(
    "/jobs/{job_id}/renew",
    status_code=204,
    response_class=Response,
    tags=["jobs"],
    responses=documented(404, 409, 422),
)
async def post_renew(job_id: Id, who: Who, broker: TheBroker) -> None:
    """The launch is still there; a job that nobody renews ends."""
    await broker.renew(who, job_id)


# -- the cluster ------------------------------------------------------------------------------------------------------


@api.get("/cluster", tags=["cluster"], response_model=ClusterView, responses=documented(422))
async def get_cluster(who: Who, broker: TheBroker) -> Response:
    """Every node, GPU, profile, waiting request and reservation."""
    return Response(broker.cluster_json(who), media_type="application/json")


@api.get("/usage", tags=["cluster"], responses=documented(422))
async def get_usage(who: Who, broker: TheBroker, owner: Owner = None) -> list[UsageView]:
    """What owners have, had and may have: oneself, or all (or `owner`) for an administrator."""
    return await broker.usage(who, owner)


@api.get("/events", tags=["cluster"], responses=documented(422))
async def get_events(who: Who, broker: TheBroker, after: After = None, limit: Limit = 100) -> list[Event]:
    """What the broker did and found out, oldest first: about oneself, or everything for an administrator."""
    return await broker.events(who, after, limit)


@api.get("/nodes", tags=["nodes"], responses=documented(422))
async def get_nodes(who: Who, broker: TheBroker) -> list[NodeView]:
    """Every node with its GPUs."""
    return list(broker.cluster_view(who).nodes)


@api.post("/nodes/{name}/cordon", tags=["nodes"], responses=documented(404, 413, 422))
async def post_cordon(name: Node, body: CordonRequest, who: Who, broker: TheBroker) -> NodeView:
    """Let a node take no new work; what runs there goes on. Administrators only."""
    return await broker.cordon(who, name, body)


@api.post("/nodes/{name}/drain", tags=["nodes"], responses=documented(404, 413, 422))
async def post_drain(name: Node, body: CordonRequest, who: Who, broker: TheBroker) -> NodeView:
    """Let a node take no new work, and end what runs there after the grace. Administrators only."""
    return await broker.drain(who, name, body)


@api.post("/nodes/{name}/undrain", tags=["nodes"], responses=documented(404, 422))
async def post_undrain(name: Node, who: Who, broker: TheBroker) -> NodeView:
    """Let a node take work again. Administrators only."""
    return await broker.undrain(who, name)


@api.get("/reservations", tags=["reservations"], responses=documented(422))
async def get_reservations(who: Who, broker: TheBroker) -> list[Reservation]:
    """All reservations that have not ended."""
    return broker.reservations()


@api.post("/reservations", status_code=201, tags=["reservations"], responses=documented(409, 413, 422))
async def post_reservation(body: ReservationRequest, who: Who, broker: TheBroker) -> Reservation:
    """Keep GPUs for some users in a window. Administrators only."""
    return await broker.reserve(who, body)


@api.delete(
    "/reservations/{reservation_id}",
    status_code=204,
    response_class=Response,
    tags=["reservations"],
    responses=documented(404, 422),
)
async def delete_reservation(reservation_id: Id, who: Who, broker: TheBroker) -> None:
    """Cancel a reservation. Administrators only."""
    await broker.cancel_reservation(who, reservation_id)
