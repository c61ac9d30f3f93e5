"""Checks of the services that gpuhub keeps running, by what the broker knows of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuhub.broker_api.schemas.services import ServiceState, ServiceView
from gpuhub.common.errors import GpuhubError
from gpuhub.common.paths import Paths
from gpuhub.ops.broker_connection import connect_to_broker
from gpuhub.ops.doctor.findings import Finding, failed, ok, warning

#: New starts of a program since the broker's own from which on it is reported.
MANY_RESTARTS = 5


async def read_services(paths: Paths) -> list[ServiceView]:
    """Return what the broker knows of the services; empty where it does not answer, which is a finding of its own."""
    try:
        client = connect_to_broker(paths)
    except GpuhubError:
        return []
    try:
        return await client.services()
    except GpuhubError:
        return []
    finally:
        await client.close()


def check_services(services: Sequence[ServiceView]) -> Iterable[Finding]:
    """Yield a finding for each service."""
    for service in services:
        logs = f"`gpuhub service logs {service.name}` shows its output"
        where = f"{service.name} on {service.node}"
        if service.state is ServiceState.RUNNING and service.restarts < MANY_RESTARTS:
            yield ok("service", f"{where} runs")
        elif service.state is ServiceState.RUNNING:
            yield warning("service", f"{where} runs, and was started again {service.restarts} times", logs)
        elif service.state is ServiceState.STARTING:
            yield warning("service", f"{where} is being started" + (f": {service.message}" if service.message else ""))
        elif service.state is ServiceState.UNREACHABLE:
            yield failed("service", f"{where} is out of reach: {service.message}", "start the node, see its findings")
        else:
            yield failed("service", f"{where} does not run: {service.message}", logs)
