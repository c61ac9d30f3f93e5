"""The broker's HTTP application: its routes, the middleware around them, and its OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version

from fastapi import FastAPI

from gpuhub.broker.api import dependencies, problems
from gpuhub.broker.api.dependencies import PREFIX
from gpuhub.broker.api.middleware import RequestSizeLimit, SecurityHeaders
from gpuhub.broker.api.routes import (
    bench_routes,
    cluster_routes,
    cost_routes,
    file_routes,
    idle_routes,
    job_routes,
    lease_routes,
    limit_routes,
    live_routes,
    node_routes,
    notification_routes,
    port_routes,
    port_websockets,
    reservation_routes,
    service_routes,
    share_routes,
    terminal,
)
from gpuhub.broker.audit import AuditLog, AuditMiddleware
from gpuhub.broker.metrics.exporter import MetricsExporter
from gpuhub.broker.metrics.request_metrics import RequestMetrics
from gpuhub.broker_api.schemas import Problem
from gpuhub.config.settings import ClusterSettings


def build_http_app(
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    cluster: ClusterSettings,
    audit_log: AuditLog,
    exporter: MetricsExporter,
) -> FastAPI:
    """Return the application with its routes and its middleware, which every request passes through."""
    app = _build_empty_app(lifespan)
    for router in (
        cluster_routes.public,
        cluster_routes.metrics,
        cluster_routes.api,
        lease_routes.api,
        job_routes.api,
        node_routes.api,
        bench_routes.api,
        reservation_routes.api,
        file_routes.api,
        idle_routes.api,
        cost_routes.api,
        live_routes.api,
        notification_routes.api,
        share_routes.api,
        limit_routes.api,
        terminal.api,
        port_routes.api,
        port_routes.router,
        port_websockets.router,
        service_routes.api,
        service_routes.router,
    ):
        app.include_router(router, prefix=PREFIX)
    addresses = tuple(service_routes.build_path(service.name) for service in cluster.services)
    for service in cluster.services:
        app.include_router(service_routes.build_router(service.name))
    # The last one is the outermost.
    servers = (
        *(f"{PREFIX}{path}/" for path in (port_routes.PORTS, port_routes.VISITS, service_routes.VISITS)),
        *addresses,
    )
    app.add_middleware(
        RequestSizeLimit, streamed=frozenset({("PUT", f"{PREFIX}/api/v1/files")}), streamed_below=servers
    )
    app.add_middleware(AuditMiddleware, audit=audit_log, prefix=dependencies.API)
    app.add_middleware(SecurityHeaders, defaults_below=servers)
    app.add_middleware(RequestMetrics, registry=exporter.registry, prefix=PREFIX)
    problems.install(app)
    _document_problems(app)
    return app


def _build_empty_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    return FastAPI(
        title="gpuhub broker",
        version=version("gpuhub"),
        lifespan=lifespan,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        # Otherwise FastAPI looks for a telemetry provider at each request, and takes one from the environment.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )


def _document_problems(app: FastAPI) -> None:
    """Put the problem document's own schema into OpenAPI: routes name it, but none returns it."""
    build = app.openapi

    def openapi() -> dict[str, object]:
        document = build()
        document.setdefault("components", {}).setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
        return document

    app.openapi = openapi  # type: ignore[method-assign]
