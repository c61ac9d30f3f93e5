"""Services that stay, at `/services/NAME/` for programs with a token or the key of a running job, and for browsers at
`/service-visits/NAME/KEY/`.

As for servers of jobs, neither takes a cookie, and pages are sandboxed: a service shows what users have sent it.
"""

from __future__ import annotations

from typing import Annotated, cast
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from gpuhub.broker.admission import access
from gpuhub.broker.api.dependencies import API, Caller, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.api.routes import port_routes
from gpuhub.broker.api.routes.port_routes import METHODS, PortResponse, PortTarget
from gpuhub.broker.api.routes.port_websockets import serve_websocket
from gpuhub.broker.api.service_auth import ServiceAuthenticator
from gpuhub.broker.operations.services import ServiceOperations
from gpuhub.broker.ports.visits import Visits
from gpuhub.broker_api.errors import NotKnown
from gpuhub.broker_api.schemas import VisitView
from gpuhub.broker_api.schemas.services import ServiceView
from gpuhub.common.errors import Conflict, Unavailable
from gpuhub.docker.services.service_container import MAX_LOG_LINES

#: Path of visits, below the prefix of the broker.
VISITS = "/service-visits"
#: The page of the hub that opens a visit.
HUB_PAGE = "/hub/gpuhub/services"
#: Numbers of parts of the paths after `/services/NAME`, for `split_target`.
_SERVICE_PARTS, _VISIT_PARTS = 0, 3

ServiceName = Annotated[str, Path(max_length=64, description="Name of a service")]
Lines = Annotated[int, Query(ge=1, le=MAX_LOG_LINES, description="At most this many lines, from the end")]


async def get_operations(request: Request) -> ServiceOperations:
    """Return the operations on the app's services."""
    return _operations(request)


Operations = Annotated[ServiceOperations, Depends(get_operations)]

api = create_router("services")
router = APIRouter(include_in_schema=False)


@api.get("/services", responses=document_problems(422))
async def get_services(caller: Caller, services: Operations) -> list[ServiceView]:
    """Return the services that the caller may use; all for administrators."""
    return services.list_services(caller)


@api.post("/services/{name}/restart", responses=document_problems(404, 503))
async def post_restart(name: ServiceName, caller: Caller, services: Operations) -> ServiceView:
    """Replace the containers of a service; its data stays. Only for administrators."""
    return await services.restart(caller, name)


@api.get("/services/{name}/logs", response_class=Response, responses=document_problems(404, 422, 503))
async def get_log(name: ServiceName, caller: Caller, services: Operations, lines: Lines = 200) -> Response:
    """Return the last lines of a service's output, each with its time. Only for administrators."""
    return Response(await services.read_log(caller, name, lines), media_type="text/plain")


@api.post("/services/{name}/visits", status_code=201, responses=document_problems(404))
async def post_visit(request: Request, name: ServiceName, caller: Caller, services: Operations) -> VisitView:
    """Return an address of a service that needs no token, for a browser; it ends with the caller's token."""
    services.check_access(caller, name)
    visits = cast("Visits", request.app.state.visits)
    key = visits.open(caller.name, _visit_subject(name), request.headers["authorization"])
    prefix = request.url.path.removesuffix(f"{API}/services/{name}/visits")
    return VisitView(path=f"{prefix}{VISITS}/{name}/{key}/")


@router.api_route(f"{VISITS}/{{name}}/{{key}}/{{path:path}}", methods=METHODS)
async def serve_visit(request: Request, name: str, key: str) -> Response:
    """Forward a browser's request to a service."""
    # Not the key: the audit log has these.
    request.scope["path_params"] = {"service": name}
    if (preflight := port_routes.answer_preflight(request)) is not None:
        return preflight
    try:
        return PortResponse(request, await _find_visit(request, name, key))
    except NotKnown:
        if not port_routes.is_navigation(request):
            raise
        return _redirect_to_hub(name, port_routes.split_target(request, parts=_VISIT_PARTS)[1])
    except (Conflict, Unavailable) as error:
        if not port_routes.is_navigation(request):
            raise
        return port_routes.build_waiting_page(error)


@router.websocket(f"{VISITS}/{{name}}/{{key}}/{{path:path}}")
async def connect_visit(websocket: WebSocket, name: str, key: str) -> None:
    """Connect a page of a service."""
    websocket.scope["path_params"] = {"service": name}
    await serve_websocket(websocket, lambda: _find_visit(websocket, name, key), is_visit=True)


def build_path(name: str) -> str:
    """Return the path of a service at the hub's proxy."""
    return f"/services/{name}/"


def build_router(name: str) -> APIRouter:
    """Return the routes of a service's own address."""
    own = APIRouter(include_in_schema=False)
    path = f"{build_path(name)}{{path:path}}"

    @own.api_route(path, methods=METHODS)
    async def serve_service(request: Request) -> Response:
        """Forward a request with a token to the service; send a browser to the hub."""
        request.scope["path_params"] = {"service": name}
        if "authorization" not in request.headers and port_routes.is_navigation(request):
            return _redirect_to_hub(name, port_routes.split_target(request, parts=_SERVICE_PARTS)[1])
        return PortResponse(request, await _find_service(request, name))

    @own.get(build_path(name).rstrip("/"))
    async def add_slash() -> Response:
        """Send a client to the address with a slash at its end, whatever host and scheme it used."""
        return RedirectResponse(build_path(name), 308)

    @own.websocket(path)
    async def connect_service(websocket: WebSocket) -> None:
        """Connect a program with a token."""
        websocket.scope["path_params"] = {"service": name}
        await serve_websocket(websocket, lambda: _find_service(websocket, name), is_visit=False)

    return own


async def _find_service(connection: HTTPConnection, name: str) -> PortTarget:
    authorization = connection.headers.get("authorization")
    return await _find_target(connection, name, authorization, parts=_SERVICE_PARTS)


async def _find_visit(connection: HTTPConnection, name: str, key: str) -> PortTarget:
    visit = cast("Visits", connection.app.state.visits).find(_visit_subject(name), key)
    return await _find_target(connection, name, visit.authorization, parts=_VISIT_PARTS)


async def _find_target(connection: HTTPConnection, name: str, authorization: str | None, *, parts: int) -> PortTarget:
    authenticator = cast("ServiceAuthenticator", connection.app.state.service_authenticator)
    watch, caller = await port_routes.identify_visitor(connection, authorization, authenticator)
    server = _operations(connection).find_server(caller, name)
    return port_routes.build_target(connection, server, caller, watch, parts=parts, kind=access.SERVICES)


def _operations(connection: HTTPConnection) -> ServiceOperations:
    return cast("ServiceOperations", connection.app.state.services)


def _visit_subject(name: str) -> str:
    """Return what stands for the job in a visit to a service; no id of a job has a colon."""
    return f"service:{name}"


def _redirect_to_hub(name: str, target: str) -> RedirectResponse:
    return RedirectResponse(f"{HUB_PAGE}/{quote(name, safe='')}?to={quote(target, safe='')}", 303)
