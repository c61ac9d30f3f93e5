"""The client side of a WebSocket to a job's server, over one of its connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpcore
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import Event
from websockets.typing import Origin, Subprotocol
from websockets.uri import parse_uri

from gpuhub.broker.admission.access import TakeTurn
from gpuhub.broker.ports.connections import PortStream
from gpuhub.broker.ports.headers import Headers
from gpuhub.common.errors import Unavailable

#: Largest message, bytes.
MAX_MESSAGE_BYTES = 1024 * 1024
#: Maximum time for the server's answer to the handshake, seconds.
_HANDSHAKE_TIMEOUT_S = 30.0
#: Bytes that are parsed at once; they can be thousands of frames.
_BLOCK = 4 * 1024
#: The protocol's own headers, which the library sends.
_OWN = frozenset({b"host", b"origin", b"connection", b"upgrade"})


class PortWebSocket:
    """An open WebSocket; `open` makes one. One task may send while another one receives."""

    def __init__(self, stream: PortStream, protocol: ClientProtocol, take_turn: TakeTurn) -> None:
        self._stream = stream
        self._protocol = protocol
        self._take_turn = take_turn
        #: Held while frames are sent: the answer to a ping must not begin within a long message.
        self._sending = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        stream: PortStream,
        *,
        host: str,
        target: str,
        headers: Headers,
        subprotocols: Sequence[str],
        take_turn: TakeTurn,
    ) -> PortWebSocket:
        """Send the handshake and wait for its answer. The caller closes the stream.

        Args:
            take_turn: is awaited before each received frame.

        Raises:
            Unavailable: the server refuses.
            httpcore.ReadTimeout: it does not answer in time.
        """
        protocol = ClientProtocol(
            parse_uri(f"ws://{host}/"),
            origin=Origin(f"http://{host}"),
            subprotocols=[Subprotocol(name) for name in subprotocols] or None,
            max_size=MAX_MESSAGE_BYTES,
        )
        request = protocol.connect()
        request.path = target
        for name, value in headers:
            if name.lower() not in _OWN:
                request.headers[name.decode("latin-1")] = value.decode("latin-1")
        protocol.send_request(request)
        socket = cls(stream, protocol, take_turn)
        await socket._flush()
        try:
            # In all: a server may send its answer byte by byte.
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                events = await socket._receive_handshake()
        except TimeoutError:
            raise httpcore.ReadTimeout from None
        failure = protocol.handshake_exc
        if failure is not None or not events:
            answer = next((event for event in events if isinstance(event, Response)), None)
            reason = failure if answer is None else f"HTTP status {answer.status_code}"
            raise Unavailable(f"the job's server opens no WebSocket here: {reason or 'it closed the connection'}")
        socket._frames = [event for event in events[1:] if isinstance(event, Frame)]
        return socket

    #: Frames that came together with the answer to the handshake.
    _frames: list[Frame] = []

    @property
    def subprotocol(self) -> str | None:
        """Return the subprotocol that the server chose."""
        return self._protocol.subprotocol

    @property
    def close_code(self) -> int:
        """Return the server's code of the end, 1006 if it sent none."""
        return self._protocol.close_code or 1006

    async def send(self, message: str | bytes) -> None:
        """Send one message."""
        if isinstance(message, str):
            self._protocol.send_text(message.encode())
        else:
            self._protocol.send_binary(message)
        await self._flush()

    async def close(self, code: int = 1000) -> None:
        """Tell the server that the visitor has gone."""
        self._protocol.send_close(code if code in {1000, 1001} or 3000 <= code < 5000 else 1000)
        await self._flush()

    async def receive(self) -> AsyncIterator[str | bytes]:
        """Yield complete messages until the server closes the WebSocket."""
        parts = bytearray()
        kind = Opcode.BINARY
        frames, self._frames = self._frames, []
        is_ended = False
        while True:
            for frame in frames:
                await self._take_turn(len(frame.data))
                if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
                    kind = frame.opcode
                elif frame.opcode is not Opcode.CONT:
                    continue
                parts += frame.data
                if frame.fin:
                    yield parts.decode("utf-8", "replace") if kind is Opcode.TEXT else bytes(parts)
                    parts.clear()
            if is_ended:
                return
            data = await self._stream.read(_BLOCK)
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            # Answers to pings, and to the end.
            await self._flush()
            frames = [event for event in self._protocol.events_received() if isinstance(event, Frame)]
            # A server that has ended or broken the WebSocket may go on sending.
            is_ended = not data or self._protocol.close_expected()

    async def _receive_handshake(self) -> list[Event]:
        while not (events := self._protocol.events_received()):
            data = await self._stream.read(_BLOCK)
            if not data:
                self._protocol.receive_eof()
                break
            self._protocol.receive_data(data)
        return events

    async def _flush(self) -> None:
        async with self._sending:
            for data in self._protocol.data_to_send():
                if data:
                    await self._stream.write(data)
