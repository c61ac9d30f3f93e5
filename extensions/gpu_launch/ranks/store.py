"""The store by which one start's ranks find each other: torch's TCPStore, in a process of its own.

The listening socket is opened before that process is there, so that its port is known and nobody else's.
"""

from __future__ import annotations

import signal
import socket
from datetime import timedelta

#: Ranks that all connect at once.
_WAITING = 1024


def listen(address: str) -> socket.socket:
    """A socket on a free port of `address`."""
    return socket.create_server((address, 0), backlog=_WAITING)


def serve(listener: socket.socket) -> None:
    """Serve until killed."""
    from torch.distributed import TCPStore

    # Ranks that are told to end need it for as long as they take.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    address, port = listener.getsockname()
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while store is not None:
        signal.pause()
