"""What a restarted hub makes of what notebooks answer."""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import Any

import pytest

from gpuhub.spawners import readiness


class FakeResponse:
    """Its headers cannot be changed, like those of the client that JupyterHub uses."""

    def __init__(self, version: str) -> None:
        self.headers = MappingProxyType({"X-JupyterHub-Version": version})


class FakeServer:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def wait_up(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def has_not_ended() -> bool:
    return False


@pytest.mark.parametrize(("version", "left"), [("5.5.1", {"X-JupyterHub-Version": "5.5.1"}), ("nonsense", {})])
async def test_invalid_version_header_is_removed(version: str, left: dict[str, str]) -> None:
    """JupyterHub would not start with it."""
    server = FakeServer(FakeResponse(version))
    readiness.limit_wait_up(server, has_not_ended)
    assert (await server.wait_up()).headers == left


async def test_invalid_response_counts_as_a_timeout() -> None:
    """JupyterHub drops that one server, instead of giving up its own start."""
    server = FakeServer(ValueError("no HTTP"))
    readiness.limit_wait_up(server, has_not_ended)
    with pytest.raises(TimeoutError, match="no HTTP"):
        await server.wait_up()


async def test_wait_ends_with_the_container() -> None:
    """The wait may be days long."""

    class HangingServer(FakeServer):
        async def wait_up(self) -> Any:
            await asyncio.sleep(3600)

    async def has_ended() -> bool:
        return True

    server = HangingServer(None)
    readiness.limit_wait_up(server, has_ended)
    with pytest.raises(TimeoutError, match="has ended"):
        await server.wait_up()
