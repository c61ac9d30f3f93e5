"""Middleware for security headers, and for the size of request bodies and the time to receive them.

These limits protect the broker's memory. `server` limits connections and the headers of a request, `auth` the requests
per second, and `admission.access` concurrent streams; quotas of GPUs and jobs are in `admission` and the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuhub.broker.api.problems import TOO_LARGE, build_response, http_status
from gpuhub.broker_api.errors import TooSlow

#: No response is a page or may be cached, and no page of another origin may read it, as no response has CORS headers.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class SecurityHeaders:
    """ASGI middleware that adds `HEADERS` to every response.

    Responses of paths below `defaults_below`, which users' servers send, keep those of these headers that they have.
    """

    def __init__(self, app: ASGIApp, defaults_below: tuple[str, ...] = ()) -> None:
        self._app = app
        self._defaults_below = defaults_below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        are_defaults = scope.get("path", "").startswith(self._defaults_below)

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(
                    {name: value for name, value in HEADERS.items() if not (are_defaults and name in headers)}
                )
            await send(message)

        await self._app(scope, receive, add)


#: Maximum size of a request body; the largest, a reservation of thousands of GPUs, is smaller. Bytes.
MAX_BODY_BYTES = 1024 * 1024
#: Maximum time to receive a request body, seconds.
RECEIVE_TIMEOUT_S = 30.0


class RequestSizeLimit:
    """ASGI middleware that refuses request bodies that are too large or too slow.

    The routes in `streamed`, pairs of method and path, and all paths below `streamed_below` receive their bodies unread
    and limit them on their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        streamed: Collection[tuple[str, str]] = (),
        streamed_below: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._streamed = streamed
        self._streamed_below = streamed_below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or (scope["method"], scope["path"]) in self._streamed
            or scope["path"].startswith(self._streamed_below)
        ):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                body = await _read(receive)
        except TimeoutError:
            late = TooSlow(f"the request was not complete within {RECEIVE_TIMEOUT_S:.0f} s")
            await build_response(http_status(late), str(late), late.code)(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > MAX_BODY_BYTES:
            answer = build_response(413, f"a request may have at most {MAX_BODY_BYTES} bytes", TOO_LARGE)
            await answer(scope, receive, send)
            return
        is_sent = False

        async def replay() -> Message:
            nonlocal is_sent
            if is_sent:
                return await receive()
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


async def _read(receive: Receive) -> bytes | None:
    """Return the body, or its beginning if it is too large; None when the client has disconnected."""
    body = bytearray()
    more = True
    while more and len(body) <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)
