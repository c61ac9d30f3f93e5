"""Streams in tiny parts, of hostile users and of hostile servers of their jobs, leave the event loop to others."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import wait_until
from tests.support.loop_time import MAX_STEP_S, kept_memory, measured_loop

#: Time for which a hostile peer sends, and the most of it that the loop may need for its messages, and for frames without
#: a message; seconds of a processor, several times what they need. Without limits it is nearly the whole time.
FLOOD_S, MAX_MESSAGES_S, MAX_FRAMES_S = 3.0, 1.5, 0.9
#: Time between requests of others, which cost as well, seconds.
PAUSE_S = 0.1
TIMEOUT_S = 0.2
HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nAuthorization: token ada\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
ACCEPTED = "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {}\r\n\r\n"
WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MASK = b"\0\0\0\0"
SHELL, PORT = "/api/v1/jobs/{job}/shell?command=cat%20%3E/dev/null", "/ports/{job}/socket"
#: First bytes, and those that are then repeated without end; of clients, and of servers.
CLIENTS = {
    "texts": (b"", b"\x81\x80" + MASK),
    "bytes": (b"", b"\x82\x81" + MASK + b"x"),
    "pings": (b"", b"\x89\x80" + MASK),
    "parts": (b"\x01\x80" + MASK, b"\x00\x80" + MASK),
}
SERVERS = {
    "bytes": (b"", b"\x82\x01x"),
    "pings": (b"", b"\x89\0"),
    "parts": (b"\x01\0", b"\0\0"),
    "broken": (b"", b"\xff\xff"),
    "chunks": (CHUNKED, b"1\r\nx\r\n"),
    "early": (b"", b"HTTP/1.1 100 \r\n\r\n"),
}


@contextmanager
def flood(peer: socket.socket, first: bytes, repeated: bytes) -> Iterator[None]:
    """Receive, and send unless `repeated` is empty, as fast as the other side lets a peer, until the end of the context."""
    is_ended = threading.Event()
    block = repeated * (256 * 1024 // max(1, len(repeated)))

    def send() -> None:
        rest = memoryview(first + block)
        while not is_ended.is_set():
            try:
                rest = rest[peer.send(rest) :] or memoryview(block)
            except TimeoutError:
                continue
            except OSError:
                return

    def receive() -> None:
        while not is_ended.is_set():
            try:
                if not peer.recv(1024 * 1024):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    peer.settimeout(TIMEOUT_S)
    threads = [threading.Thread(target=run) for run in ((send, receive) if repeated else (receive,))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_ended.set()
        for thread in threads:
            thread.join(30)


@contextmanager
def hostile_server(first: bytes, repeated: bytes, *, is_websocket: bool) -> Iterator[int]:
    """Run a job's server that floods its first connection, and yield its port."""
    is_ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                key = re.search(rb"(?i)sec-websocket-key: (\S+)", connection.recv(65536))
                if is_websocket and key is not None:
                    digest = base64.b64encode(hashlib.sha1(key[1] + WEBSOCKET_GUID, usedforsecurity=False).digest())
                    connection.sendall(ACCEPTED.format(digest.decode()).encode())
                with flood(connection, first, repeated):
                    assert is_ended.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            is_ended.set()
            thread.join(60)


def submit(running: Running, port: int = 9) -> str:
    """Return the id of a job of ada's that runs."""
    made = running.send("POST", "/api/v1/jobs", json={"run_id": "run-000001", "detached": True, "port": port})
    assert made.status_code == 201, made.text
    path = f"/api/v1/jobs/{made.json()['id']}"
    wait_until(lambda: running.send("GET", path).json()["state"] == "running", "the job runs")
    return str(made.json()["id"])


def connect(running: Running, path: str) -> socket.socket:
    url = httpx.URL(running.url)
    client = socket.create_connection(("127.0.0.1", url.port or 0), timeout=20)
    client.sendall(HANDSHAKE.format(path=f"{url.path}{path}").encode())
    answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return client


@contextmanager
def check_loop(running: Running, monkeypatch: pytest.MonkeyPatch, max_total_s: float) -> Iterator[None]:
    """Check that others are served during the flood, which the context begins."""
    with kept_memory(), measured_loop(monkeypatch) as found:
        yield
        until = time.monotonic() + FLOOD_S
        while time.monotonic() < until:
            assert running.send("GET", "/health", None).status_code == 200
            time.sleep(PAUSE_S)
    assert found.longest_step_s < MAX_STEP_S
    assert found.total_s < max_total_s


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("path", [SHELL, PORT], ids=["shell", "port"])
def test_clients_of_websockets(setting: Setting, monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    """Messages without content, single bytes, pings and parts of a message that never ends."""
    with ExitStack() as stack:
        port = stack.enter_context(hostile_server(b"", b"", is_websocket=True)) if path == PORT else 9
        running = stack.enter_context(served_broker(setting, loop="asyncio"))
        client = stack.enter_context(connect(running, path.format(job=submit(running, port))))
        with check_loop(running, monkeypatch, MAX_FRAMES_S if name in {"pings", "parts"} else MAX_MESSAGES_S):
            stack.enter_context(flood(client, *CLIENTS[name]))


@pytest.mark.parametrize("name", SERVERS)
def test_servers_of_jobs(setting: Setting, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The same in the other direction, and the smallest parts of a response."""
    is_websocket = name not in {"chunks", "early"}
    with ExitStack() as stack:
        port = stack.enter_context(hostile_server(*SERVERS[name], is_websocket=is_websocket))
        running = stack.enter_context(served_broker(setting, loop="asyncio"))
        job = submit(running, port)
        # What the first connection alone needs, such as imports, does not count.
        connect(running, SHELL.format(job=job)).close()
        with check_loop(running, monkeypatch, MAX_MESSAGES_S):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(running.url).port or 0)))
            head = HANDSHAKE.format(path=f"{httpx.URL(running.url).path}{PORT.format(job=job)}")
            client.sendall((head if is_websocket else head.replace("Connection: Upgrade\r\n", "")).encode())
            stack.enter_context(flood(client, b"", b""))
