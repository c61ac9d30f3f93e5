"""Servers of jobs and services, which run on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hub.port_server import PortServer, served_port


@pytest.fixture(scope="module")
def module_server() -> Iterator[PortServer]:
    with served_port() as found:
        yield found


@pytest.fixture
def server(module_server: PortServer) -> PortServer:
    """The server of a job or service, on this machine, without the requests of earlier tests."""
    module_server.received.clear()
    module_server.cut.clear()
    return module_server
