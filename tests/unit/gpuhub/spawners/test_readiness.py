"""What the hub makes of what notebooks answer: the program that answers is the user's own."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import socketserver
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuhub.common.errors import GpuhubError, NodeSilent
from gpuhub.docker.client import DockerClients
from gpuhub.spawners import readiness

VERSION = b"X-JupyterHub-Version: 5.5.1\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
BLOCK = bytes(64 * 1024)
#: Most bytes that a notebook may send before the hub turns away: what sockets hold, and the limit of headers.
MOST_SENT = 16 * 1024**2
#: More than any of the answers below may need; a bound against hanging for ever.
TIMEOUT_S = 60.0


class HostileNotebook(socketserver.ThreadingTCPServer):
    """A server that sends to each client the parts of a new answer, as fast as they are read."""

    allow_reuse_address = True

    def __init__(self, answer: Callable[[], Iterator[bytes]], pause_s: float) -> None:
        super().__init__(("127.0.0.1", 0), HostileAnswer)
        self.answer, self.pause_s = answer, pause_s
        self.sent = self.connections = 0
        self.requests: list[bytes] = []


class HostileAnswer(socketserver.StreamRequestHandler):
    """The answer to one request."""

    server: HostileNotebook
    #: Ends a thread whose client neither reads nor disconnects, seconds.
    timeout = 30

    def handle(self) -> None:
        self.server.connections += 1
        with contextlib.suppress(OSError):
            lines: list[bytes] = []
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                lines.append(line)
            self.server.requests.append(b"".join(lines))
            for part in self.server.answer():
                self.request.sendall(part)
                self.server.sent += len(part)
                time.sleep(self.server.pause_s)


@contextmanager
def notebook(answer: Callable[[], Iterator[bytes]], pause_s: float = 0.0) -> Iterator[tuple[HostileNotebook, str]]:
    """Serve a notebook on loopback, and yield it with its URL."""
    with HostileNotebook(answer, pause_s) as hostile:
        thread = threading.Thread(target=hostile.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hostile, f"http://127.0.0.1:{hostile.server_address[1]}/user/ada/"
        finally:
            hostile.shutdown()
            thread.join()


def endless_body() -> Iterator[bytes]:
    yield OK + VERSION + b"\r\n"
    yield from itertools.repeat(BLOCK)


def gzip_bomb() -> Iterator[bytes]:
    packed = gzip.compress(bytes(64 * 1024**2))
    yield OK + VERSION + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed


def endless_header() -> Iterator[bytes]:
    yield OK + VERSION + b"X: "
    yield from itertools.repeat(b"x" * len(BLOCK))


def endless_headers() -> Iterator[bytes]:
    yield OK + VERSION
    yield from itertools.repeat(b"X: y\r\n" * 10_000)


def endless_interim_answers() -> Iterator[bytes]:
    yield from itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n")


def slow_drip() -> Iterator[bytes]:
    yield OK
    yield from (b"X-%d: y\r\n" % number for number in itertools.count())


def cookie() -> Iterator[bytes]:
    yield b"HTTP/1.1 503 Starting\r\nSet-Cookie: a=1\r\nContent-Length: 0\r\n\r\n"


def redirect() -> Iterator[bytes]:
    yield b"HTTP/1.1 302 Found\r\nLocation: http://[bad\r\n" + VERSION + b"Content-Length: 0\r\n\r\n"


async def is_running() -> None:
    return


async def has_not_ended() -> bool:
    return False


def limited_server(url: str, has_ended: Callable[[], Awaitable[bool]] = has_not_ended) -> Any:
    """Return what the hub knows of a server, with the wait for it."""
    server = SimpleNamespace(url=url)
    readiness.limit_wait_up(server, has_ended)
    return server


@pytest.mark.parametrize("answer", [endless_body, gzip_bomb, redirect])
async def test_only_the_headers_of_an_answer_are_read(answer: Callable[[], Iterator[bytes]]) -> None:
    """The notebook counts as started, at its start and for JupyterHub's own wait, and its body is left unread."""
    with notebook(answer) as (hostile, url):
        await asyncio.wait_for(readiness.wait_until_ready(f"{url}api", is_running), TIMEOUT_S)
        found = await limited_server(url).wait_up(timeout=TIMEOUT_S, http=True, extra_path="api")
    assert found.headers == {"X-JupyterHub-Version": "5.5.1"}
    assert hostile.sent < MOST_SENT
    assert all(request.startswith(b"GET /user/ada/api HTTP/1.1\r\n") for request in hostile.requests)
    assert all(b"accept-encoding: identity\r\n" in request.lower() for request in hostile.requests)


@pytest.mark.parametrize(
    ("answer", "pause_s"),
    [(endless_header, 0.0), (endless_headers, 0.0), (endless_interim_answers, 0.0), (slow_drip, 0.01)],
)
async def test_answer_without_end_of_headers_does_not_count(
    answer: Callable[[], Iterator[bytes]], pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt ends, and the notebook gets a new one, until it has ended."""
    monkeypatch.setattr(readiness, "_ATTEMPT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(readiness, "_CHECK_PERIOD_S", 0.5)

    async def check() -> None:
        if hostile.connections > 1:
            raise RuntimeError("it has ended")

    with notebook(answer, pause_s) as (hostile, url), pytest.raises(RuntimeError, match="has ended"):
        await asyncio.wait_for(readiness.wait_until_ready(url, check), TIMEOUT_S)
    assert hostile.sent < MOST_SENT * hostile.connections


async def test_cookies_of_a_starting_notebook_are_not_kept() -> None:
    """Its start may take days, with a new cookie in each of its answers."""

    async def check() -> None:
        if hostile.connections > 5:
            raise RuntimeError("it has ended")

    with notebook(cookie) as (hostile, url), pytest.raises(RuntimeError, match="has ended"):
        await asyncio.wait_for(readiness.wait_until_ready(url, check), TIMEOUT_S)
    assert not any(b"cookie" in request.lower() for request in hostile.requests)


@pytest.mark.parametrize(
    ("version", "left"),
    [
        (b"5.5.1", {"X-JupyterHub-Version": "5.5.1"}),
        (b"nonsense", {}),
        (b"9" * 5000, {}),
        (b"", {}),
    ],
)
async def test_invalid_version_header_is_removed(version: bytes, left: dict[str, str]) -> None:
    """JupyterHub would not start with it."""

    def answer() -> Iterator[bytes]:
        yield OK + b"X-JupyterHub-Version: " + version + b"\r\nContent-Length: 0\r\n\r\n"

    with notebook(answer) as (_, url):
        assert (await limited_server(url).wait_up(timeout=TIMEOUT_S, http=True)).headers == left


async def test_invalid_response_counts_as_a_timeout() -> None:
    """JupyterHub drops that one server, instead of giving up its own start."""

    def answer() -> Iterator[bytes]:
        yield b"no HTTP\r\n\r\n"

    with notebook(answer) as (_, url), pytest.raises(TimeoutError):
        await limited_server(url).wait_up(timeout=0.2, http=True)


async def test_wait_ends_with_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait may be days long."""
    monkeypatch.setattr(readiness, "_ATTEMPT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(readiness, "RECOVERY_CHECK_PERIOD_S", 0.1)

    async def has_ended() -> bool:
        return True

    with notebook(slow_drip, 0.01) as (_, url), pytest.raises(TimeoutError, match="has ended"):
        await limited_server(url, has_ended).wait_up(timeout=86400, http=True)


async def test_a_notebook_that_answers_wrongly_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start may wait for days, and each attempt costs the hub a connection."""
    monkeypatch.setattr(readiness, "_LATER_S", 0.0)
    with notebook(lambda: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])) as (hostile, url):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(readiness.wait_until_ready(url, is_running), 2.5)
        assert 1 <= len(hostile.requests) <= 3


async def test_daemon_that_is_silent_for_a_while_does_not_end_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker tells nothing of a container while it connects it to a network; a container that has ended still counts."""
    monkeypatch.setattr(readiness, "_CHECK_PERIOD_S", 0.0)
    answers: list[Exception | dict[str, Any]] = [
        NodeSilent("rig1"),
        {"State": {"Running": True}},
        NodeSilent("rig1"),
        {"State": {"Running": False, "ExitCode": 3}},
    ]

    async def inspect(*_: object) -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(readiness, "inspect_container", inspect)
    with pytest.raises(GpuhubError, match="exit code 3"):
        await readiness.wait_container_ready(cast("DockerClients", None), "rig1", "c1", "http://127.0.0.1:9/")
    monkeypatch.setattr(readiness, "_SILENCE_S", 0.1)
    answers += [NodeSilent("rig1")] * 1000
    with pytest.raises(NodeSilent):
        await readiness.wait_container_ready(cast("DockerClients", None), "rig1", "c1", "http://127.0.0.1:9/")


@pytest.mark.parametrize(
    ("age_s", "others_s", "period_s"),
    [(1.0, [], 0.025), (1.0, [0.5, 2.0, 3.0], 0.1), (1.0, [5.0] * 90, 0.5), (1.0, [40.0] * 90, 0.025), (31.0, [], 1.0)],
)
def test_waits_at_the_same_time_share_the_attempts(age_s: float, others_s: list[float], period_s: float) -> None:
    """One start is asked for often, many take turns, and those that take long count no more."""
    assert readiness.choose_period(age_s, [age_s, *others_s]) == pytest.approx(period_s)
