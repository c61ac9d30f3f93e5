"""Runs sshd for one client, whose bytes arrive in frames; a line with the host key and sshd's bytes go to stdout."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import BinaryIO

from gpu_launch.courier.protocol import DATA, STDIN, ClientGone, CourierError, read_frame, write_report
from gpu_launch.errors import UsageError
from gpu_launch.sshd.session import SshdError, SshdSession

_BLOCK = 65536
#: Umask of logins to a machine; the courier's own files are for their owner alone.
_UMASK = 0o022


def run_ssh(public_key: str, sink: BinaryIO, *, source: int = STDIN) -> dict[str, int]:
    """Serve one connection of the owner of `public_key` until client or sshd end it.

    Raises:
        CourierError: sshd cannot be started.
    """
    os.umask(_UMASK)
    try:
        session = SshdSession.start(public_key)
    except UsageError as error:
        raise CourierError("invalid", str(error)) from None
    except SshdError as error:
        raise CourierError("failed", str(error)) from None
    try:
        write_report(ready=True)
        threading.Thread(target=_pass_input, args=(source, session.connection), daemon=True).start()
        sink.write(session.greeting.build_line())
        sink.flush()
        with contextlib.suppress(ConnectionError):
            while data := session.connection.recv(_BLOCK):
                sink.write(data)
                sink.flush()
    finally:
        session.close()
    return {"exit": 0}


def _pass_input(source: int, connection: socket.socket) -> None:
    with contextlib.suppress(ClientGone, OSError):
        while True:
            kind, data = read_frame(source)
            if kind == DATA:
                connection.sendall(data)
    # sshd sees the end of its input, and ends.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
