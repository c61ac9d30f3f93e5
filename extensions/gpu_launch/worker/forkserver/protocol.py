"""Messages between an agent and its fork server: JSON objects, each after its length in four bytes.

The server reports stamps of the files that it has imported, by which the agent finds out that one has changed.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from socket import socket
from types import ModuleType
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 256 * 1024

#: A file's path, modification time in ns and size in bytes.
FileStamp = tuple[str, int, int]


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


def collect_stamps(modules: Iterable[ModuleType], home: Path) -> list[FileStamp]:
    """Stamp the files of modules below `home` outside installed packages, and the folders of installed packages."""
    packages = [Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    files = {Path(name) for module in modules if (name := getattr(module, "__file__", None))}
    own_files = {
        file
        for file in files
        if file.is_relative_to(home) and not any(file.is_relative_to(folder) for folder in packages)
    }
    file_stamps = (_read_stamp(str(path)) for path in sorted([*packages, *own_files]))
    return [entry for entry in file_stamps if entry is not None]


def _read_stamp(path: str) -> FileStamp | None:
    """Return a file's stamp, None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - many of them
    except OSError:
        return None
    return path, status.st_mtime_ns, status.st_size


def has_changed(before: Iterable[FileStamp]) -> bool:
    """Return whether any of these files has changed."""
    return any(_read_stamp(entry[0]) != tuple(entry) for entry in before)
