"""Limits of the broker's connections, over real sockets: heads, idle and slow clients, numbers, and forwarded addresses."""

from __future__ import annotations

import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpuhub.broker.api import server
from gpuhub.broker.api.dependencies import PREFIX
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import wait_until

HEALTH = f"GET {PREFIX}/health HTTP/1.1\r\nHost: x\r\n".encode()
#: An address of this machine that is not the server's own.
STRANGER = "127.0.0.2"
TIMEOUT_S = 1.0


@pytest.fixture
def broker(setting: Setting) -> Iterator[Running]:
    """A broker with a port."""
    with served_broker(setting) as running:
        yield running


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all data that reached the parser."""
    sizes: list[int] = []
    receive = HttpToolsProtocol.data_received

    def count(self: HttpToolsProtocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", count)
    return sizes


def connect(running: Running, source: str = "127.0.0.1") -> socket.socket:
    port = int(running.url.split(":")[2].split("/")[0])
    return socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0))


def read_status(connection: socket.socket) -> int:
    """Read a whole response and return its status."""
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def read_all(connection: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionError:
        pass  # closed with unread data
    return received


ENDLESS = {
    "header": HEALTH + b"X: ",
    "headers": HEALTH,
    "request line": b"GET /",
    "trailer": HEALTH.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ",
    "chunk extension": HEALTH.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n1;",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_heads_without_end_are_cut_off(broker: Running, parsed: list[int], kind: str) -> None:
    """Of 8 MiB the parser sees less than 128 KiB, and other clients are served."""
    unit = b"X: a\r\n" if kind == "headers" else b"aaaaaa"
    with connect(broker, STRANGER) as connection, pytest.raises(ConnectionError):
        connection.sendall(ENDLESS[kind])
        for _ in range(256):
            connection.sendall(unit * (32 * 1024 // len(unit)))
            time.sleep(0.001)
    assert sum(parsed) < 128 * 1024
    assert broker.send("GET", "/health").status_code == 200


def test_large_head_gets_431(broker: Running) -> None:
    """A client that waits for the answer learns the limit; a head below it is accepted."""
    with connect(broker) as connection:
        connection.sendall(HEALTH + b"X: " + b"a" * (server.MAX_HEAD_BYTES - 500) + b"\r\n\r\n")
        assert read_status(connection) == 200
        connection.sendall(HEALTH + b"X: " + b"a" * (3 * server.MAX_HEAD_BYTES))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431")
    assert str(server.MAX_HEAD_BYTES).encode() in answer


def test_large_bodies_are_no_heads(broker: Running) -> None:
    """Bodies have their own limit, in one piece or in chunks."""
    with connect(broker) as connection:
        head = HEALTH.replace(b"GET", b"POST").replace(b"/health", b"/api/v1/jobs") + b"Authorization: token ada\r\n"
        connection.sendall(head + b"Content-Length: 200000\r\n\r\n" + b"a" * 200_000)
        assert read_status(connection) == 422
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            connection.sendall(b"4000\r\n" + b"a" * 0x4000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert read_status(connection) == 422


@pytest.mark.parametrize("first", [b"", HEALTH + b"\r\n"], ids=["at first", "after a response"])
def test_slow_heads_are_cut_off(setting: Setting, monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """A byte now and then does not extend the time, neither at first nor on a kept connection."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", TIMEOUT_S)
    with served_broker(setting) as running, connect(running, STRANGER) as connection:
        connection.sendall(first)
        if first:
            assert read_status(connection) == 200
        # Headers as they should be: an invalid one would end the connection at once.
        head, sent = HEALTH + b"X: a\r\n" * 100, 0
        with pytest.raises(ConnectionError):
            while sent < 600:
                connection.sendall(head[sent : sent + 1])
                sent += 1
                time.sleep(0.05)
        assert sent < 600


def test_body_after_the_response_is_cut_off(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was refused before its body came does not keep the connection as long as its client sends."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", TIMEOUT_S)
    with served_broker(setting) as running, connect(running, STRANGER) as connection:
        head = HEALTH.replace(b"GET", b"PUT").replace(b"/health", b"/api/v1/files?path=x")
        connection.sendall(head + b"Content-Length: 1000000000\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 600:
                connection.sendall(b"a")
                sent += 1
                time.sleep(0.05)
        assert sent < 600


def test_idle_connections_of_one_client(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,200 silent connections of one client a part is kept, for a short time; others notice nothing."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 4 * TIMEOUT_S)
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_ADDRESS", 512)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with served_broker(setting) as running, ExitStack() as stack:
            silent = [stack.enter_context(connect(running, STRANGER)) for _ in range(1200)]
            wait_until(lambda: count_closed(silent) >= 1200 - server.MAX_CONNECTIONS_PER_ADDRESS, "most are refused")
            assert running.send("GET", "/health").status_code == 200
            wait_until(lambda: count_closed(silent) == 1200, "all are closed", 30)
            with connect(running, STRANGER) as connection:
                connection.sendall(HEALTH + b"\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            wait_until(lambda: not server.BoundedHttpProtocol._open[STRANGER], "nothing is counted any more")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def count_closed(connections: list[socket.socket]) -> int:
    """Return how many of the connections the server has closed."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN | select.POLLHUP | select.POLLERR)
    return len(poll.poll(0))


def test_requests_without_waiting_for_responses(broker: Running) -> None:
    """A client that does not wait for responses is refused before the broker has thousands of its requests."""
    slow = HEALTH.replace(b"/health", b"/api/v1/jobs").replace(b"GET", b"POST") + b"Content-Length: 10\r\n\r\n"
    with connect(broker, STRANGER) as connection:
        connection.sendall(HEALTH + b"\r\n" + HEALTH + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    with connect(broker, STRANGER) as connection:
        connection.sendall((slow + b"a" * 10) * 200)
        assert b"HTTP/1.1 400" in read_all(connection)


@pytest.mark.parametrize(
    ("source", "header", "address"),
    [
        ("127.0.0.1", b"1.2.3.4, 10.9.9.9", "10.9.9.9"),
        ("127.0.0.1", b"10.9.9.9, nonsense", "127.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
        (STRANGER, b"10.9.9.9", STRANGER),
    ],
)
def test_forwarded_addresses_count_from_the_proxy_alone(
    broker: Running, monkeypatch: pytest.MonkeyPatch, source: str, header: bytes | None, address: str
) -> None:
    """The last address is the one that the proxy appended; what a client sends before it, or alone, is ignored."""
    addresses = []

    async def identify(authorization: str | None, address: str) -> None:
        addresses.append(address)
        raise RuntimeError("seen")

    monkeypatch.setattr(broker.app.state.authenticator, "identify", identify)
    with connect(broker, source) as connection:
        forwarded = b"" if header is None else b"X-Forwarded-For: " + header + b"\r\n"
        connection.sendall(HEALTH.replace(b"/health", b"/api/v1/leases") + forwarded + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 500")
    assert addresses == [address]


def test_proxy_is_recognised_by_its_certificate() -> None:
    """With TLS the address alone does not count, nor does the name alone, which the hub's authority could sign as well."""

    class Transport:
        def __init__(self, subject: str, issuer: str) -> None:
            self.extra = {
                "ssl_object": object(),
                "peercert": {
                    "subject": ((("commonName", subject),),),
                    "issuer": ((("commonName", issuer),),),
                },
            }

        def get_extra_info(self, name: str) -> object:
            return self.extra.get(name)

    assert server._is_proxy(Transport("proxy-client", "proxy-client-ca"), is_local=False)
    assert not server._is_proxy(Transport("proxy-client", "notebooks-ca"), is_local=True)
    assert not server._is_proxy(Transport("user-ada", "proxy-client-ca"), is_local=True)
