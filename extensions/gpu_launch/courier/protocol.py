"""The protocol between broker and courier.

The broker sends frames on stdin: a byte for the kind, four for the length (big-endian), and the payload. The courier
writes nothing before the first frame. If the input ends without an end frame, the client has gone, and the courier
stops at once. It writes data to stdout, and reports as lines of JSON to stderr: first `{"ready": true}` and at last
`{"done": {...}}`, or `{"error": {"code": "not-found", "text": "..."}}`.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from typing import Any

#: Kinds of frames: begin, data, end of data, and a new terminal size as JSON `[columns, rows]`.
BEGIN, DATA, END, RESIZE = range(4)
HEADER = struct.Struct(">BI")
#: Largest payload of a frame, bytes.
MAX_PAYLOAD = 1024 * 1024
STDIN = 0


class CourierError(Exception):
    """A command cannot be done; `code` is for the broker, the text for the user."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ClientGone(Exception):
    """The client has gone."""


def read_frame(source: int = STDIN) -> tuple[int, bytes]:
    """Read the next frame from a file descriptor.

    Raises:
        ClientGone: The input has ended.
    """
    kind, size = parse_header(_read_exactly(source, HEADER.size))
    return kind, _read_exactly(source, size)


def parse_header(header: bytes) -> tuple[int, int]:
    """Return a frame's kind and payload size.

    Raises:
        ClientGone: No broker sends such a header.
    """
    kind, size = HEADER.unpack(header)
    if size > MAX_PAYLOAD:
        raise ClientGone
    return kind, size


def _read_exactly(source: int, size: int) -> bytes:
    parts = []
    while size:
        data = os.read(source, size)
        if not data:
            raise ClientGone
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


class IncomingData(io.RawIOBase):
    """The data of all frames up to the end frame as one stream."""

    def __init__(self, source: int = STDIN) -> None:
        self._source, self._rest, self._is_over = source, memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and not self._is_over:
            kind, data = read_frame(self._source)
            self._is_over = kind == END
            self._rest = memoryview(data if kind == DATA else b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def drain(self) -> None:
        """Skip the remaining data, so that the sender can finish and read the error.

        Raises:
            ClientGone: The input ended before the end frame.
        """
        while not self._is_over:
            self._is_over = read_frame(self._source)[0] == END


def write_report(**report: Any) -> None:
    """Write one line of JSON to the broker."""
    sys.stdout.flush()
    sys.stderr.write(json.dumps(report) + "\n")
    sys.stderr.flush()
