"""A client for load tests with one kept-alive connection and little overhead, JSON in and out."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self


class Connection:
    """A client of the broker with its token."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prefix: str, token: str) -> None:
        self._reader = reader
        self._writer = writer
        self._prefix = prefix
        self._head = f" HTTP/1.1\r\nHost: broker\r\nAuthorization: token {token}\r\n"

    @classmethod
    async def open(cls, host: str, port: int, *, prefix: str, token: str) -> Self:
        """Connect to the broker."""
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
        return cls(reader, writer, prefix, token)

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one request; return its status and the JSON of the response, None for an empty one."""
        text = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if text else ""
        head = f"{method} {self._prefix}{path}{self._head}{kind}Content-Length: {len(text)}\r\n\r\n"
        self._writer.write(head.encode() + text)
        await self._writer.drain()
        return await self._read()

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()

    async def _read(self) -> tuple[int, Any]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines)
        text = await self._reader.readexactly(int(fields.get("content-length", "0")))
        return int(first.split(" ", 2)[1]), json.loads(text) if text else None
