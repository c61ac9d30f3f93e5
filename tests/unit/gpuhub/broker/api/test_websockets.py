"""Limits of the broker's WebSockets, over real sockets: pings without reading, tiny frames, and before the access."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpuhub.broker.api import server
from gpuhub.broker.api.server import BoundedWebSocketProtocol, build_server_config
from gpuhub.domain.rate_limit import RateLimit
from tests.support.docker.simulated_nodes import wait_until
from tests.support.loop_time import MAX_STEP_S, kept_memory

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MASK = b"\0\0\0\0"
#: The largest ping and its pong, and the smallest text and ping.
PING, PONG = b"\x89\xfd" + MASK + b"p" * 125, b"\x8a\x7d" + b"p" * 125
EMPTY_TEXT, EMPTY_PING = b"\x81\x80" + MASK, b"\x89\x80" + MASK
#: A part of a message that neither begins nor ends it.
EMPTY_PART = b"\x00\x80" + MASK
#: Bytes that a client sends without reading, more than the kernel keeps of both directions, and how many of the answers
#: the server may keep.
FLOOD, MAX_KEPT = 32 * 1024 * 1024, 1024 * 1024
TIMEOUT_S = 1.0


@dataclass
class EchoApp:
    """Echoes messages of clients, whom it accepts when `may_accept` is set, and reads when `may_read` is."""

    may_accept: threading.Event = field(default_factory=threading.Event)
    may_read: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    ended: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        websocket = WebSocket(scope, receive, send)
        await asyncio.to_thread(self.may_accept.wait)
        await websocket.accept()
        await asyncio.to_thread(self.may_read.wait)
        try:
            async for text in websocket.iter_text():
                await websocket.send_text(text)
        finally:
            self.ended += 1


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> list[BoundedWebSocketProtocol]:
    """The server's sides of all WebSockets."""
    found: list[BoundedWebSocketProtocol] = []
    connection_made = BoundedWebSocketProtocol.connection_made

    def record(self: BoundedWebSocketProtocol, transport: Any) -> None:
        found.append(self)
        connection_made(self, transport)

    monkeypatch.setattr(BoundedWebSocketProtocol, "connection_made", record)
    return found


@pytest.fixture
def app() -> Iterator[EchoApp]:
    """The application, served with the broker's limits."""
    echo = EchoApp()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        echo.port = listening.getsockname()[1]
        # Without pings of its own: a test may take longer than their interval where the machine is busy.
        served = uvicorn.Server(build_server_config(cast("FastAPI", echo), lifespan="off", ws_ping_interval=None))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_until(lambda: served.started, "the server listens")
            yield echo
        finally:
            echo.may_accept.set()
            echo.may_read.set()
            served.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def any_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may send any number of pings."""
    monkeypatch.setattr(server, "_SMALL_FRAMES", RateLimit(burst=1e9, per_second=1e9))


def connect(app: EchoApp) -> socket.socket:
    """Open a WebSocket, and return it when the server has its handshake."""
    client = socket.create_connection(("127.0.0.1", app.port), timeout=30)
    client.sendall(HANDSHAKE)
    if app.may_accept.is_set():
        assert client.recv(4096).startswith(b"HTTP/1.1 101")
    return client


def test_pings_of_a_client_that_does_not_read_are_not_kept(
    app: EchoApp, protocols: list[BoundedWebSocketProtocol], any_pings: None
) -> None:
    """Only the last ones are answered, and then everything works as before."""
    app.may_accept.set()
    app.may_read.set()
    with connect(app) as client:
        kept = 0
        block = PING * 500
        for _ in range(FLOOD // len(block)):
            client.sendall(block)
            kept = max(kept, protocols[0].transport.get_write_buffer_size())
        assert 0 < kept < MAX_KEPT
        client.sendall(b"\x81\x83" + MASK + b"end")
        received = b""
        while not received.endswith(b"\x81\x03end"):
            received += client.recv(65536)
        assert received.removesuffix(b"\x81\x03end").replace(PONG, b"") == b""
        assert len(received) < FLOOD // 2


def test_clients_without_access_are_not_read(app: EchoApp, protocols: list[BoundedWebSocketProtocol]) -> None:
    """What they send stays with them, and has no answer."""
    with connect(app) as client:
        wait_until(lambda: protocols, "the server has the handshake")
        client.settimeout(TIMEOUT_S)
        with pytest.raises(TimeoutError):
            for _ in range(FLOOD // len(PING)):
                client.sendall(PING)
        with pytest.raises(TimeoutError):
            client.recv(4096)
        assert not protocols[0]._unparsed
        app.may_accept.set()
        assert client.recv(4096).startswith(b"HTTP/1.1 101")


@pytest.mark.parametrize("frame", [EMPTY_TEXT, EMPTY_PING], ids=["texts", "pings"])
def test_tiny_frames_are_parsed_in_slices(
    app: EchoApp,
    protocols: list[BoundedWebSocketProtocol],
    any_pings: None,
    monkeypatch: pytest.MonkeyPatch,
    frame: bytes,
) -> None:
    """One block of the socket has tens of thousands of them, of which few wait for the application at a time."""
    app.may_accept.set()
    steps_s, waiting = [0.0], [0]

    def measure(step: Callable[..., None]) -> Callable[..., None]:
        def run_measured(self: BoundedWebSocketProtocol, *arguments: Any) -> None:
            began = time.thread_time()
            step(self, *arguments)
            steps_s.append(time.thread_time() - began)
            waiting.append(self.queue.qsize())

        return run_measured

    for name in ("data_received", "_parse"):
        monkeypatch.setattr(BoundedWebSocketProtocol, name, measure(getattr(BoundedWebSocketProtocol, name)))
    with kept_memory(), connect(app) as client:
        client.sendall(frame * 100_000)
        app.may_read.set()
        client.sendall(b"\x81\x83" + MASK + b"end")
        received = b""
        while not received.endswith(b"\x81\x03end"):
            received += client.recv(65536)
    assert max(steps_s) < MAX_STEP_S
    assert max(waiting) <= server._PARSED_BYTES // len(frame) + 1


@pytest.mark.parametrize("frame", [EMPTY_PING, EMPTY_PART], ids=["pings", "parts"])
def test_frames_without_a_message_are_read_at_a_limited_rate(
    app: EchoApp, protocols: list[BoundedWebSocketProtocol], monkeypatch: pytest.MonkeyPatch, frame: bytes
) -> None:
    """A client that sends many pings, or empty parts of one message, waits; large parts do not count."""
    app.may_accept.set()
    app.may_read.set()
    received: list[int] = []
    data_received = WebSocketsSansIOProtocol.data_received

    def record(self: WebSocketsSansIOProtocol, data: bytes) -> None:
        received.append(len(data))
        data_received(self, data)

    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", record)
    with connect(app) as client:
        large = b"\xfe\x40\x00" + MASK + b"x" * 16384
        client.sendall(b"\x01" + large + (b"\x00" + large) * 50 + b"\x80\x83" + MASK + b"end")
        echo = b""
        while not echo.endswith(b"end"):
            echo += client.recv(65536)
        received.clear()
        client.sendall((b"\x01\x80" + MASK if frame is EMPTY_PART else b"") + frame * 100_000)
        time.sleep(TIMEOUT_S)
        limit = server._SMALL_FRAMES
        most = limit.burst + TIMEOUT_S * limit.per_second
        assert most <= sum(received) // len(frame) <= most + 2 * server._PARSED_BYTES // len(frame)


def test_client_that_never_reads_loses_its_connection(
    app: EchoApp, protocols: list[BoundedWebSocketProtocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keepalive ends the connection with what was not sent, and the application with it."""
    monkeypatch.setattr(server, "LINGER_S", TIMEOUT_S)
    app.may_accept.set()
    app.may_read.set()
    with connect(app) as client:
        client.settimeout(TIMEOUT_S)
        with pytest.raises(TimeoutError):
            while True:
                client.sendall(b"\x81\xfe\xff\xff" + MASK + b"x" * 65535)
        protocol = protocols[0]
        protocol.close_timeout = 0.0
        protocol.loop.call_soon_threadsafe(protocol.keepalive_timeout)
        wait_until(lambda: protocol.disconnected and app.ended, "the connection is lost")
