"""What routes share: who asks, which broker, and what may stand in the query."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from starlette.requests import HTTPConnection

from gpuhub.broker.auth import Identities, Identity
from gpuhub.broker.service import Broker

_header = APIKeyHeader(
    name="Authorization", auto_error=False, description="`token …` with a token of the hub", scheme_name="hub token"
)


async def identify(request: Request, authorization: Annotated[str | None, Depends(_header)]) -> Identity:
    """Who asks."""
    identities = cast("Identities", request.app.state.identities)
    return await identities.identify(authorization, address_of(request))


def address_of(connection: HTTPConnection) -> str:
    """Where a request comes from; the proxy's address for what came through it, whatever its headers say."""
    return connection.client.host if connection.client is not None else ""


async def get_broker(request: Request) -> Broker:
    """The one broker of the app; async, since FastAPI sends other dependencies to a thread."""
    return cast("Broker", request.app.state.broker)


Who = Annotated[Identity, Depends(identify)]
TheBroker = Annotated[Broker, Depends(get_broker)]
Id = Annotated[str, Path(max_length=64)]


async def refuse_unknown_query(request: Request) -> None:
    """Refuse query parameters that the route does not have, as unknown fields of bodies are.

    Raises:
        RequestValidationError: naming the first of them.
    """
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        text = f"there is no such parameter; there are: {', '.join(sorted(known)) or 'none'}"
        raise RequestValidationError([{"loc": ("query", unknown[0][:64]), "msg": text}])
