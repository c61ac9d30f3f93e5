"""What an agent and its fork server say to each other: JSON objects, each after its length in four bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import StrEnum
from socket import socket
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 256 * 1024


class Kind(StrEnum):
    """What a rank's command is."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """One rank to fork."""

    kind: Kind
    #: Script, module or program with its arguments.
    command: tuple[str, ...]
    cwd: str
    #: The whole environment.
    environ: dict[str, str]
    #: Files that there are already.
    stdout: str
    stderr: str
    #: See `ranks.script`; empty for none.
    exchange: str = ""


def send(connection: socket, message: dict[str, Any]) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


class Inbox:
    """Messages that come over one connection."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for more, and return the messages that are complete; None when the other side is gone."""
        try:
            data = self._connection.recv(_CHUNK)
        except ConnectionError:
            return None
        if not data:
            return None
        self._data += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> dict[str, Any] | None:
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        message: dict[str, Any] = json.loads(self._data[_LENGTH.size : end])
        del self._data[:end]
        return message
