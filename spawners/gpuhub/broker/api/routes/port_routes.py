"""Servers of jobs, for programs with a token at `/ports/JOB/`, and for browsers at `/visits/JOB/KEY/`.

Neither takes a cookie. A browser that opens the first is sent through the hub, which knows its user, to the second.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, cast
from urllib.parse import quote

import httpcore
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from gpuhub.broker import audit
from gpuhub.broker.admission import access
from gpuhub.broker.api import dependencies, problems
from gpuhub.broker.api.auth import Authenticator, Identifier
from gpuhub.broker.api.dependencies import API, ResourceId, identify
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.api.routes.terminal import find_running_worker
from gpuhub.broker.api.streams import AccessWatch
from gpuhub.broker.controllers import loop
from gpuhub.broker.files.user_files import UserFiles
from gpuhub.broker.ports import headers, pages
from gpuhub.broker.ports.connections import MAX_WAIT_S, PortConnections, ServerAddress, find_worker_server
from gpuhub.broker.ports.visits import Visits
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.errors import NotKnown, SizeLimitExceeded
from gpuhub.broker_api.schemas import JobState, VisitView
from gpuhub.common.errors import Conflict, GpuhubError, InvalidRequest, Unavailable
from gpuhub.common.units import format_size
from gpuhub.domain import job_states
from gpuhub.domain.models import Identity

#: Paths of these routes, below the prefix of the broker.
PORTS, VISITS = "/ports", "/visits"
STORAGE_SCRIPT = "/storage.js"
_STORAGE_PATH = dependencies.PREFIX + STORAGE_SCRIPT
#: The page of the hub that opens a visit.
HUB_PAGE = "/hub/gpuhub/ports"
#: Maximum time to wait until a connection to a server takes a part of a request, seconds.
_WRITE_TIMEOUT_S = 120.0
#: Maximum silence of a client within a request's body, seconds.
_BODY_TIMEOUT_S = 120.0
#: Time after which a browser asks again for a server that does not answer yet, seconds.
_REFRESH_S = 3
_WAITING_HEAD = (
    "<!doctype html><html lang=en><title>gpuhub</title><meta name=color-scheme content='light dark'>"
    "<meta name=viewport content='width=device-width'>"
    "<style>body { font: 1.1rem system-ui, sans-serif; max-width: 36rem; margin: 20vh auto; padding: 0 1rem }</style>"
)
_WAITING_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
#: Repeated when a kept connection turns out to be closed.
_REPEATABLE = frozenset({"GET", "HEAD"})


@asynccontextmanager
async def _run_connections(app: FastAPI) -> AsyncIterator[None]:
    """Keep visits and connections while the broker runs."""
    app.state.visits = Visits(cast("BrokerState", app.state.core).clock.monotonic)
    app.state.port_connections = connections = PortConnections(app.state.daemons)
    closing = asyncio.ensure_future(loop.keep_running("connections to jobs' servers", connections.run))
    try:
        yield
    finally:
        await loop.stop([closing])
        await connections.close()


router = APIRouter(include_in_schema=False, lifespan=_run_connections)
api = APIRouter(prefix=API)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTarget:
    """A job's server or a service, and a visitor who may use it."""

    visitor: str
    server: ServerAddress
    url: headers.PortUrl
    #: Path and query for the server, as the visitor sent them.
    target: bytes
    watch: AccessWatch
    #: Kind of stream as which the visitor's requests count.
    kind: access.StreamKind


@api.post("/jobs/{job_id}/visits", status_code=201, tags=["jobs"], responses=document_problems(404, 409, 422))
async def post_visit(request: Request, job_id: ResourceId, caller: Annotated[Identity, Depends(identify)]) -> VisitView:
    """Return an address of a job's server that needs no token, for a browser; it ends with the caller's token."""
    core = cast("BrokerState", request.app.state.core)
    await access.find_port_job(core, caller, job_id)
    visits = cast("Visits", request.app.state.visits)
    key = visits.open(caller.name, job_id, request.headers["authorization"])
    prefix = request.url.path.removesuffix(f"{API}/jobs/{job_id}/visits")
    return VisitView(path=f"{prefix}{VISITS}/{job_id}/{key}/")


@router.get(STORAGE_SCRIPT)
async def get_storage_script() -> Response:
    """Return the script that pages of jobs' servers get, which is the same for all."""
    return Response(pages.STORAGE_SCRIPT, media_type="text/javascript")


@router.api_route(f"{PORTS}/{{job_id}}/{{path:path}}", methods=METHODS)
async def serve_port(request: Request, job_id: str) -> Response:
    """Forward a request with a token to a job's server; send a browser to the hub."""
    request.scope["path_params"] = {"job": job_id}
    if "authorization" not in request.headers and is_navigation(request):
        return _redirect_to_hub(request, job_id, target=split_target(request, parts=2)[1])
    return PortResponse(request, await find_port(request, job_id))


@router.api_route(f"{VISITS}/{{job_id}}/{{key}}/{{path:path}}", methods=METHODS)
async def serve_visit(request: Request, job_id: str, key: str) -> Response:
    """Forward a browser's request to a job's server."""
    # Not the key: the audit log has these.
    request.scope["path_params"] = {"job": job_id}
    if (preflight := answer_preflight(request)) is not None:
        return preflight
    try:
        return PortResponse(request, await find_visit(request, job_id, key))
    except NotKnown:
        if not is_navigation(request):
            raise
        return _redirect_to_hub(request, job_id, target=split_target(request, parts=3)[1])
    except (Conflict, Unavailable) as error:
        if not is_navigation(request):
            raise
        return build_waiting_page(error)


def answer_preflight(request: Request) -> Response | None:
    """Return the answer to a sandboxed page that asks whether it may send a request; None for other requests."""
    if request.method != "OPTIONS" or "access-control-request-method" not in request.headers:
        return None
    requested = request.headers.get("access-control-request-headers")
    response = Response(status_code=204)
    response.raw_headers = headers.build_preflight_headers(None if requested is None else requested.encode())
    return response


async def find_port(connection: HTTPConnection, job_id: str) -> PortTarget:
    """Return the server of a job for a caller with a token.

    Raises:
        NotAllowed, NotFound, Conflict: as `access.find_port_job`, or the job does not run.
    """
    return await _find_target(connection, job_id, connection.headers.get("authorization"), parts=2)


async def find_visit(connection: HTTPConnection, job_id: str, key: str) -> PortTarget:
    """Return the server of a job for the visitor with this key.

    Raises:
        NotKnown: the visit is over.
        NotAllowed, NotFound, Conflict: as `find_port`.
    """
    visit = cast("Visits", connection.app.state.visits).find(job_id, key)
    return await _find_target(connection, job_id, visit.authorization, parts=3)


async def _find_target(connection: HTTPConnection, job_id: str, authorization: str | None, *, parts: int) -> PortTarget:
    core = cast("BrokerState", connection.app.state.core)
    watch, caller = await identify_visitor(connection, authorization)
    job = await access.find_port_job(core, caller, job_id)
    if job.sleeps and job.is_open and job.state is not JobState.RUNNING:
        if job_states.is_asleep(job, core.ledger.snapshot.leases[job.lease_id]):
            await core.ledger.change(mutations.wake(job.id))
        raise Unavailable(f"{job.name or job.run_id} starts as soon as its GPUs are free; ask again in a minute")
    server = find_worker_server(find_running_worker(job, 0), job.port or 0)
    return build_target(connection, server, caller, watch, parts=parts, kind=access.PORTS)


async def identify_visitor(
    connection: HTTPConnection, authorization: str | None, authenticator: Identifier | None = None
) -> tuple[AccessWatch, Identity]:
    """Return the visitor with this `Authorization` header, and what watches the visitor's access.

    Args:
        authenticator: That of the app if None.

    Raises:
        NotKnown, NotAllowed, TooManyRequests, HubUnreachable: as `Authenticator.identify`.
    """
    watch = AccessWatch(
        authenticator=authenticator or cast("Authenticator", connection.app.state.authenticator),
        authorization=authorization,
        address=audit.client_address(connection.scope),
    )
    return watch, await watch.authenticator.identify(watch.authorization, watch.address)


def build_target(
    connection: HTTPConnection,
    server: ServerAddress,
    caller: Identity,
    watch: AccessWatch,
    *,
    parts: int,
    kind: access.StreamKind,
) -> PortTarget:
    """Return where a request goes; `parts` is as in `split_target`, and `kind` is as what it counts."""
    prefix, target = split_target(connection, parts=parts)
    url = headers.PortUrl(
        scheme=headers.find_scheme(connection.headers.get("x-forwarded-proto")),
        host=connection.headers.get("host", ""),
        prefix=prefix,
        port=server.port,
    )
    return PortTarget(
        visitor=caller.name, server=server, url=url, target=target.encode("latin-1"), watch=watch, kind=kind
    )


def split_target(connection: HTTPConnection, *, parts: int) -> tuple[str, str]:
    """Return the path of a server's root here, and path and query below it, both as they were sent.

    Args:
        parts: Number of parts of the root's path after `/services/NAME`.
    """
    raw = connection.scope["raw_path"].decode("latin-1")
    query = connection.scope["query_string"].decode("latin-1")
    # `/services/broker/ports/JOB/rest`: the service's two parts, and those of the route.
    pieces = raw.split("/", 2 + parts + 1)
    rest = pieces[-1]
    return "/".join([*pieces[:-1], ""]), f"/{rest}{'?' if query else ''}{query}"


def is_navigation(request: Request) -> bool:
    """Return whether a browser opens a page, and no program or script asks."""
    mode = request.headers.get("sec-fetch-mode")
    is_page = mode == "navigate" if mode is not None else "text/html" in request.headers.get("accept", "")
    return is_page and request.method == "GET"


def build_waiting_page(error: GpuhubError) -> HTMLResponse:
    """Return a page about a server that does not answer yet; the browser opens the address again by itself."""
    page = f"{_WAITING_HEAD}<main><p>{html.escape(str(error))}</p><p>This page tries again by itself.</p></main>"
    headers = {"Refresh": str(_REFRESH_S), "Content-Security-Policy": _WAITING_POLICY}
    return HTMLResponse(page, problems.http_status(error), headers=headers)


def _redirect_to_hub(request: Request, job_id: str, *, target: str) -> RedirectResponse:
    page = f"{HUB_PAGE}/{quote(job_id, safe='')}?to={quote(target, safe='')}"
    return RedirectResponse(page, 303)


class RequestBody:
    """The body of a request, and the end of its client."""

    def __init__(self, receive: Receive, limit: int, *, has_body: bool) -> None:
        self.receive = receive
        self._limit = limit
        self._is_complete = asyncio.Event()
        self._has_body = has_body
        if not has_body:
            # A client that goes away while its request waits for a connection is noticed then.
            self._is_complete.set()

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the parts.

        Raises:
            SizeLimitExceeded: there is more than the limit.
            InvalidRequest: the client has disconnected.
            Unavailable: the client is silent for too long.
        """
        received, has_more = 0, self._has_body
        while has_more:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    message = await self.receive()
            except TimeoutError:
                raise Unavailable(f"the client has sent nothing for {_BODY_TIMEOUT_S:.0f} s") from None
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the client has disconnected")
            part = message.get("body", b"")
            received += len(part)
            if received > self._limit:
                raise SizeLimitExceeded(f"a request may have at most {format_size(self._limit)}")
            has_more = message.get("more_body", False)
            if part:
                yield part
        self._is_complete.set()

    async def wait_until_disconnected(self) -> None:
        """Return when the client has gone, after the body."""
        await self._is_complete.wait()
        while (await self.receive())["type"] != "http.disconnect":
            pass


class PortResponse(Response):
    """The response of a job's server, sent on as it comes; its request ends with the visitor's connection or access."""

    def __init__(self, request: Request, target: PortTarget) -> None:
        super().__init__()
        self._target = target
        self._is_navigation = is_navigation(request)
        self._connections = cast("PortConnections", request.app.state.port_connections)
        self._streams = cast("UserFiles", request.app.state.user_files).streams
        self._limit = cast("BrokerState", request.app.state.core).cluster.jobs.upload_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        body = RequestBody(receive, self._limit, has_body=has_body)
        with self._streams.acquire(self._target.kind, self._target.visitor):
            exchange = asyncio.ensure_future(self._exchange(scope, body, send, has_body=has_body))
            refusal = asyncio.ensure_future(self._target.watch.wait_until_refused())
            tasks = (exchange, refusal, asyncio.ensure_future(body.wait_until_disconnected()))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if exchange.done():
                    await exchange
                # Otherwise the connection is closed, so that the client does not take this for the end.
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _exchange(self, scope: Scope, body: RequestBody, send: Send, *, has_body: bool) -> None:
        url = self._target.url
        request = httpcore.Request(
            scope["method"].encode(),
            httpcore.URL(scheme=b"http", host=b"localhost", port=url.port, target=self._target.target),
            headers=headers.build_request_headers(
                scope["headers"], url=url, visitor=self._target.visitor, is_navigation=self._is_navigation
            ),
            content=body.read(),
            extensions={"timeout": {"pool": MAX_WAIT_S, "write": _WRITE_TIMEOUT_S}},
        )
        is_opaque = _get_header(scope["headers"], b"origin") == headers.OPAQUE_ORIGIN
        async with self._connections.use_pool(self._target.server, self._target.visitor) as pool:
            tries = 2 if scope["method"] in _REPEATABLE and not has_body else 1
            try:
                response = await _request(pool, request, tries)
            except Unavailable as error:
                if not self._is_navigation:
                    raise
                await build_waiting_page(error)(scope, body.receive, send)
                return
            try:
                sent = headers.build_response_headers(response.headers, url=url, is_opaque=is_opaque)
                parts = _read(response)
                if self._is_navigation and pages.is_page(sent):
                    sent, parts = pages.remove_length(sent), pages.add_storage(parts, _STORAGE_PATH)
                await send({"type": "http.response.start", "status": response.status, "headers": sent})
                async for part in parts:
                    await self._streams.take_turn(self._target.visitor, len(part))
                    await send(_build_part(part, has_more=True))
                await send(_build_part(b"", has_more=False))
            finally:
                await response.aclose()


async def _request(pool: httpcore.AsyncConnectionPool, request: httpcore.Request, tries: int) -> httpcore.Response:
    """Return the response of a job's server, whose body is not read yet.

    Raises:
        Unavailable: there is none.
    """
    for left in reversed(range(tries)):
        try:
            return await pool.handle_async_request(request)
        except httpcore.PoolTimeout:
            raise Unavailable("all connections to the job's server are in use; try again later") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            if not left:
                raise Unavailable(f"the job's server sent no proper answer: {error or type(error).__name__}") from None
    raise AssertionError


async def _read(response: httpcore.Response) -> AsyncIterator[bytes]:
    """Yield the body of a response; a broken one ends the visitor's connection too."""
    try:
        async for part in response.aiter_stream():
            yield part
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise Unavailable(f"the job's server ended within its answer: {error}") from None


def _build_part(part: bytes, *, has_more: bool) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": has_more}


def _get_header(received: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for key, value in received if key == name), None)
