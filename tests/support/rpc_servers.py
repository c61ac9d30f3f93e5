"""Servers on loopback with prepared replies to RPC calls."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

#: Returns the bytes to send for a call's transaction id; None keeps the connection open without a reply.
Reply = Callable[[int], bytes | None]


def accepted(xid: int) -> bytes:
    """Return the reply that the program supports the version."""
    return record(xid, 1, 0, 0, 0, 0)


def record(*words: int) -> bytes:
    """Return words as one record."""
    return struct.pack(f">{len(words) + 1}I", 0x80000000 | 4 * len(words), *words)


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[int, list[int]]]:
    """Yield a server's port, and the list of the versions in its calls."""
    asked: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                call = connection.recv(1024)
                xid, version = struct.unpack(">I", call[4:8])[0], struct.unpack(">I", call[20:24])[0]
                asked.append(version)
                answer = reply(xid)
                if answer is not None:
                    with suppress(OSError):  # the client has read enough
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in kept:
                connection.close()
