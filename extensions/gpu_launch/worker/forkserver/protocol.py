"""Messages between an agent and its fork server: JSON objects, each after its length in four bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import StrEnum
from socket import socket
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 256 * 1024


class CommandKind(StrEnum):
    """The type of a rank's command."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """A rank that will be forked."""

    kind: CommandKind
    #: Script, module or program with its arguments.
    command: tuple[str, ...]
    cwd: str
    #: All variables of the rank.
    environ: dict[str, str]
    #: Existing files.
    stdout: str
    stderr: str
    #: The exchange folder, see `worker.rank_main`; empty for none.
    exchange: str = ""


def send_message(connection: socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


class MessageReader:
    """Reads messages from one connection."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for data and return the messages that are complete; None if the other side has closed."""
        try:
            data = self._connection.recv(_CHUNK)
        except ConnectionError:
            return None
        if not data:
            return None
        self._data += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

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
