"""What the hub makes of what notebooks answer: the program that answers is the user's own."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhub.spawners import readiness

VERSION = b"X-JupyterHub-Version: 5.5.1\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
BLOCK = bytes(64 * 1024)
#: Most bytes that a notebook may send before the hub turns away: what sockets hold, and the limit of headers.
MOST_SENT = 16 * 1024**2
#: More than any of the answers below may need; a bound against hanging for ever.
TIMEOUT_S = 60.0


class HostileNotebook:
    """A server that sends to each client the parts of a new answer, as fast as they are read."""

    def __init__(self, answer: Callable[[], Iterator[bytes]], pause_s: float) -> None:
        self._answer, self._pause_s = answer, pause_s
        self.sent = self.connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        self.connections += 1
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            for part in self._answer():
                writer.write(part)
                self.sent += len(part)
                await writer.drain()
                await asyncio.sleep(self._pause_s)
        except ConnectionError:
            return
        finally:
            writer.close()


@asynccontextmanager
async def notebook(
    answer: Callable[[], Iterator[bytes]], pause_s: float = 0.0
) -> AsyncIterator[tuple[HostileNotebook, str]]:
    """Serve a notebook on loopback, and yield it with its URL."""
    hostile = HostileNotebook(answer, pause_s)
    server = await asyncio.start_server(hostile.serve, "127.0.0.1", 0)
    try:
        yield hostile, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/user/ada/"
    finally:
        server.close()


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
    async with asyncio.timeout(TIMEOUT_S), notebook(answer) as (hostile, url):
        await readiness.wait_until_ready(f"{url}api", is_running)
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

    async with asyncio.timeout(TIMEOUT_S), notebook(answer, pause_s) as (hostile, url):
        with pytest.raises(RuntimeError, match="has ended"):
            await readiness.wait_until_ready(url, check)
    assert hostile.sent < MOST_SENT * hostile.connections


async def test_cookies_of_a_starting_notebook_are_not_kept() -> None:
    """Its start may take days, with a new cookie in each of its answers."""

    async def check() -> None:
        if hostile.connections > 5:
            raise RuntimeError("it has ended")

    async with asyncio.timeout(TIMEOUT_S), notebook(cookie) as (hostile, url):
        with pytest.raises(RuntimeError, match="has ended"):
            await readiness.wait_until_ready(url, check)
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

    async with asyncio.timeout(TIMEOUT_S), notebook(answer) as (_, url):
        assert (await limited_server(url).wait_up(timeout=TIMEOUT_S, http=True)).headers == left


async def test_invalid_response_counts_as_a_timeout() -> None:
    """JupyterHub drops that one server, instead of giving up its own start."""

    def answer() -> Iterator[bytes]:
        yield b"no HTTP\r\n\r\n"

    async with asyncio.timeout(TIMEOUT_S), notebook(answer) as (_, url):
        with pytest.raises(TimeoutError):
            await limited_server(url).wait_up(timeout=0.2, http=True)


async def test_wait_ends_with_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait may be days long."""
    monkeypatch.setattr(readiness, "_ATTEMPT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(readiness, "RECOVERY_CHECK_PERIOD_S", 0.1)

    async def has_ended() -> bool:
        return True

    async with asyncio.timeout(TIMEOUT_S), notebook(slow_drip, 0.01) as (_, url):
        with pytest.raises(TimeoutError, match="has ended"):
            await limited_server(url, has_ended).wait_up(timeout=86400, http=True)
