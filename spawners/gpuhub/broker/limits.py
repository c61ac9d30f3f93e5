"""Refuses large bodies before they are read into memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuhub.broker.problems import TOO_LARGE, build_response

#: The largest request, a reservation of thousands of GPUs, stays below this, bytes.
MAX_BODY = 1024 * 1024


class BodyLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
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
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, send)
