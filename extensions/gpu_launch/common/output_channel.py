"""Sends the ranks' output to the notebook over an encrypted ZeroMQ socket that only this launch's agents can use."""

from __future__ import annotations

import json
from typing import Any

import zmq

from gpu_launch.common import secure_socket
from gpu_launch.common.launch_spec import Channel

#: Batches queued on either side before the sender waits; the rest stays in the ranks' log files.
_WAITING_BATCHES = 200


_LINGER_MS = 2000


class OutputReceiver:
    """The notebook's end."""

    def __init__(self, address: str) -> None:
        self._door = secure_socket.CurveServer(zmq.PULL)
        self._socket = self._door.socket
        self._socket.rcvhwm = _WAITING_BATCHES
        self.channel = self._door.bind(address)

    def receive(self, wait_ms: int, *, most: int = 100) -> list[dict[str, Any]]:
        """Return the messages that have arrived, waiting up to `wait_ms` for the first one."""
        messages: list[dict[str, Any]] = []
        while len(messages) < most and self._socket.poll(0 if messages else wait_ms):
            messages.append(json.loads(self._socket.recv()))
        return messages

    def close(self) -> None:
        self._door.close()


class OutputSender:
    """An agent's end. `send` waits while the notebook is behind."""

    def __init__(self, channel: Channel) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = _WAITING_BATCHES
        self._socket.linger = _LINGER_MS
        secure_socket.connect_client(self._socket, channel)

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
