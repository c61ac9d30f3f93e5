"""WebSockets to servers of jobs, at the same addresses as their pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httpcore
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpuhub.broker.admission.access import TakeTurn
from gpuhub.broker.api import problems
from gpuhub.broker.api.routes.port_routes import PORTS, VISITS, PortTarget, find_port, find_visit
from gpuhub.broker.files.user_files import UserFiles
from gpuhub.broker.ports import headers
from gpuhub.broker.ports.connections import PortConnections
from gpuhub.broker.ports.websocket_client import PortWebSocket
from gpuhub.common.errors import GpuhubError, NotAllowed
from gpuhub.common.tasks import wait_for_first

#: The end of a visitor's access, and of the server's connection, as codes for the visitor.
_REFUSED, _BROKEN = 1008, 1011
#: The code of an end without a code, which is never sent.
_ABNORMAL = 1006

router = APIRouter()


@router.websocket(f"{PORTS}/{{job_id}}/{{path:path}}")
async def connect_port(websocket: WebSocket, job_id: str) -> None:
    """Connect a program with a token."""
    websocket.scope["path_params"] = {"job": job_id}
    await serve_websocket(websocket, lambda: find_port(websocket, job_id), is_visit=False)


@router.websocket(f"{VISITS}/{{job_id}}/{{key}}/{{path:path}}")
async def connect_visit(websocket: WebSocket, job_id: str, key: str) -> None:
    """Connect a page of the job's server."""
    # Not the key: the audit log has these.
    websocket.scope["path_params"] = {"job": job_id}
    await serve_websocket(websocket, lambda: find_visit(websocket, job_id, key), is_visit=True)


def check_page_origin(origin: str | None, host: str, *, is_visit: bool) -> None:
    """Refuse other sites' pages. Pages of visits have no origin, and programs need none.

    Raises:
        NotAllowed: the origin is another site.
    """
    is_page = is_visit and origin == headers.OPAQUE_ORIGIN.decode()
    if origin is not None and not is_page and urlsplit(origin).netloc != host:
        raise NotAllowed("pages of other sites may not use a job's server")


async def serve_websocket(websocket: WebSocket, find: Callable[[], Awaitable[PortTarget]], *, is_visit: bool) -> None:
    """Connect a visitor with the server that `find` returns, until one of them ends; refusals become its answer."""
    files = cast("UserFiles", websocket.app.state.user_files)
    connections = cast("PortConnections", websocket.app.state.port_connections)
    try:
        check_page_origin(websocket.headers.get("origin"), websocket.headers.get("host", ""), is_visit=is_visit)
        target = await find()
        with files.streams.acquire(target.kind, target.visitor):
            take_turn = partial(files.streams.take_turn, target.visitor)
            stream = await connections.connect(target.server)
            try:
                server = await PortWebSocket.open(
                    stream,
                    host=target.url.upstream_host,
                    target=target.target.decode("latin-1"),
                    headers=headers.build_request_headers(
                        websocket.scope["headers"], url=target.url, visitor=target.visitor
                    ),
                    subprotocols=websocket.scope.get("subprotocols", ()),
                    take_turn=take_turn,
                )
                await websocket.accept(server.subprotocol)
                await _connect(websocket, server, target, take_turn)
            finally:
                await stream.aclose()
    except GpuhubError as error:
        await websocket.send_denial_response(
            problems.build_response(problems.http_status(error), str(error), error.code)
        )
    except (httpcore.NetworkError, httpcore.TimeoutException):
        await websocket.send_denial_response(
            problems.build_response(503, "the job's server does not answer", "unavailable")
        )


async def _connect(websocket: WebSocket, server: PortWebSocket, target: PortTarget, take_turn: TakeTurn) -> None:
    """Pass messages until visitor or server end the WebSocket, or the visitor is refused."""
    from_visitor = asyncio.ensure_future(_pass_to_server(websocket, server, take_turn))
    from_server = asyncio.ensure_future(_pass_to_visitor(websocket, server))
    refusal = asyncio.ensure_future(target.watch.wait_until_refused())
    done = await wait_for_first(from_visitor, from_server, refusal)
    code = server.close_code
    with suppress(WebSocketDisconnect, RuntimeError):
        if refusal in done:
            await websocket.close(_REFUSED, refusal.result()[:100])
        else:
            await websocket.close(_BROKEN if code == _ABNORMAL else code)


async def _pass_to_server(websocket: WebSocket, server: PortWebSocket, take_turn: TakeTurn) -> None:
    with suppress(httpcore.WriteError):
        try:
            while True:
                message = await websocket.receive()
                websocket._raise_on_disconnect(message)
                data = (message.get("text") if message.get("text") is not None else message.get("bytes")) or ""
                await take_turn(len(data))
                await server.send(data)
        except WebSocketDisconnect as end:
            await server.close(end.code)


async def _pass_to_visitor(websocket: WebSocket, server: PortWebSocket) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):
        async for message in server.receive():
            await (websocket.send_text(message) if isinstance(message, str) else websocket.send_bytes(message))
