"""Encrypted ZeroMQ sockets with one allowed client key: for the ranks' output and the cells of a rank session."""

from __future__ import annotations

import zmq
import zmq.auth.thread

from gpu_launch.common.launch_spec import Channel


class _SingleKeyProvider:
    """Accepts one Curve key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key (Z85) is the allowed one."""
        return key == self._public


class CurveServer:
    """The notebook's end. It is not bound at first, so that options of `socket` can be set."""

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
