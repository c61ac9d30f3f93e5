"""Refuses bodies that are large, or take for ever, before they are read into memory."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuhub.broker.problems import TOO_LARGE, build_response, status_of
from gpuhub.broker.refusals import TooSlow

#: The largest request, a reservation of thousands of GPUs, stays below this, bytes.
MAX_BODY = 1024 * 1024
#: So long may a request take to come, seconds.
PATIENCE_S = 30.0


class BodyLimit:
    """ASGI middleware. Requests of `streamed`, pairs of method and path, are passed on unread: their routes count."""

    def __init__(self, app: ASGIApp, streamed: Collection[tuple[str, str]] = ()) -> None:
        self._app = app
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body."""
        if scope["type"] != "http" or (scope["method"], scope["path"]) in self._streamed:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                body = await _read(receive)
        except TimeoutError:
            late = TooSlow(f"the request did not come to its end within {PATIENCE_S:.0f} s")
            await build_response(status_of(late), str(late), late.code)(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > MAX_BODY:
            answer = build_response(413, f"a request may have {MAX_BODY} bytes at most", TOO_LARGE)
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
    """The body, as far as it tells that it is too large; None when the client is gone."""
    body = bytearray()
    more = True
    while more and len(body) <= MAX_BODY:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)
