"""Runs in a service's relay container, without gpuhub: carries one TCP connection to the service.

The arguments are the service's port, or `wait` for the container's main process. Input arrives in frames of the
protocol that `gpu_launch.courier.protocol` describes, output goes to stdout, reports to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any, BinaryIO

_BEGIN, _DATA, _END = range(3)
_HEADER = struct.Struct(">BI")
_MAX_PAYLOAD = 1024 * 1024
_BLOCK = 65536
_CONNECT_TIMEOUT_S = 10.0


def _report(**values: Any) -> None:
    sys.stderr.write(json.dumps(values) + "\n")
    sys.stderr.flush()


def _read_frame(source: BinaryIO) -> tuple[int, bytes] | None:
    """Return kind and payload of the next frame; None at the end of the input."""
    header = source.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, size = _HEADER.unpack(header)
    payload = source.read(min(size, _MAX_PAYLOAD))
    return None if len(payload) < size else (kind, payload)


def _pass_input(source: BinaryIO, connection: socket.socket) -> None:
    direction = socket.SHUT_RDWR
    try:
        while (frame := _read_frame(source)) is not None:
            if frame[0] == _DATA:
                connection.sendall(frame[1])
            elif frame[0] == _END:
                direction = socket.SHUT_WR
                break
        connection.shutdown(direction)
    except OSError:
        pass  # the service has closed the connection, which the reader of its output notices


def _relay(port: int) -> None:
    source = os.fdopen(0, "rb")
    if _read_frame(source) is None:
        return
    try:
        connection = socket.create_connection(("localhost", port), timeout=_CONNECT_TIMEOUT_S)
    except OSError:
        _report(error={"code": "unavailable", "text": f"nothing listens on port {port} of the service yet"})
        return
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _report(ready=True)
    threading.Thread(target=_pass_input, args=(source, connection), daemon=True).start()
    try:
        while data := connection.recv(_BLOCK):
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]
    except OSError:
        pass  # either side has gone
    _report(done={})


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        signal.pause()
    else:
        _relay(int(sys.argv[1]))
        # Without waiting for the thread that reads.
        os._exit(0)
