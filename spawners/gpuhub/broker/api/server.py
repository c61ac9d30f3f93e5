"""The broker's HTTP server: Uvicorn, with limits of each connection before a request reaches the application.

Every container can connect to this port, so a connection costs little until its caller is known: the head of a request
is limited in bytes and in time, and the connections from one address in number. `middleware` limits bodies, `auth` the
rate of requests.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request

from gpuhub.broker.views.slices import SLICE_S
from gpuhub.domain.rate_limit import RateLimit, RateLimiter
from gpuhub.tls.internal_certificates import PROXY_CLIENT, PROXY_CLIENT_AUTHORITY

#: Maximum size of the head of a request: request line and headers. The proxy accepts half of it. Bytes.
MAX_HEAD_BYTES = 32 * 1024
#: Time from the connection, or from the end of a response, to the end of the next head, seconds.
HEAD_TIMEOUT_S = 10.0
#: Time to receive the rest of a response after the server has closed the connection, seconds.
LINGER_S = 10.0
#: Connections from one address: all containers of a node, each of which the node's firewall limits. Those of the head
#: node itself, where proxy and hub are, do not count.
MAX_CONNECTIONS_PER_ADDRESS = 4096
#: All connections; further requests get 503. Long polls, the most numerous ones, have a limit of half of it.
MAX_CONNECTIONS = 16384
#: Requests that one connection may send before it has the response to the first.
MAX_PIPELINED = 16
#: Maximum size of one WebSocket message, bytes.
_MAX_MESSAGE_BYTES = 1024 * 1024
#: Bytes of a WebSocket that are parsed before the next ones wait for the application to take the messages among them.
_PARSED_BYTES = 8 * 1024
#: Frames below this size that end no message, such as pings and empty parts, count, bytes; and how many of them one
#: connection may send. Clients send a ping in some seconds; browsers send large messages in large parts.
_SMALL_FRAME = 1024
_SMALL_FRAMES = RateLimit(burst=200, per_second=50, what="WebSocket frames without a message")
#: Time for long polls when the broker stops; their clients ask again. Seconds.
_SHUTDOWN_S = 2
FORWARDED_FOR = b"x-forwarded-for"


def build_server_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """Return Uvicorn's configuration for the broker; `options` has the address and the certificates."""
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws=BoundedWebSocketProtocol,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        server_header=False,
        # Uvicorn would trust forwarded headers of every local client; `BoundedHttpProtocol` trusts the proxy alone.
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        ws_max_size=_MAX_MESSAGE_BYTES,
        # It would take the event loop's time: terminals and servers of jobs work without it.
        ws_per_message_deflate=False,
        **options,
    )


class BoundedHttpProtocol(HttpToolsProtocol):
    """An HTTP connection that limits the head of each request, and the number of connections from one address.

    The header `X-Forwarded-For` reaches the application only from the head node's proxy, with one address: that of the
    proxy's own client.
    """

    #: Open connections by remote address, of all servers in the process.
    _open: Counter[str] = Counter()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: Any = None
        #: Bytes since the last part of a body, or since the beginning of the message: the parser keeps unfinished
        #: headers and trailers.
        self._unfinished_bytes = 0
        self._is_first = True
        self._is_upgraded = False
        self._counted_as: str | None = None
        self._is_from_proxy = False
        self._forwarded_for = b""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = self.client[0] if self.client is not None else ""
        is_local = self.server is not None and address == self.server[0]
        self._is_from_proxy = _is_proxy(transport, is_local=is_local)
        if not is_local:
            self._counted_as = address
            self._open[address] += 1
            if self._open[address] > MAX_CONNECTIONS_PER_ADDRESS:
                transport.abort()
                return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._uncount()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self._is_upgraded and not self.transport.is_closing():
            part, data = data[:MAX_HEAD_BYTES], data[MAX_HEAD_BYTES:]
            self._unfinished_bytes += len(part)
            super().data_received(part)
            if self._unfinished_bytes > MAX_HEAD_BYTES and not self._is_upgraded:
                self._refuse_head()
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._is_first:
            # The part in which it begins does not count, since the end of the previous request may be in it.
            self._unfinished_bytes = 0
        self._is_first = False
        self._forwarded_for = b""

    def on_body(self, body: bytes) -> None:
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == FORWARDED_FOR:
            self._forwarded_for = value
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            # The parser stops, and the client gets 400: none of ours sends requests before it has the response.
            raise ValueError("too many requests before the first response")
        self._stop_head_timer()
        if self._is_from_proxy and (address := parse_last_hop(self._forwarded_for)):
            self.headers.append((FORWARDED_FOR, address.encode()))
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        has_next = bool(self.pipeline)
        super().on_response_complete()
        if not has_next:
            # Not only the keep-alive timer, which ends with the first byte of whatever the client sends.
            self._start_head_timer()

    def handle_websocket_upgrade(self) -> None:
        self._is_upgraded = True
        # Another protocol takes the connection over, and limits it by its caller.
        self._uncount()
        super().handle_websocket_upgrade()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_late(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """Drop what a client does not read; without it, a closed connection lasts until everything is sent."""
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _refuse_head(self) -> None:
        text = f"The request's headers are too large: more than {MAX_HEAD_BYTES} bytes.".encode()
        self.transport.write(
            STATUS_LINE[431]
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(text)
            + text
        )
        self._close_late()

    def _uncount(self) -> None:
        if self._counted_as is not None:
            self._open[self._counted_as] -= 1
            if not self._open[self._counted_as]:
                del self._open[self._counted_as]
            self._counted_as = None


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket that keeps little of what its client sends or does not read, and parses it in slices.

    Nothing is read before the application accepts the client.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unparsed = b""
        #: Answers to the last pings, while the client does not read.
        self._pongs = b""
        self._small_frames = RateLimiter(_SMALL_FRAMES)
        #: Time until the next slice, seconds; None while there is nothing to wait for.
        self._pause_s: float | None = None

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        # Until `receive` returns the first event, which `accept` waits for.
        self.read_paused = True
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._parse()
        return message

    def handle_events(self) -> None:
        for event in self.conn.events:
            if isinstance(event, Frame) and len(event.data) < _SMALL_FRAME and not _ends_message(event):
                self._pause_s = self._small_frames.reserve("") or self._pause_s
        super().handle_events()

    def handle_ping(self) -> None:
        pongs = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pongs)
        elif pongs:
            # A client that sends many pings needs an answer to the last one only (RFC 6455, section 5.5.3).
            self._pongs = pongs

    def resume_writing(self) -> None:
        super().resume_writing()
        pongs, self._pongs = self._pongs, b""
        self.transport.write(pongs)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._abort_later()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._abort_later()

    def _parse(self) -> None:
        """Parse what was received, until a slice ends or there are messages for the application."""
        began = time.thread_time()
        while self._unparsed and not self.read_paused and self._pause_s is None and not self.transport.is_closing():
            part, self._unparsed = self._unparsed[:_PARSED_BYTES], self._unparsed[_PARSED_BYTES:]
            super().data_received(part)
            if time.thread_time() - began >= SLICE_S:
                self._pause_s = self._pause_s or 0.0
            if self._pause_s is not None:
                self.loop.call_later(self._pause_s, self._end_pause)
        if self.read_paused or self._pause_s is not None:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _end_pause(self) -> None:
        self._pause_s = None
        self._parse()

    def _abort_later(self) -> None:
        """Drop what a client does not read; without it, a closed connection lasts until everything is sent."""
        self.loop.call_later(self.close_timeout + LINGER_S, self.transport.abort)


def _ends_message(frame: Frame) -> bool:
    return frame.fin and frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)


def _is_proxy(transport: Any, *, is_local: bool) -> bool:
    """Return whether the client is the head node's proxy.

    With TLS, its certificate shows it. Without TLS, only processes on the head node have the server's own address.
    """
    if transport.get_extra_info("ssl_object") is None:
        return is_local
    certificate = transport.get_extra_info("peercert") or {}
    return (
        _find_common_name(certificate.get("subject", ())) == PROXY_CLIENT
        and _find_common_name(certificate.get("issuer", ())) == PROXY_CLIENT_AUTHORITY
    )


def _find_common_name(name: Any) -> str | None:
    """Return the common name of a distinguished name as `getpeercert` returns it."""
    return next((value for part in name for key, value in part if key == "commonName"), None)


def parse_last_hop(header: bytes) -> str | None:
    """Return the last address of `X-Forwarded-For`, which the proxy itself appended; None if it is not an address."""
    try:
        return str(ipaddress.ip_address(header.decode("latin-1").rpartition(",")[2].strip()))
    except ValueError:
        return None
