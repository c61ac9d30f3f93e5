"""The client of a WebSocket to a job's server, which may be hostile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpcore
import pytest

from gpuhub.broker.ports import websocket_client
from gpuhub.broker.ports.connections import PortStream
from gpuhub.broker.ports.websocket_client import PortWebSocket


class SlowStream:
    """Answers with headers without end, a byte at a time."""

    async def write(self, buffer: bytes) -> None:
        """Accept what is sent."""

    async def read(self, _max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as PortStream
        await asyncio.sleep(0.001)
        return b"x"


async def test_handshake_has_a_time_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that always sends a little does not keep its visitor for ever."""
    monkeypatch.setattr(websocket_client, "_HANDSHAKE_TIMEOUT_S", 0.2)

    async def take_turn(_size: int) -> None:
        return

    options: dict[str, Any] = {"host": "localhost:1", "target": "/", "headers": [], "subprotocols": ()}
    async with asyncio.timeout(5):
        with pytest.raises(httpcore.ReadTimeout):
            await PortWebSocket.open(cast("PortStream", SlowStream()), take_turn=take_turn, **options)
