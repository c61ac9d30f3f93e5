"""Programs run beside a container's own, with their input and output as streams.

Docker's connection is read and written when it is ready, so that one that is silent for hours costs nothing, and who
sends more than the other side takes waits.
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

from gpuhub.containers.daemons import Daemons
from gpuhub.errors import NodeUnreachable

STDOUT, STDERR = 1, 2
#: Docker's frame: the stream, three bytes of nothing, and the size (big-endian).
_FRAME = struct.Struct(">BxxxI")
_BLOCK = 256 * 1024
#: TLS may have to write before it can read on, and the other way round: so soon it is tried again, seconds.
_TLS_AGAIN_S = 0.01


class Demultiplexer:
    """Docker's frames taken apart, however they arrive. Pure."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._stream, self._left = 0, 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Parts of streams, in order."""
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


class Exec:
    """One such program. One task at a time may read, and one may send."""

    def __init__(self, node: str, found: Any) -> None:
        """`found` is what docker-py's `exec_start(socket=True)` gives: a socket, or a file around one."""
        self._node = node
        #: Dropping docker-py's objects would close the connection.
        self._found = found
        self._socket: socket.socket = getattr(found, "_sock", found)
        self._socket.setblocking(False)
        self._parts: deque[tuple[int, bytes]] = deque()
        self._frames = Demultiplexer()
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def read(self) -> tuple[int, bytes] | None:
        """The next part: of which stream, and what; None at the end, also when the connection breaks off."""
        while not self._parts:
            data = await self._when_ready(lambda: self._socket.recv(_BLOCK), self._add_reader)
            if not data:
                return None
            self._parts.extend(self._frames.feed(data))
        return self._parts.popleft()

    async def send(self, data: bytes) -> None:
        """Write to its input; returns when it is on its way.

        Raises:
            NodeUnreachable: the connection broke off: it has ended, or its node is away.
        """
        rest = memoryview(data)
        while rest:
            sent = await self._when_ready(lambda: self._socket.send(rest[:_BLOCK]), self._add_writer)  # noqa: B023
            if not sent:
                raise NodeUnreachable(f"node {self._node}: the connection to the container broke off")
            rest = rest[sent:]

    def close(self) -> None:
        """Break off: the program sees the end of its input."""
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
            # Of the plain socket, which TLS would not shut down in one direction only.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        response = getattr(self._found, "_response", None)
        for one in (self._found, self._socket, *([] if response is None else [response])):
            # What was closed with another of them says so by a ValueError.
            with contextlib.suppress(OSError, ValueError):
                one.close()

    async def _when_ready(self, act: Callable[[], Any], wait: Callable[[Callable[[], None]], None]) -> Any:
        """What `act` gives as soon as it need not wait; nothing where the connection is over."""
        while not self._is_closed:
            try:
                return act()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                is_crossed = isinstance(error, ssl.SSLWantReadError) and wait == self._add_writer
                is_crossed |= isinstance(error, ssl.SSLWantWriteError) and wait == self._add_reader
                await (asyncio.sleep(_TLS_AGAIN_S) if is_crossed else self._ready(wait))
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


async def start_exec(daemons: Daemons, node: str, container: str, command: Sequence[str]) -> Exec:
    """Start a program in a running container, as the container's own user.

    Raises:
        NodeUnreachable: the node does not answer.
        NotFound, Conflict: there is no such container, or it does not run.
    """

    def start(client: Any) -> Any:
        made = client.exec_create(container, list(command), stdin=True, stdout=True, stderr=True)
        return client.exec_start(made["Id"], socket=True)

    return Exec(node, await daemons.run(node, start))
