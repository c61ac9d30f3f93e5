"""HTTP routes of the cluster as a whole: its state, usage, events and metrics."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from gpuhub.broker import audit
from gpuhub.broker.api.auth import Authenticator
from gpuhub.broker.api.dependencies import (
    API,
    After,
    Caller,
    Cluster,
    Lists,
    OfGroups,
    Owner,
    create_router,
    header,
    refuse_unknown_query,
)
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.metrics.exporter import MetricsExporter
from gpuhub.broker_api.schemas import ClusterView, EventView, UsageView

#: Maximum number of events in one answer.
MAX_EVENTS = 1000


async def check_metrics_reader(request: Request, authorization: Annotated[str | None, Depends(header)]) -> None:
    """Refuse callers who may not read metrics."""
    authenticator = cast("Authenticator", request.app.state.authenticator)
    await authenticator.check_metrics_reader(authorization, audit.client_address(request.scope))


Limit = Annotated[
    int,
    Query(
        ge=1, le=MAX_EVENTS, description="Maximum number of events: the newest ones, or the first ones after `after`"
    ),
]

public = APIRouter()
#: For programs that need none of the broker's other routes, with a token for nothing else.
metrics = APIRouter(
    prefix=API, dependencies=[Depends(check_metrics_reader), Depends(refuse_unknown_query)], tags=["cluster"]
)

api = create_router("cluster")


@metrics.get(
    "/metrics",
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


@api.get("/cluster", response_model=ClusterView, responses=document_problems(422))
async def get_cluster(caller: Caller, cluster: Cluster, group: OfGroups = ()) -> Response:
    """Return every node, GPU, profile, waiting request and reservation, as the caller sees them."""
    return Response(cluster.cluster_json(caller, group), media_type="application/json")


@api.get("/usage", responses=document_problems(422))
async def get_usage(caller: Caller, cluster: Cluster, owner: Owner = None) -> list[UsageView]:
    """Return usage and limits: the caller's own, or those of all users or of `owner` for an administrator."""
    return await cluster.usage(caller, owner)


@api.get("/events", response_model=list[EventView], responses=document_problems(422, 429))
async def get_events(
    caller: Caller, cluster: Cluster, lists: Lists, after: After = None, limit: Limit = 100
) -> Response:
    """Return events, oldest first: those about the caller, or all for an administrator."""
    return await lists.render(caller, await cluster.events(caller, after, limit))
