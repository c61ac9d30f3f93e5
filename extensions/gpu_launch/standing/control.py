"""The way of cells to standing ranks and of their ends back: an encrypted ZeroMQ socket for the group's own ranks only.

A message is a JSON object, its `kind` among it, and frames of bytes.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from gpu_launch import curve, runs
from gpu_launch.spec import Channel

_LINGER_MS = 2000
#: Of a channel, as written for the ranks.
_KEYS = ("server_public", "client_public", "client_secret")


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message; `rank` is who sent it, or is to get it."""

    rank: int
    header: dict[str, Any]
    frames: tuple[bytes, ...] = ()


class Control:
    """The notebook's end. For one thread at a time."""

    def __init__(self, address: str) -> None:
        self._door = curve.Door(zmq.ROUTER)
        self._socket = self._door.socket
        # A connection that broke and comes back is the same rank's; what is sent to none is an error.
        self._socket.router_handover = True
        self._socket.router_mandatory = True
        #: Somebody has seen that there is something to receive, and waits for it no more.
        self.has_news = False
        self._channel = self._door.open(address)

    def write(self, path: Path) -> None:
        """Write what a rank needs to come here, for its owner alone."""
        channel = self._channel
        secret = {key: getattr(channel, key).decode() for key in _KEYS}
        runs.write_secret(path, {"url": channel.url, **secret})

    def send(self, message: Message) -> bool:
        """Send to one rank; False when it is not connected."""
        try:
            self._socket.send_multipart(
                [_name(message.rank), json.dumps(message.header).encode(), *message.frames], flags=zmq.DONTWAIT
            )
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def receive(self, wait_ms: int) -> list[Message]:
        """What has arrived, waiting up to `wait_ms` for the first message."""
        self.has_news = False
        found: list[Message] = []
        while self._socket.poll(0 if found else wait_ms):
            sender, header, *frames = self._socket.recv_multipart()
            found.append(Message(rank=int(sender), header=json.loads(header), frames=tuple(frames)))
        return found

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake for what arrives here."""
        poller.register(self._socket, zmq.POLLIN)

    def close(self) -> None:
        """Close everything; what was not sent is lost."""
        self._door.close()


class Link:
    """A rank's end: a thread sends, receives, and hands on interrupts while the main thread runs a cell."""

    def __init__(self, path: Path, rank: int, *, on_interrupt: Callable[[int], None]) -> None:
        secret = json.loads(path.read_text())
        self._rank, self._on_interrupt = rank, on_interrupt
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = _name(rank)
        self._socket.linger = _LINGER_MS
        curve.present(self._socket, Channel(url=secret["url"], **{key: secret[key].encode() for key in _KEYS}))
        inside = f"inproc://standing-{id(self)}"
        self._outgoing = self._context.socket(zmq.PULL)
        self._outgoing.bind(inside)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.linger = _LINGER_MS
        self._outbox.connect(inside)
        self._thread = threading.Thread(target=self._serve, name="gpu_launch control", daemon=True)
        self._thread.start()

    def send(self, header: dict[str, Any], frames: Sequence[bytes] = ()) -> None:
        """Send to the notebook. For the main thread."""
        self._outbox.send_multipart([json.dumps(header).encode(), *frames])

    def receive(self) -> Message:
        """The next message that is for the main thread; waits for it."""
        return self._inbox.get()

    def close(self) -> None:
        """Send what is left, for at most two seconds, and close."""
        self._outbox.send(b"")
        self._thread.join(_LINGER_MS / 1000)
        self._outbox.close()
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._outgoing, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._outgoing in ready:
                frames = self._outgoing.recv_multipart()
                if frames == [b""]:
                    break
                self._socket.send_multipart(frames)
            if self._socket in ready:
                header, *frames = self._socket.recv_multipart()
                message = Message(rank=self._rank, header=json.loads(header), frames=tuple(frames))
                match message.header["kind"]:
                    case "interrupt":
                        self._on_interrupt(message.header["cell"])
                    case "ping":
                        # That it could be sent is all that the notebook wants to know.
                        pass
                    case _:
                        self._inbox.put(message)
        self._outgoing.close()
        self._socket.close()


def _name(rank: int) -> bytes:
    """A rank's name on the socket."""
    return str(rank).encode()
