"""Metrics of the broker's HTTP requests."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Summary
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestMetrics:
    """ASGI middleware that counts requests and their duration by method, route and status.

    Requests without a route, which any client can invent, have one series for each status.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, prefix: str) -> None:
        """`prefix` is the beginning of all paths, which the label has not."""
        self._app = app
        self._prefix = prefix
        self._duration = Summary(
            "gpuhub_broker_request_duration_seconds",
            "Time to the beginning of the response; long polls wait on request.",
            ["method", "route", "status"],
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = str(getattr(scope.get("route"), "path", ""))
                method = str(scope["method"]) if route else ""
                self._duration.labels(method, route.removeprefix(self._prefix), str(message["status"])).observe(
                    time.monotonic() - began
                )
            await send(message)

        await self._app(scope, receive, watch)
