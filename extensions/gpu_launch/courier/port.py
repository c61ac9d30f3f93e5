"""Carries one TCP connection to a server in this container: its input arrives in frames, its output goes to stdout."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import BinaryIO

from gpu_launch.courier.protocol import DATA, END, STDIN, ClientGone, CourierError, read_frame, write_report

_BLOCK = 65536
_CONNECT_TIMEOUT_S = 10.0


def run_port(port: int, sink: BinaryIO, *, source: int = STDIN) -> dict[str, int]:
    """Connect to a port of this container and pass bytes until client or server end the connection.

    Raises:
        CourierError: Nothing listens on the port.
    """
    try:
        connection = socket.create_connection(("localhost", port), timeout=_CONNECT_TIMEOUT_S)
    except OSError:
        raise CourierError("unavailable", f"nothing listens on port {port} of the job yet") from None
    with connection:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        write_report(ready=True)
        threading.Thread(target=_pass_input, args=(source, connection), daemon=True).start()
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(_BLOCK):
                sink.write(data)
                sink.flush()
    return {}


def _pass_input(source: int, connection: socket.socket) -> None:
    direction = socket.SHUT_RDWR
    with contextlib.suppress(ClientGone, OSError):
        while True:
            kind, data = read_frame(source)
            if kind == DATA:
                connection.sendall(data)
            elif kind == END:
                direction = socket.SHUT_WR
                break
    with contextlib.suppress(OSError):
        connection.shutdown(direction)
