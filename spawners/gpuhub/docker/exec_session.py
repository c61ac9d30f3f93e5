"""Programs that run in an existing container, with their input and output as streams.

Docker's connection is read and written when it is ready: a session that is silent for hours costs nothing, and a sender
waits for a slow receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gpuhub.common.errors import NodeUnreachable
from gpuhub.docker.client import CallKind, DockerClients

#: Docker's frame header: the stream, three unused bytes, and the size (big-endian).
_FRAME = struct.Struct(">BxxxI")
_BLOCK = 256 * 1024
#: TLS may have to write before it can read on, and the other way round; seconds until the next attempt.
_TLS_RETRY_S = 0.01


class Demultiplexer:
    """Splits Docker's frames into parts of streams, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._stream, self._left = 0, 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add received bytes and return the complete parts as pairs of stream and data, in order."""
        self._buffer += data
        parts: list[tuple[int, bytes]] = []
        while True:
            if self._left:
                part = bytes(self._buffer[: self._left])
                if not part:
                    return parts
                del self._buffer[: len(part)]
                self._left -= len(part)
                parts.append((self._stream, part))
            elif len(self._buffer) >= _FRAME.size:
                self._stream, self._left = _FRAME.unpack(self._buffer[: _FRAME.size])
                del self._buffer[: _FRAME.size]
            else:
                return parts


class ExecSession:
    """A program that runs in a container, as a `ProgramSession`."""

    def __init__(self, node: str, connection: Any) -> None:
        """Wrap what docker-py's `exec_start(socket=True)` returns: a socket, or a file around one."""
        self._node = node
        #: Kept because the connection would close with docker-py's objects.
        self._connection = connection
        self._socket: socket.socket = getattr(connection, "_sock", connection)
        self._socket.setblocking(False)
        self._parts: deque[tuple[int, bytes]] = deque()
        self._frames = Demultiplexer()
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def read(self) -> tuple[int, bytes] | None:
        """Return the next part as stream and data; None at the end, also when the connection is lost."""
        # A program that always has output would otherwise leave no turn for other tasks.
        await asyncio.sleep(0)
        while not self._parts:
            data = await self._when_ready(lambda: self._socket.recv(_BLOCK), self._add_reader)
            if not data:
                return None
            self._parts.extend(self._frames.feed(data))
        return self._parts.popleft()

    async def send(self, data: bytes) -> None:
        """Write to the program's input.

        Raises:
            NodeUnreachable: The connection is lost: the program has ended, or its node is unreachable.
        """
        rest = memoryview(data)
        while rest:
            await asyncio.sleep(0)
            sent = await self._when_ready(lambda: self._socket.send(rest[:_BLOCK]), self._add_writer)  # noqa: B023
            if not sent:
                raise NodeUnreachable(f"node {self._node}: the connection to the container was lost")
            rest = rest[sent:]

    def close(self) -> None:
        """Close the connection; the program sees the end of its input."""
        if self._is_closed:
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        with contextlib.suppress(OSError):
            # The plain socket is shut down, because TLS cannot shut down one direction alone.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        response = getattr(self._connection, "_response", None)
        for closable in (self._connection, self._socket, *([] if response is None else [response])):
            # An object that was closed together with another one raises ValueError.
            with contextlib.suppress(OSError, ValueError):
                closable.close()

    async def _when_ready(self, act: Callable[[], Any], wait: Callable[[Callable[[], None]], None]) -> Any:
        """Return the result of `act` as soon as it need not wait; None when the connection is closed."""
        while not self._is_closed:
            try:
                return act()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                is_crossed = isinstance(error, ssl.SSLWantReadError) and wait == self._add_writer
                is_crossed |= isinstance(error, ssl.SSLWantWriteError) and wait == self._add_reader
                await (asyncio.sleep(_TLS_RETRY_S) if is_crossed else self._ready(wait))
            except OSError:
                break
        return None

    async def _ready(self, wait: Callable[[Callable[[], None]], None]) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(ready)
        wait(lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._is_closed:
                remove = self._remove_reader if wait == self._add_reader else self._remove_writer
                remove()

    def _add_reader(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(self._socket, call)

    def _add_writer(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_writer(self._socket, call)

    def _remove_reader(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)

    def _remove_writer(self) -> None:
        asyncio.get_running_loop().remove_writer(self._socket)


async def start_exec(daemons: DockerClients, node: str, container: str, command: Sequence[str]) -> ExecSession:
    """Start a program in a running container as the container's user.

    Raises:
        NodeUnreachable: The node does not answer.
        NotFound, Conflict: The container does not exist or does not run.
    """

    def start(client: Any) -> Any:
        created = client.exec_create(container, list(command), stdin=True, stdout=True, stderr=True)
        return client.exec_start(created["Id"], socket=True)

    return ExecSession(node, await daemons.run(node, start, kind=CallKind.EXEC))
