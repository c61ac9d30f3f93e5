"""Encrypted ZeroMQ channels with one allowed client key: for the ranks' output and the cells of a rank session."""

from __future__ import annotations

import json
from typing import Any

import zmq
import zmq.auth.thread

from gpu_launch.common.launch_spec import Channel

#: Batches queued on either side before the sender waits; the rest stays in the ranks' log files.
_WAITING_BATCHES = 200
#: Maximum time for pending messages to be sent when the sender is closed, ms.
_LINGER_MS = 2000


class _SingleKeyProvider:
    """Accepts one Curve key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key (Z85) is the allowed one."""
        return key == self._public


class CurveServer:
    """The notebook's end of a channel. It is not bound at first, so that options of `socket` can be set."""

    def __init__(self, kind: int) -> None:
        self._server_public, secret = zmq.curve_keypair()
        self._client_public, self._client_secret = zmq.curve_keypair()
        # Its own context, because authentication applies to a whole context, including the kernel's sockets.
        self._context = zmq.Context()
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=_SingleKeyProvider(self._client_public))
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.curve_server = True
        self.socket.curve_publickey = self._server_public
        self.socket.curve_secretkey = secret

    def bind(self, address: str) -> Channel:
        """Listen on a free port of `address` and return the data that a client needs to connect."""
        port = self.socket.bind_to_random_port(f"tcp://{address}")
        return Channel(
            url=f"tcp://{address}:{port}",
            server_public=self._server_public,
            client_public=self._client_public,
            client_secret=self._client_secret,
        )

    def close(self) -> None:
        """Close the socket; messages that were not sent are lost."""
        self.socket.close(linger=0)
        self._auth.stop()
        self._context.term()


def connect_client(socket: zmq.Socket[bytes], channel: Channel) -> None:
    """Set a client's keys and connect its socket."""
    socket.curve_serverkey = channel.server_public
    socket.curve_publickey = channel.client_public
    socket.curve_secretkey = channel.client_secret
    socket.connect(channel.url)


class OutputReceiver:
    """The notebook's end of the channel for the ranks' output."""

    def __init__(self, address: str) -> None:
        self._server = CurveServer(zmq.PULL)
        self._socket = self._server.socket
        self._socket.rcvhwm = _WAITING_BATCHES
        self.channel = self._server.bind(address)

    def receive(self, wait_ms: int, *, most: int = 100) -> list[dict[str, Any]]:
        """Return the messages that have arrived, waiting up to `wait_ms` for the first one."""
        messages: list[dict[str, Any]] = []
        while len(messages) < most and self._socket.poll(0 if messages else wait_ms):
            messages.append(json.loads(self._socket.recv()))
        return messages

    def close(self) -> None:
        self._server.close()


class OutputSender:
    """An agent's end of it. `send` waits while the notebook is behind."""

    def __init__(self, channel: Channel) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = _WAITING_BATCHES
        self._socket.linger = _LINGER_MS
        connect_client(self._socket, channel)

    def send(self, message: dict[str, Any], *, wait_ms: int) -> bool:
        """Send one message; return False if the notebook did not accept it within `wait_ms`."""
        if not self._socket.poll(wait_ms, zmq.POLLOUT):
            return False
        self._socket.send(json.dumps(message).encode())
        return True

    def close(self) -> None:
        """Send pending messages for at most two seconds, then close."""
        self._socket.close()
        self._context.term()
