"""The way of ranks' output to the notebook: an encrypted ZeroMQ socket only this launch's agents may write to."""

from __future__ import annotations

import json
from typing import Any

import zmq

from gpu_launch import curve
from gpu_launch.spec import Channel

#: Batches kept on either side before the writer waits; the rest waits in the ranks' log files.
_WAITING_BATCHES = 200
_LINGER_MS = 2000


class Sink:
    """The notebook's end."""

    def __init__(self, address: str) -> None:
        self._door = curve.Door(zmq.PULL)
        self._socket = self._door.socket
        self._socket.rcvhwm = _WAITING_BATCHES
        self.channel = self._door.open(address)

    def receive(self, wait_ms: int, *, most: int = 100) -> list[dict[str, Any]]:
        """What has arrived, waiting up to `wait_ms` for the first message."""
        found: list[dict[str, Any]] = []
        while len(found) < most and self._socket.poll(0 if found else wait_ms):
            found.append(json.loads(self._socket.recv()))
        return found

    def close(self) -> None:
        """Close everything."""
        self._door.close()


class Writer:
    """An agent's end. `send` waits while the notebook is behind."""

    def __init__(self, channel: Channel) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = _WAITING_BATCHES
        self._socket.linger = _LINGER_MS
        curve.present(self._socket, channel)

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
