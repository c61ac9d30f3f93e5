"""A server as a job runs it: HTTP and WebSockets on a port of this machine, which records what it is sent."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from starlette.responses import HTMLResponse, RedirectResponse, StreamingResponse

from gpuhub.common.tasks import cancel_tasks
from tests.support.docker.simulated_nodes import wait_until

#: A page that uses what pages of apps use, all at relative addresses, and then sets its title.
PAGE = """<!doctype html><html><head><link rel="stylesheet" href="style.css">
<script type="module" src="main.js"></script></head><body><p id="out">waits</p></body></html>"""
SCRIPT = """
const out = {};
out.json = await (await fetch("echo", {method: "POST", headers: {"X-Own": "1"}, body: "hi"})).text();
out.stolen = await (async () => { try { return document.cookie; } catch (error) { return error.name; } })();
localStorage.setItem("a", 1);
out.stored = localStorage.getItem("a");
out.hub = await (async () => {
  try { return (await fetch("/hub/home", {credentials: "include"})).status; } catch (error) { return error.name; }
})();
out.socket = await new Promise((resolve) => {
  const socket = new WebSocket(new URL("socket", location.href).href.replace(/^http/, "ws"));
  socket.onopen = () => socket.send("hello");
  socket.onmessage = (event) => resolve(event.data);
  socket.onerror = () => resolve("failed");
});
document.getElementById("out").textContent = JSON.stringify(out);
document.title = "done";
"""


@dataclass
class PortServer:
    """The running server."""

    port: int
    #: Headers of all requests.
    received: list[dict[str, str]] = field(default_factory=list)
    #: Requests whose client went away before the end.
    cut: list[str] = field(default_factory=list)


def build_app(server: PortServer) -> FastAPI:
    """Build the application."""
    app = FastAPI(openapi_url=None)

    @app.middleware("http")
    async def record(request: Request, call_next: Any) -> Response:
        server.received.append(dict(request.headers))
        response: Response = await call_next(request)
        return response

    @app.get("/")
    async def page() -> HTMLResponse:
        response = HTMLResponse(PAGE)
        response.set_cookie("jupyterhub-session-id", "planted", path="/")
        response.headers["Clear-Site-Data"] = '"*"'
        response.headers["WWW-Authenticate"] = "Basic"
        response.headers["Access-Control-Allow-Origin"] = "https://evil.lan"
        response.headers["X-Accel-Redirect"] = "/etc/shadow"
        response.headers["X-App"] = "kept"
        return response

    @app.get("/main.js")
    async def script() -> Response:
        return Response(SCRIPT, media_type="text/javascript")

    @app.get("/style.css")
    async def style() -> Response:
        return Response("p { color: rgb(1, 2, 3) }", media_type="text/css")

    @app.api_route("/echo", methods=["GET", "POST", "PUT"])
    async def echo(request: Request) -> Response:
        return Response(f"{request.url.query}|".encode() + await request.body(), media_type="text/plain")

    @app.get("/away/{rest:path}")
    async def away(rest: str) -> RedirectResponse:
        return RedirectResponse(rest or "/echo?x=1")

    @app.get("/ticks")
    async def ticks(request: Request) -> StreamingResponse:
        async def tick() -> Any:
            try:
                for number in range(10_000):
                    yield f"data: {number}\n\n"
                    await asyncio.sleep(0.02)
            finally:
                server.cut.append(request.url.path)

        return StreamingResponse(tick(), media_type="text/event-stream")

    @app.get("/large")
    async def large() -> Response:
        return Response(b"0123456789abcdef" * 65536 * 4)

    @app.websocket("/socket")
    async def connect(websocket: WebSocket) -> None:
        server.received.append(dict(websocket.headers))
        offered = websocket.scope["subprotocols"]
        await websocket.accept(offered[-1] if offered else None)
        async for text in websocket.iter_text():
            if text == "bye":
                await websocket.close(4001)
                return
            await websocket.send_text(f"{text} {websocket.headers['x-forwarded-user']}")

    return app


@contextmanager
def served_port() -> Iterator[PortServer]:
    """Run the server until the end of the context."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = PortServer(listening.getsockname()[1])
        config = uvicorn.Config(build_app(server), log_config=None, timeout_keep_alive=60)
        program = uvicorn.Server(config)
        thread = threading.Thread(target=program.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_until(lambda: program.started, "the server listens")
            yield server
        finally:
            program.should_exit = True
            program.force_exit = True
            thread.join(10)


@asynccontextmanager
async def endless_requests(url: str, who: str, count: int) -> AsyncIterator[list[httpx.Response]]:
    """Send requests to `/ticks` of a server below `url`, and yield the responses, to which those are added that begin."""
    responses: list[httpx.Response] = []
    headers = {"Authorization": f"Bearer {who}"}
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:

        async def send() -> None:
            responses.append(await client.send(client.build_request("GET", f"{url}/ticks"), stream=True))

        tasks = [asyncio.create_task(send()) for _ in range(count)]
        try:
            yield responses
        finally:
            await cancel_tasks(tasks)
            for response in responses:
                await response.aclose()
