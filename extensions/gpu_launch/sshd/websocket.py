"""sshd behind a WebSocket of a tornado server.

Binary messages carry the connection in both directions. The server's first line is JSON,
`{"host_key": "ssh-ed25519 AAAA…", "user": "ada"}`; sshd's own bytes follow. A refusal is JSON with `detail`, instead of
a WebSocket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from tornado.web import HTTPError
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from gpu_launch.errors import UsageError
from gpu_launch.sshd.session import SshdError, SshdSession

_BLOCK = 65536


class SshWebSocketHandler(WebSocketHandler):
    """Starts sshd for one client and passes on the bytes. Subclasses decide who may do that."""

    _session: SshdSession | None = None
    _writer: asyncio.StreamWriter | None = None
    _output: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Start sshd for the query's `key` and accept the WebSocket, or refuse with a reason."""
        try:
            self._session = await asyncio.to_thread(SshdSession.start, self.get_argument("key", ""))
        except UsageError as error:
            self._refuse(422, str(error))
        except SshdError as error:
            self._refuse(503, str(error))
        else:
            try:
                # Returns when the connection has ended, or when tornado has refused the handshake.
                await super().get()
            finally:
                await self._end()

    async def open(self, *_: str, **__: str) -> None:
        """Send the greeting, then what sshd sends."""
        session = self._session
        if session is None:
            raise HTTPError(500)
        self.set_nodelay(True)
        await self.write_message(session.greeting.build_line(), binary=True)
        reader, self._writer = await asyncio.open_connection(sock=session.connection)
        self._output = asyncio.create_task(self._pass_output(reader))

    async def on_message(self, message: str | bytes) -> None:
        """Pass on what the client sends; the next message is read when sshd has taken this one."""
        if self._writer is None or isinstance(message, str):
            return
        self._writer.write(message)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def _pass_output(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(WebSocketClosedError, ConnectionError):
            while data := await reader.read(_BLOCK):
                await self.write_message(data, binary=True)
        self.close()

    async def _end(self) -> None:
        if self._output is not None:
            self._output.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._session is not None:
            await asyncio.to_thread(self._session.close)

    def _refuse(self, status: int, text: str) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"detail": text}))

    def get_compression_options(self) -> dict[str, Any] | None:
        """Return None: what is encrypted cannot be compressed."""
        return None
