"""Sends cells to the ranks of a session and receives their ends, over an encrypted ZeroMQ socket.

A message is a JSON object with its `kind`, and frames of bytes.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import Channel
from gpu_launch.common.secure_channel import CurveServer, OutputReceiver, connect_client

_LINGER_MS = 2000
_DISPLAYS = "displays"
#: Fields of a channel in the file for the ranks.
_KEY_NAMES = ("server_public", "client_public", "client_secret")


@dataclass(frozen=True, kw_only=True)
class ControlMessage:
    """A message to or from `rank`."""

    rank: int
    header: dict[str, Any]
    frames: tuple[bytes, ...] = ()


class ControlServer:
    """The notebook's end. Not thread-safe."""

    def __init__(self, address: str) -> None:
        self._server = CurveServer(zmq.ROUTER)
        self._socket = self._server.socket
        # A rank may reconnect after a broken connection; sending to a missing rank is an error.
        self._socket.router_handover = True
        self._socket.router_mandatory = True
        #: A poll has found messages that were not received yet.
        self.has_pending = False
        self._channel = self._server.bind(address)

    def write_credentials(self, path: Path) -> None:
        """Write the address and keys that a rank needs to connect, readable by the owner alone."""
        channel = self._channel
        secret = {key: getattr(channel, key).decode() for key in _KEY_NAMES}
        run_folder.write_secret_json(path, {"url": channel.url, **secret})

    def send(self, message: ControlMessage) -> bool:
        """Send to one rank; return False if it is not connected."""
        try:
            self._socket.send_multipart(
                [_encode_rank(message.rank), json.dumps(message.header).encode(), *message.frames], flags=zmq.DONTWAIT
            )
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def receive(self, wait_ms: int) -> list[ControlMessage]:
        """Return the messages that have arrived, waiting up to `wait_ms` for the first one."""
        self.has_pending = False
        messages: list[ControlMessage] = []
        while self._socket.poll(0 if messages else wait_ms):
            sender, header, *frames = self._socket.recv_multipart()
            messages.append(ControlMessage(rank=int(sender), header=json.loads(header), frames=tuple(frames)))
        return messages

    def register(self, poller: zmq.Poller) -> None:
        """Wake `poller` up when a message arrives."""
        poller.register(self._socket, zmq.POLLIN)

    def close(self) -> None:
        """Close the socket; messages that were not sent are lost."""
        self._server.close()


class ControlClient:
    """A rank's end: a thread sends, receives and reports interrupts while the main thread runs a cell."""

    def __init__(self, path: Path, rank: int, *, on_interrupt: Callable[[int], None]) -> None:
        secret = json.loads(path.read_text())
        self._rank, self._on_interrupt = rank, on_interrupt
        self._inbox: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = _encode_rank(rank)
        self._socket.linger = _LINGER_MS
        connect_client(self._socket, Channel(url=secret["url"], **{key: secret[key].encode() for key in _KEY_NAMES}))
        internal_address = f"inproc://session-{id(self)}"
        self._outgoing = self._context.socket(zmq.PULL)
        self._outgoing.bind(internal_address)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.linger = _LINGER_MS
        self._outbox.connect(internal_address)
        self._thread = threading.Thread(target=self._serve, name="gpu_launch control", daemon=True)
        self._thread.start()

    def send(self, header: dict[str, Any], frames: Sequence[bytes] = ()) -> None:
        """Send to the notebook, from the main thread."""
        self._outbox.send_multipart([json.dumps(header).encode(), *frames])

    def receive(self) -> ControlMessage:
        """Wait for the next message to the main thread."""
        return self._inbox.get()

    def close(self) -> None:
        """Send pending messages for at most two seconds, then close."""
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
                message = ControlMessage(rank=self._rank, header=json.loads(header), frames=tuple(frames))
                match message.header["kind"]:
                    case "interrupt":
                        self._on_interrupt(message.header["cell"])
                    case "ping":
                        # The notebook only checks that it can be sent.
                        pass
                    case _:
                        self._inbox.put(message)
        self._outgoing.close()
        self._socket.close()


class CountingReceiver(OutputReceiver):
    """The notebook's end of the ranks' output, with a count of it.

    A wait ends early when a message arrives on `control`.
    """

    def __init__(self, address: str, control: ControlServer) -> None:
        super().__init__(address)
        self.counter = OutputCounter()
        self._control = control
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        control.register(self._poller)

    def receive(self, wait_ms: int, *, most: int = 100) -> list[dict[str, Any]]:
        if wait_ms and not self._control.has_pending:
            self._control.has_pending = any(socket is not self._socket for socket, _ in self._poller.poll(wait_ms))
            wait_ms = 0
        messages = super().receive(wait_ms, most=most)
        self.counter.count(messages)
        return messages


class OutputCounter:
    """Counts the received bytes of output by rank and stream, and the displays by rank."""

    def __init__(self) -> None:
        #: The number of a rank's displays counts like bytes of a stream.
        self._bytes: Counter[tuple[int, str]] = Counter()
        self._wanted: dict[tuple[int, str], int] = {}

    def count(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Count the output in agents' messages."""
        for message in messages:
            if message.get("kind") == "display":
                self._bytes[message["rank"], _DISPLAYS] += message["count"]
            for rank, stream, _ns, text, *skipped in message.get("entries", ()):
                self._bytes[rank, stream] += skipped[0] if text is None else len(text.encode("utf-8", "replace"))

    def expect(self, rank: int, written: Sequence[int]) -> None:
        """Expect these sizes in bytes of a rank's stdout and stderr, and this number of displays."""
        for stream, size in zip(("stdout", "stderr", _DISPLAYS), written, strict=True):
            self._wanted[rank, stream] = size

    @property
    def total_bytes(self) -> int:
        return sum(self._bytes.values())

    def is_complete(self, *, with_displays: bool = True) -> bool:
        """Return whether all expected output has arrived."""
        return all(
            self._bytes[rank, stream] >= size
            for (rank, stream), size in self._wanted.items()
            if with_displays or stream != _DISPLAYS
        )


def _encode_rank(rank: int) -> bytes:
    """Return a rank's identity on the socket."""
    return str(rank).encode()
