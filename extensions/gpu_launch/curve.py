"""An encrypted ZeroMQ socket that lets one key in: for the ranks' output, and for cells of standing ranks."""

from __future__ import annotations

import zmq
import zmq.auth.thread

from gpu_launch.spec import Channel


class _OneClient:
    """Accepts one Curve key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the key (Z85) is ours."""
        return key == self._public


class Door:
    """The notebook's end; not bound yet, so that `socket` can still be given options."""

    def __init__(self, kind: int) -> None:
        self._server_public, secret = zmq.curve_keypair()
        self._client_public, self._client_secret = zmq.curve_keypair()
        # A context of its own: authentication is a context's, and the kernel's sockets are none of ours.
        self._context = zmq.Context()
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=_OneClient(self._client_public))
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.curve_server = True
        self.socket.curve_publickey = self._server_public
        self.socket.curve_secretkey = secret

    def open(self, address: str) -> Channel:
        """Listen on a free port of `address`: what a client needs to come here."""
        port = self.socket.bind_to_random_port(f"tcp://{address}")
        return Channel(
            url=f"tcp://{address}:{port}",
            server_public=self._server_public,
            client_public=self._client_public,
            client_secret=self._client_secret,
        )

    def close(self) -> None:
        """Close everything; what was not sent is lost."""
        self.socket.close(linger=0)
        self._auth.stop()
        self._context.term()


def present(socket: zmq.Socket[bytes], channel: Channel) -> None:
    """Have a client's socket show its key, and connect it."""
    socket.curve_serverkey = channel.server_public
    socket.curve_publickey = channel.client_public
    socket.curve_secretkey = channel.client_secret
    socket.connect(channel.url)
