"""Connections to servers in workers and to services: TCP within the container, carried by a program there.

In workers it is the courier's `port`, at services the relay's. Its input and output go over Docker's exec: no port of a
node is open, and the container's networks are not used. httpcore speaks HTTP over the connections, and keeps idle ones
for the next request.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import httpcore

from gpuhub.broker.files.courier_client import CourierClient
from gpuhub.common.errors import GpuhubError, NodeUnreachable, Unavailable
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_spec import COURIER_COMMAND
from gpuhub.docker.exec_session import start_exec
from gpuhub.domain.models import WorkerRow

#: Connections to one server at the same time, each with a process in its container, and idle ones that are kept.
MAX_CONNECTIONS = 32
#: Requests of one visitor to one server that use connections at the same time; others wait.
MAX_OF_VISITOR = MAX_CONNECTIONS // 4
#: Maximum time to wait for a connection, seconds.
MAX_WAIT_S = 30.0
MAX_IDLE_CONNECTIONS = 6
#: Time after which unused connections are closed, seconds.
IDLE_S = 60.0
_SWEEP_S = 10.0
#: Bytes that are read at once: they are parsed without a turn for others.
_MAX_READ = 16 * 1024
#: The beginning of an informational response, and of the one after them: also 101, which begins another protocol.
_INFORMATIONAL, _FINAL = re.compile(rb"HTTP/1\.[01] 1(?!01)"), re.compile(rb"\nHTTP/1\.[01] (?:101|[2-9])")
#: Maximum number of bytes of informational responses.
_MAX_INFORMATIONAL = 64 * 1024
#: Number of bytes that show whether another informational response begins.
_STATUS_BYTES = 12
#: Received bytes that wait to be read.
_MAX_BUFFER = 1024 * 1024


class _InformationalLimit:
    """Limits what a server sends in front of its answer, which httpcore reads for as long as it comes."""

    def __init__(self) -> None:
        self._is_awaited = True
        #: The end of what was received, in which the response may have begun.
        self._end = b""
        #: Bytes of informational responses.
        self._size = 0

    def begin(self) -> None:
        """Note that the next part may begin an answer, because something was sent."""
        self._is_awaited, self._end, self._size = True, b"", 0

    def check(self, part: bytes) -> None:
        """Count a part of the answer.

        Raises:
            httpcore.RemoteProtocolError: There are too many informational responses.
        """
        if not self._is_awaited:
            return
        text = self._end + part
        if not self._size and len(text) < _STATUS_BYTES:
            self._end = text
            return
        if (not self._size and not _INFORMATIONAL.match(text)) or _FINAL.search(text):
            self._is_awaited = False
            return
        self._size += len(part)
        if self._size > _MAX_INFORMATIONAL:
            raise httpcore.RemoteProtocolError("the server sends informational responses (1xx) without end")
        self._end = text[-_STATUS_BYTES:]


class PortStream(httpcore.AsyncNetworkStream):
    """One connection. It is read ahead, so that its end is noticed while it is idle."""

    def __init__(self, client: CourierClient) -> None:
        """`client` is entered, and is closed with the stream."""
        self._client = client
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._is_ended = False
        self._received = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._limit = _InformationalLimit()
        self._receiving = asyncio.ensure_future(self._receive())

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's interface
        # A server that always sends would otherwise leave no turn for other tasks.
        await asyncio.sleep(0)
        max_bytes = min(max_bytes, _MAX_READ)
        try:
            async with asyncio.timeout(timeout):
                await self._received.wait()
        except TimeoutError:
            raise httpcore.ReadTimeout from None
        if not self._parts:
            return b""
        part = self._parts.popleft()
        if len(part) > max_bytes:
            self._parts.appendleft(part[max_bytes:])
            part = part[:max_bytes]
        self._size -= len(part)
        if self._size < _MAX_BUFFER:
            self._has_room.set()
        if not self._parts and not self._is_ended:
            self._received.clear()
        self._limit.check(part)
        return part

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore's interface
        self._limit.begin()
        try:
            async with asyncio.timeout(timeout):
                await self._client.send(buffer)
        except TimeoutError:
            raise httpcore.WriteTimeout from None
        except NodeUnreachable as error:
            raise httpcore.WriteError(str(error)) from None

    async def aclose(self) -> None:
        # At first, since the rest may be cancelled.
        await self._client.__aexit__(None, None, None)
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)

    def get_extra_info(self, info: str) -> Any:
        return self._received.is_set() if info == "is_readable" else None

    async def _receive(self) -> None:
        try:
            with suppress(GpuhubError):
                async for data in self._client.read_output():
                    self._parts.append(data)
                    self._size += len(data)
                    self._received.set()
                    if self._size >= _MAX_BUFFER:
                        self._has_room.clear()
                        await self._has_room.wait()
        finally:
            self._is_ended = True
            self._received.set()


class _PortBackend(httpcore.AsyncNetworkBackend):
    """Opens httpcore's connections."""

    def __init__(self, connect: Callable[[], Awaitable[PortStream]]) -> None:
        self._connect = connect

    async def connect_tcp(self, *_: Any, **__: Any) -> PortStream:
        return await self._connect()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A server in a container."""

    node: str
    #: Container in which connections to it begin.
    container_id: str
    port: int
    #: Program that carries one connection, for Docker's exec.
    command: tuple[str, ...] = field(repr=False)


def find_worker_server(worker: WorkerRow, port: int) -> ServerAddress:
    """Return the address of a server in a worker."""
    command = (*COURIER_COMMAND, "port", f"--port={port}")
    return ServerAddress(node=worker.node, container_id=worker.container_id or "", port=port, command=command)


@dataclass(slots=True)
class _ServerPool:
    """The connections to one server."""

    pool: httpcore.AsyncConnectionPool
    #: Number of requests that use them.
    users: int = 0
    #: Visitor → the slots of which the visitor may use some at a time.
    of_visitors: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)
    used_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())


@asynccontextmanager
async def _hold_place(places: asyncio.Semaphore, visitor: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await places.acquire()
    except TimeoutError:
        raise Unavailable(
            f"{visitor} has {MAX_OF_VISITOR} requests to this server already, which is the limit: wait until one ends"
        ) from None
    try:
        yield
    finally:
        places.release()


class PortConnections:
    """The connections to all servers of jobs and to services."""

    def __init__(self, daemons: DockerClients) -> None:
        self._daemons = daemons
        #: Pools by container and port.
        self._pools: dict[tuple[str, int], _ServerPool] = {}

    async def connect(self, server: ServerAddress) -> PortStream:
        """Open one connection, which the caller closes.

        Raises:
            Unavailable: nothing listens on the port, or the node does not answer.
            GpuhubError: the container does not run any more.
        """
        client = CourierClient(await start_exec(self._daemons, server.node, server.container_id, server.command))
        return PortStream(await client.__aenter__())

    @asynccontextmanager
    async def use_pool(self, server: ServerAddress, visitor: str) -> AsyncIterator[httpcore.AsyncConnectionPool]:
        """Return the pool of connections to a server for one request; it stays open for the duration of the context.

        Raises:
            Unavailable: the visitor's other requests to the server take too long.
        """
        key = (server.container_id, server.port)
        if key not in self._pools:
            pool = httpcore.AsyncConnectionPool(
                max_connections=MAX_CONNECTIONS,
                max_keepalive_connections=MAX_IDLE_CONNECTIONS,
                keepalive_expiry=IDLE_S,
                network_backend=_PortBackend(lambda: self.connect(server)),
            )
            self._pools[key] = _ServerPool(pool)
        server_pool = self._pools[key]
        server_pool.users += 1
        places = server_pool.of_visitors.setdefault(visitor, asyncio.Semaphore(MAX_OF_VISITOR))
        try:
            async with _hold_place(places, visitor):
                yield server_pool.pool
        finally:
            server_pool.users -= 1
            server_pool.used_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Close unused connections, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self.close_idle(asyncio.get_running_loop().time() - IDLE_S)

    async def close_idle(self, before: float) -> None:
        """Close the connections to servers that were last used before this time of the event loop."""
        idle = [key for key, one in self._pools.items() if not one.users and one.used_at < before]
        for pool in [self._pools.pop(key).pool for key in idle]:
            await pool.aclose()

    async def close(self) -> None:
        """Close all connections."""
        pools = [server_pool.pool for server_pool in self._pools.values()]
        self._pools.clear()
        for pool in pools:
            with suppress(RuntimeError):
                # httpcore refuses to close a pool with open requests, whose tasks the server has cancelled.
                await pool.aclose()
