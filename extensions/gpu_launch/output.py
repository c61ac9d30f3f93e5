"""The way of ranks' output to the notebook: an encrypted ZeroMQ socket only this launch's agents may write to."""

from __future__ import annotations

import json
from typing import Any

import zmq
import zmq.auth.thread

from gpu_launch.spec import Channel

#: Batches kept on either side before the writer waits; the rest waits in the ranks' log files.
_WAITING_BATCHES = 200
_LINGER_MS = 2000


class OneClient:
    """Accepts one Curve key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the key (Z85) is ours."""
        return key == self._public


class Sink:
    """The notebook's end."""

    def __init__(self, address: str) -> None:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        # A context of its own: authentication is a context's, and the kernel's sockets are none of ours.
        self._context = zmq.Context()
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=OneClient(client_public))
        self._socket = self._context.socket(zmq.PULL)
        self._socket.curve_server = True
        self._socket.curve_publickey = server_public
        self._socket.curve_secretkey = server_secret
        self._socket.rcvhwm = _WAITING_BATCHES
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        self.channel = Channel(
            url=f"tcp://{address}:{port}",
            server_public=server_public,
            client_public=client_public,
            client_secret=client_secret,
        )

    def receive(self, wait_ms: int, *, most: int = 100) -> list[dict[str, Any]]:
        """What has arrived, waiting up to `wait_ms` for the first message."""
        found: list[dict[str, Any]] = []
        while len(found) < most and self._socket.poll(0 if found else wait_ms):
            found.append(json.loads(self._socket.recv()))
        return found

    def close(self) -> None:
        """Close everything."""
        self._socket.close(linger=0)
        self._auth.stop()
        self._context.term()


class Writer:
    """An agent's end. `send` waits while the notebook is behind."""

    def __init__(self, channel: Channel) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = _WAITING_BATCHES
        self._socket.linger = _LINGER_MS
        self._socket.curve_serverkey = channel.server_public
        self._socket.curve_publickey = channel.client_public
        self._socket.curve_secretkey = channel.client_secret
        self._socket.connect(channel.url)

    def send(self, message: dict[str, Any], *, wait_ms: int) -> bool:
        """Send one message; False when the notebook took nothing for `wait_ms`."""
        if not self._socket.poll(wait_ms, zmq.POLLOUT):
            return False
        self._socket.send(json.dumps(message).encode())
        return True

    def close(self) -> None:
        """Send what is left, for at most two seconds, and close."""
        self._socket.close()
        self._context.term()
