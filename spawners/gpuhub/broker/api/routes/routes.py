"""HTTP routes of leases, jobs, the cluster and administration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from gpuhub.broker import audit
from gpuhub.broker.api.auth import Authenticator
from gpuhub.broker.api.dependencies import (
    API,
    MAX_INT,
    After,
    Caller,
    OfGroups,
    Owner,
    ResourceId,
    header,
    identify,
    refuse_unknown_query,
)
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.metrics.exporter import MetricsExporter
from gpuhub.broker.operations.admin import AdminOperations
from gpuhub.broker.operations.notebook_datasets import LeaseStaging
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.broker.operations.recipes import RecipeOperations
from gpuhub.broker.views import slices
from gpuhub.broker_api.schemas import (
    ActivationRequest,
    ArrayRequest,
    ClusterView,
    CordonRequest,
    EventView,
    ExtensionRequest,
    JobRequest,
    JobView,
    LeaseRequest,
    LeaseState,
    LeaseView,
    NodeView,
    PendingReasonView,
    RecipeView,
    ReservationRequest,
    ReservationView,
    StagingView,
    UsageView,
)

#: Maximum wait of a long poll, seconds.
MAX_WAIT_S = 30.0
#: Maximum number of events in one answer.
MAX_EVENTS = 1000


async def check_metrics_reader(request: Request, authorization: Annotated[str | None, Depends(header)]) -> None:
    """Refuse callers who may not read metrics."""
    authenticator = cast("Authenticator", request.app.state.authenticator)
    await authenticator.check_metrics_reader(authorization, audit.client_address(request.scope))


async def get_broker(request: Request) -> BrokerOperations:
    """Return the app's operations; async, since FastAPI runs other dependencies in a thread."""
    return cast("BrokerOperations", request.app.state.broker)


async def get_admin(request: Request) -> AdminOperations:
    """Return the operations for administrators."""
    return cast("AdminOperations", request.app.state.admin)


async def get_staging(request: Request) -> LeaseStaging:
    """Return the app's transfers of datasets."""
    return cast("LeaseStaging", request.app.state.staging)


async def get_recipe_operations(request: Request) -> RecipeOperations:
    """Return the app's recipes."""
    return cast("RecipeOperations", request.app.state.recipes)


async def render_list(views: Sequence[BaseModel], status: int = 200) -> Response:
    """Return views as JSON; FastAPI would check and convert all of them at once, which takes long for thousands."""
    texts = await slices.collect(view.model_dump_json() for view in views)
    return Response(f"[{','.join(texts)}]", status, media_type="application/json")


Operations = Annotated[BrokerOperations, Depends(get_broker)]
Admin = Annotated[AdminOperations, Depends(get_admin)]
Staging = Annotated[LeaseStaging, Depends(get_staging)]
Recipes = Annotated[RecipeOperations, Depends(get_recipe_operations)]
WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Maximum wait for a change, seconds")]
Version = Annotated[int | None, Query(ge=0, le=MAX_INT, description="Answer at once if the current version differs")]
Limit = Annotated[
    int,
    Query(
        ge=1, le=MAX_EVENTS, description="Maximum number of events: the newest ones, or the first ones after `after`"
    ),
]
State = Annotated[LeaseState | None, Query(description="Only those in this state")]
OnNode = Annotated[str | None, Query(max_length=64, description="Only those with containers on this node")]
Ended = Annotated[bool, Query(description="Also jobs that ended within `[jobs] remember`; newest first, at most 200")]
Node = Annotated[str, Path(max_length=64)]
GpuIndex = Annotated[int, Path(ge=0, le=255)]

public = APIRouter()
api = APIRouter(prefix=API, dependencies=[Depends(identify), Depends(refuse_unknown_query)])
#: For programs that need none of the broker's other routes, with a token for nothing else.
metrics = APIRouter(prefix=API, dependencies=[Depends(check_metrics_reader), Depends(refuse_unknown_query)])


@metrics.get(
    "/metrics",
    tags=["cluster"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **document_problems(422)},
)
async def get_metrics(request: Request) -> Response:
    """Return the broker's metrics in Prometheus' text format, for tokens with the scope `read:metrics`."""
    exporter = cast("MetricsExporter", request.app.state.metrics)
    return Response(await exporter.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@public.get("/health", response_model_exclude_none=True)
async def health() -> dict[str, str]:
    """Report that the broker runs."""
    return {"status": "ok"}


@public.get("/", include_in_schema=False)
async def root(request: Request) -> RedirectResponse:
    """Redirect to the hub's page of GPUs."""
    return RedirectResponse(request.app.state.hub_page)


# -- leases -----------------------------------------------------------------------------------------------------------


@api.post("/leases", status_code=201, tags=["leases"], responses=document_problems(409, 413, 422, 429))
async def post_lease(body: LeaseRequest, caller: Caller, broker: Operations, wait_s: WaitS = 0.0) -> LeaseView:
    """Request a lease for a notebook; a server that has a lease already gets that one.

    With `wait_s`, the answer comes with the grant, at the latest after that time.
    """
    return await broker.request_lease(caller, body, wait_s)


@api.get("/leases", tags=["leases"], response_model=list[LeaseView], responses=document_problems(422))
async def get_leases(
    caller: Caller, broker: Operations, owner: Owner = None, state: State = None, node: OnNode = None
) -> Response:
    """Return leases that have not ended: the caller's own, or all for an administrator."""
    return await render_list(await broker.leases(caller, owner=owner, state=state, node=node))


@api.get("/leases/{lease_id}", tags=["leases"], responses=document_problems(404, 422))
async def get_lease(
    lease_id: ResourceId, caller: Caller, broker: Operations, wait_s: WaitS = 0.0, version: Version = None
) -> LeaseView:
    """Return one lease; with `wait_s` and `version`, as soon as its version differs."""
    return await broker.wait_lease(caller, lease_id, version, wait_s)


@api.delete("/leases/{lease_id}", tags=["leases"], responses=document_problems(404, 422))
async def delete_lease(lease_id: ResourceId, caller: Caller, broker: Operations, wait_s: WaitS = 0.0) -> LeaseView:
    """Release a lease; its GPUs are free when its containers are proven to be gone.

    With `wait_s`, the answer comes with that proof, at the latest after that time.
    """
    return await broker.release(caller, lease_id, wait_s)


@api.post("/leases/{lease_id}/activate", tags=["leases"], responses=document_problems(404, 409, 413, 422))
async def post_activate(lease_id: ResourceId, body: ActivationRequest, caller: Caller, broker: Operations) -> LeaseView:
    """Record the notebook's container, which may be started after this succeeds."""
    return await broker.activate(caller, lease_id, body)


@api.post("/leases/{lease_id}/stage", tags=["leases"], responses=document_problems(404, 409, 422))
async def post_stage(lease_id: ResourceId, caller: Caller, staging: Staging, wait_s: WaitS = 0.0) -> StagingView:
    """Copy the datasets of a notebook's granted lease to its node's disk; for the hub's spawner only.

    The answer comes when all are there, or after `wait_s` with the progress.
    """
    return await staging.stage(caller, lease_id, wait_s)


@api.get("/leases/{lease_id}/why", tags=["leases"], responses=document_problems(404, 409, 422))
async def get_why(lease_id: ResourceId, caller: Caller, broker: Operations) -> PendingReasonView:
    """Explain why a request waits, and when it would start without each of its requirements."""
    return await broker.why(caller, lease_id)


@api.post("/leases/{lease_id}/extend", tags=["leases"], responses=document_problems(404, 409, 413, 422))
async def post_extend(lease_id: ResourceId, body: ExtensionRequest, caller: Caller, broker: Operations) -> LeaseView:
    """Extend a lease within its limits, unless other requests wait for its GPUs."""
    return await broker.extend(caller, lease_id, body)


@api.post("/leases/{lease_id}/force", tags=["leases"], responses=document_problems(404, 409, 422))
async def post_force(lease_id: ResourceId, caller: Caller, broker: Operations) -> LeaseView:
    """Free a lease's GPUs without proof that its containers are gone. Administrators only."""
    return await broker.force(caller, lease_id)


# -- jobs -------------------------------------------------------------------------------------------------------------


@api.post("/jobs", status_code=201, tags=["jobs"], responses=document_problems(409, 413, 422, 429))
async def post_job(body: JobRequest, caller: Caller, broker: Operations) -> JobView:
    """Request workers, all or none; a run that has a job already gets that one."""
    return await broker.request_job(caller, body)


@api.get("/jobs", tags=["jobs"], response_model=list[JobView], responses=document_problems(422))
async def get_jobs(caller: Caller, broker: Operations, ended: Ended = False) -> Response:
    """Return jobs that have not ended, with `ended` also recent ones: the caller's own, or all for an administrator."""
    return await render_list(await broker.jobs(caller, ended=ended))


@api.post(
    "/jobs/arrays",
    status_code=201,
    tags=["jobs"],
    response_model=list[JobView],
    responses=document_problems(409, 413, 422, 429),
)
async def post_array(body: ArrayRequest, caller: Caller, broker: Operations) -> Response:
    """Request an array of jobs with one GPU each; all are accepted, or none."""
    return await render_list(await broker.request_array(caller, body), status=201)


@api.get("/jobs/{job_id}", tags=["jobs"], responses=document_problems(404, 422))
async def get_job(
    job_id: ResourceId, caller: Caller, broker: Operations, wait_s: WaitS = 0.0, version: Version = None
) -> JobView:
    """Return one job; with `wait_s` and `version`, as soon as its version differs."""
    return await broker.wait_job(caller, job_id, version, wait_s)


@api.delete("/jobs/{job_id}", tags=["jobs"], responses=document_problems(404, 422))
async def delete_job(job_id: ResourceId, caller: Caller, broker: Operations) -> JobView:
    """Stop a job; its GPUs are free when its state is `ended`."""
    return await broker.stop_job(caller, job_id)


@api.post(
    "/jobs/{job_id}/renew",
    status_code=204,
    response_class=Response,
    tags=["jobs"],
    responses=document_problems(404, 409, 422),
)
async def post_renew(job_id: ResourceId, caller: Caller, broker: Operations) -> None:
    """Report that the launch still runs; a job without these heartbeats ends."""
    await broker.renew(caller, job_id)


# -- the cluster ------------------------------------------------------------------------------------------------------


@api.get("/cluster", tags=["cluster"], response_model=ClusterView, responses=document_problems(422))
async def get_cluster(caller: Caller, broker: Operations, group: OfGroups = ()) -> Response:
    """Return every node, GPU, profile, waiting request and reservation, as the caller sees them."""
    return Response(broker.cluster_json(caller, group), media_type="application/json")


@api.get("/recipes", tags=["jobs"], responses=document_problems(422))
async def get_recipes(_caller: Caller, recipes: Recipes) -> list[RecipeView]:
    """Return the lab's own recipes for `gpu-launch run recipe:NAME`."""
    return await recipes.list_recipes()


@api.get("/usage", tags=["cluster"], responses=document_problems(422))
async def get_usage(caller: Caller, broker: Operations, owner: Owner = None) -> list[UsageView]:
    """Return usage and limits: the caller's own, or those of all users or of `owner` for an administrator."""
    return await broker.usage(caller, owner)


@api.get("/events", tags=["cluster"], responses=document_problems(422))
async def get_events(caller: Caller, broker: Operations, after: After = None, limit: Limit = 100) -> list[EventView]:
    """Return events, oldest first: those about the caller, or all for an administrator."""
    return await broker.events(caller, after, limit)


@api.get("/nodes", tags=["nodes"], responses=document_problems(422))
async def get_nodes(caller: Caller, broker: Operations) -> list[NodeView]:
    """Return every node with its GPUs."""
    return list(broker.nodes(caller))


@api.post("/nodes/{name}/cordon", tags=["nodes"], responses=document_problems(404, 413, 422))
async def post_cordon(name: Node, body: CordonRequest, caller: Caller, admin: Admin) -> NodeView:
    """Cordon a node: it takes no new work, and what runs there continues. Administrators only."""
    return await admin.cordon(caller, name, body)


@api.post("/nodes/{name}/drain", tags=["nodes"], responses=document_problems(404, 413, 422))
async def post_drain(name: Node, body: CordonRequest, caller: Caller, admin: Admin) -> NodeView:
    """Drain a node: it takes no new work, and what runs there ends after the grace period. Administrators only."""
    return await admin.drain(caller, name, body)


@api.post("/nodes/{name}/undrain", tags=["nodes"], responses=document_problems(404, 422))
async def post_undrain(name: Node, caller: Caller, admin: Admin) -> NodeView:
    """End the cordon or drain of a node, so that it takes work again. Administrators only."""
    return await admin.undrain(caller, name)


@api.post("/nodes/{name}/gpus/{index}/accept", tags=["nodes"], responses=document_problems(404, 409, 422))
async def post_accept(name: Node, index: GpuIndex, caller: Caller, admin: Admin) -> NodeView:
    """Grant a GPU again that was blocked by an Xid error or a slow PCIe link. Administrators only."""
    return await admin.accept_gpu(caller, name, index)


@api.get("/reservations", tags=["reservations"], responses=document_problems(422))
async def get_reservations(caller: Caller, broker: Operations) -> list[ReservationView]:
    """Return all reservations that have not ended."""
    return broker.reservations()


@api.post("/reservations", status_code=201, tags=["reservations"], responses=document_problems(409, 413, 422))
async def post_reservation(body: ReservationRequest, caller: Caller, admin: Admin) -> ReservationView:
    """Reserve GPUs for some users in a period. Administrators only."""
    return await admin.reserve(caller, body)


@api.delete(
    "/reservations/{reservation_id}",
    status_code=204,
    response_class=Response,
    tags=["reservations"],
    responses=document_problems(404, 422),
)
async def delete_reservation(reservation_id: ResourceId, caller: Caller, admin: Admin) -> None:
    """Cancel a reservation. Administrators only."""
    await admin.cancel_reservation(caller, reservation_id)
