"""How broker and courier speak.

What the courier is told comes on stdin in frames: a byte for the kind, four for the length (big-endian), and the
payload. Until the first frame it says nothing. An end of the input without an end frame means that the client is gone:
then it stops at once, whatever it does. What it reads goes to stdout as it is. On stderr it says in lines of JSON how
it goes: first `{"ready": true}`, at last `{"done": {...}}`; or else `{"error": {"code": "not-found", "text": "..."}}`.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from typing import Any

#: Kinds of frames: begin, data, end of the data, and the terminal's new size as JSON `[columns, rows]`.
BEGIN, DATA, END, RESIZE = range(4)
HEADER = struct.Struct(">BI")
#: The largest payload of a frame.
MOST_PAYLOAD = 1024 * 1024
STDIN = 0


class Refused(Exception):
    """It cannot be done; `code` is a word for the broker, the text is for the user."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Gone(Exception):
    """The client went away."""


def read_frame(source: int = STDIN) -> tuple[int, bytes]:
    """The next frame of a file descriptor. Raises Gone at the end of the input."""
    kind, size = parse_header(_read_exactly(source, HEADER.size))
    return kind, _read_exactly(source, size)


def parse_header(header: bytes) -> tuple[int, int]:
    """A frame's kind and the size of its payload. Raises Gone for what no broker sends."""
    kind, size = HEADER.unpack(header)
    if size > MOST_PAYLOAD:
        raise Gone
    return kind, size


def _read_exactly(source: int, size: int) -> bytes:
    parts = []
    while size:
        data = os.read(source, size)
        if not data:
            raise Gone
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


class Incoming(io.RawIOBase):
    """The data of all frames up to the end frame as one stream."""

    def __init__(self, source: int = STDIN) -> None:
        self._source, self._rest, self._is_over = source, memoryview(b""), False

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As files do. Raises Gone."""
        while not self._rest and not self._is_over:
            kind, data = read_frame(self._source)
            self._is_over = kind == END
            self._rest = memoryview(data if kind == DATA else b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def drain(self) -> None:
        """Take what is still to come, so that who sends it is not broken off before they have read why. Raises Gone."""
        while not self._is_over:
            self._is_over = read_frame(self._source)[0] == END


def say(**said: Any) -> None:
    """One line to the broker."""
    sys.stdout.flush()
    sys.stderr.write(json.dumps(said) + "\n")
    sys.stderr.flush()
