"""What the broker's HTTP routes share: who calls, which parameters they have, and what a caller may not send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader

from gpuhub.broker import audit
from gpuhub.broker.api.auth import Authenticator
from gpuhub.broker.api.lists import ListRenderer
from gpuhub.broker.api.streams import AccessWatch
from gpuhub.broker.operations.admin import AdminOperations
from gpuhub.broker.operations.cluster import ClusterOperations
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.broker_api.schemas import GroupName, UserName
from gpuhub.domain.models import Identity

#: Path prefix of the broker's own routes at the hub's proxy.
PREFIX = "/services/broker"
#: Path prefix, after that, of every route that needs a token.
API = "/api/v1"
#: Largest integer of a database column, and of a file's size.
MAX_INT = 2**63 - 1
#: Maximum number of fields of an object in a body.
MAX_FIELDS = 100
#: Maximum wait of a long poll, seconds.
MAX_WAIT_S = 30.0

header = APIKeyHeader(
    name="Authorization", auto_error=False, description="`token …` with a token of the hub", scheme_name="hub token"
)


async def identify(request: Request, authorization: Annotated[str | None, Depends(header)]) -> Identity:
    """Return the caller of a request."""
    authenticator = cast("Authenticator", request.app.state.authenticator)
    return await authenticator.identify(authorization, audit.client_address(request.scope))


async def get_access_watch(request: Request, authorization: Annotated[str | None, Depends(header)]) -> AccessWatch:
    """Return the watch over the caller of a stream."""
    authenticator = cast("Authenticator", request.app.state.authenticator)
    return AccessWatch(
        authenticator=authenticator, authorization=authorization, address=audit.client_address(request.scope)
    )


async def refuse_unknown_query(request: Request) -> None:
    """Refuse query parameters that the route does not have, like unknown fields of bodies.

    Raises:
        RequestValidationError: names the first of them.
    """
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        text = f"there is no such parameter; valid here: {', '.join(sorted(known)) or 'none'}"
        raise RequestValidationError([{"loc": ("query", unknown[0][:64]), "msg": text}])


async def refuse_large_objects(request: Request) -> None:
    """Refuse objects of a body with more fields than any has: each unknown one would be an error, all in one step.

    Raises:
        RequestValidationError: there is such an object.
    """
    # As FastAPI has parsed it; a route without a body in JSON has none.
    pending = [getattr(request, "_json", None)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                text = f"an object has {len(value)} fields; no known one has more than {MAX_FIELDS}"
                raise RequestValidationError([{"loc": ("body",), "msg": text}])
            pending += value.values()


async def get_broker(request: Request) -> BrokerOperations:
    """Return the operations on leases and jobs; async, since FastAPI runs other dependencies in a thread."""
    return cast("BrokerOperations", request.app.state.broker)


async def get_cluster_operations(request: Request) -> ClusterOperations:
    """Return the operations that show the cluster."""
    return cast("ClusterOperations", request.app.state.cluster)


async def get_admin(request: Request) -> AdminOperations:
    """Return the operations for administrators."""
    return cast("AdminOperations", request.app.state.admin)


def create_router(tag: str) -> APIRouter:
    """Return a router for routes of users with a token, which stand below `tag` in the API's documentation."""
    checks = (identify, refuse_unknown_query, refuse_large_objects)
    return APIRouter(prefix=API, dependencies=[Depends(check) for check in checks], tags=[tag])


Caller = Annotated[Identity, Depends(identify)]


async def hold_list(request: Request, caller: Caller) -> AsyncIterator[ListRenderer]:
    """Yield the app's renderer of lists, and count a list until it is sent."""
    lists = cast("ListRenderer", request.app.state.lists)
    with lists.acquire(caller):
        yield lists


Lists = Annotated[ListRenderer, Depends(hold_list)]
Watch = Annotated[AccessWatch, Depends(get_access_watch)]
Broker = Annotated[BrokerOperations, Depends(get_broker)]
Cluster = Annotated[ClusterOperations, Depends(get_cluster_operations)]
Admin = Annotated[AdminOperations, Depends(get_admin)]
ResourceId = Annotated[str, Path(max_length=64)]
After = Annotated[int | None, Query(ge=0, le=MAX_INT, description="Only events after this `seq`")]
Owner = Annotated[UserName | None, Query(description="Only those of this owner")]
OfGroups = Annotated[
    tuple[GroupName, ...],
    Query(max_length=64, description="As a user in these groups sees it; only for the hub's spawner"),
]
WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Maximum wait for a change, seconds")]
Version = Annotated[int | None, Query(ge=0, le=MAX_INT, description="Answer at once if the current version differs")]
