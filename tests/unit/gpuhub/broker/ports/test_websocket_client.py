"""The client of a WebSocket to a job's server, which may be hostile."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import Any, cast

import httpcore
import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from gpuhub.broker.ports import websocket_client
from gpuhub.broker.ports.connections import PortStream
from gpuhub.broker.ports.websocket_client import MAX_MESSAGE_BYTES, PortWebSocket
from gpuhub.docker.exec_session import ExecSession


class SlowStream:
    """Answers with headers without end, a byte at a time."""

    async def write(self, buffer: bytes) -> None:
        """Accept what is sent."""

    async def read(self, _max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as PortStream
        await asyncio.sleep(0.001)
        return b"x"


async def ignore_turns(_size: int) -> None:
    """Take a turn at once."""


class SessionStream:
    """Writes into a session as a stream does, and reads the frames of a server that were prepared."""

    def __init__(self, session: ExecSession, received: bytes) -> None:
        self._session = session
        self._received = received

    async def write(self, buffer: bytes) -> None:
        await self._session.send(buffer)

    async def read(self, _max_bytes: int) -> bytes:
        part, self._received = self._received, b""
        return part


async def test_answer_to_a_ping_does_not_begin_within_a_message() -> None:
    """A server that pings while a visitor sends a long message gets the message whole, and then the answer."""
    ours, theirs = socket.socketpair()
    protocol = ClientProtocol(parse_uri("ws://localhost:1/"), state=State.OPEN)
    session = ExecSession("rig1", ours)
    stream = SessionStream(session, Frame(Opcode.PING, b"still there").serialize(mask=False))
    client = PortWebSocket(cast("PortStream", stream), protocol, ignore_turns)
    message = os.urandom(MAX_MESSAGE_BYTES)
    sending = asyncio.ensure_future(client.send(message))
    # The socket is full within the message.
    await asyncio.sleep(0)
    receiving = asyncio.ensure_future(_read_all(client))
    server = ServerProtocol(state=State.OPEN, max_size=None)

    def read() -> None:
        while data := theirs.recv(65536):
            server.receive_data(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    async with asyncio.timeout(10):
        await asyncio.gather(sending, receiving)
    session.close()
    await asyncio.to_thread(reader.join)
    theirs.close()
    frames = [event for event in server.events_received() if isinstance(event, Frame)]
    assert [(frame.opcode, len(frame.data)) for frame in frames] == [
        (Opcode.BINARY, MAX_MESSAGE_BYTES),
        (Opcode.PONG, len(b"still there")),
    ]
    assert bytes(frames[0].data) == message


async def _read_all(client: PortWebSocket) -> list[str | bytes]:
    return [message async for message in client.receive()]


async def test_handshake_has_a_time_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that always sends a little does not keep its visitor for ever."""
    monkeypatch.setattr(websocket_client, "_HANDSHAKE_TIMEOUT_S", 0.2)
    options: dict[str, Any] = {"host": "localhost:1", "target": "/", "headers": [], "subprotocols": ()}
    async with asyncio.timeout(5):
        with pytest.raises(httpcore.ReadTimeout):
            await PortWebSocket.open(cast("PortStream", SlowStream()), take_turn=ignore_turns, **options)
