"""Dependencies of the routes: the caller, the operations, and the check of the query."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from starlette.requests import HTTPConnection

from gpuhub.broker.api.auth import Authenticator
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.domain.models import Identity

_header = APIKeyHeader(
    name="Authorization", auto_error=False, description="`token …` with a token of the hub", scheme_name="hub token"
)


async def identify(request: Request, authorization: Annotated[str | None, Depends(_header)]) -> Identity:
    """Return the caller of a request."""
    authenticator = cast("Authenticator", request.app.state.authenticator)
    return await authenticator.identify(authorization, client_address(request))


def client_address(connection: HTTPConnection) -> str:
    """Return the address of the client, which is the proxy's for requests through it; headers do not count."""
    return connection.client.host if connection.client is not None else ""


async def get_broker(request: Request) -> BrokerOperations:
    """Return the app's operations; async, since FastAPI runs other dependencies in a thread."""
    return cast("BrokerOperations", request.app.state.broker)


Caller = Annotated[Identity, Depends(identify)]
Operations = Annotated[BrokerOperations, Depends(get_broker)]
ResourceId = Annotated[str, Path(max_length=64)]


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
