"""HTTP to a hub beyond plain JSON: bodies that are made while they are sent, answers that are read as they come."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Self, TypeVar

from gpu_launch.broker import Broker, parse_problem, trust
from gpu_launch.cli.hubs import Hub
from gpu_launch.errors import BrokerError, UsageError

#: How long an ordinary answer may take, and how long a stream may be silent before it is looked after, seconds.
ANSWER_S = 30.0
#: Restarts of hub, proxy and broker are waited out for this long by ordinary requests, seconds.
PATIENCE_S = 60.0
_RETRY_S = 0.5  # seconds
_T = TypeVar("_T")
#: What proxy and hub answer while one of them restarts.
RESTARTING = frozenset({502, 503, 504})


def build_tls(hub: Hub) -> ssl.SSLContext | None:
    """Whom to trust: the system's certificates, or the hub's own ones. None for plain http.

    Raises UsageError, and in a notebook's container BrokerError, where they cannot be used.
    """
    if not hub.broker_url.startswith("https:"):
        return None
    if hub.ca_file:
        return trust(hub.ca_file, hub.certificate, hub.key)
    try:
        return ssl.create_default_context(cadata=hub.ca or None)
    except (ssl.SSLError, ValueError):
        raise UsageError("The file given with --ca holds no certificate in PEM form.") from None


def build_broker(
    hub: Hub, *, on_retry: Callable[[str], None] = lambda text: None, patience_s: float = PATIENCE_S
) -> Broker:
    """The client for everything that is JSON."""
    return Broker(hub.broker_url, hub.token, patience_s=patience_s, on_retry=on_retry, tls=build_tls(hub))


class Answer:
    """A stream from the hub; read it to its end, or close it."""

    def __init__(self, sock: socket.socket, response: http.client.HTTPResponse) -> None:
        self._sock, self._response = sock, response

    def read(self, size: int = 65536) -> bytes:
        """What has come, up to `size` bytes; nothing at the end. Raises BrokerError when it breaks off or is silent
        for too long.
        """
        try:
            return self._response.read1(size)
        except (OSError, http.client.HTTPException) as error:
            raise BrokerError(f"The connection broke off: {reason(error)}.") from None

    def close(self) -> None:
        """No more of it, also while another thread reads."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sender:
    """Takes a body as it is made, for tarfile and the like. The first error of the connection ends it."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> int:
        """One chunk."""
        if data:
            self._connection.send(b"%x\r\n%b\r\n" % (len(data), bytes(data)))
        return len(data)


class Connection:
    """A hub's broker, one connection a request."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._tls = build_tls(hub)
        parts = urllib.parse.urlsplit(hub.broker_url)
        self._host, self._port, self._base = parts.hostname or "", parts.port, f"{parts.path}/api/v1"

    def get(self, path: str, *, silence_s: float = ANSWER_S) -> Answer:
        """An answer as a stream. Raises BrokerError with the status of any other than 200."""
        connection = self._open(silence_s)
        try:
            connection.putrequest("GET", self._base + path)
            connection.putheader("Authorization", f"token {self._hub.token}")
            connection.endheaders()
            return self._answer(connection)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._broken(error) from None
        except BaseException:
            connection.close()
            raise

    def put(self, path: str, write: Callable[[Sender], None], *, answer_s: float = 600.0) -> Any:
        """Send what `write` makes, and read the answer, JSON. Raises BrokerError."""
        connection = self._open(answer_s)
        try:
            connection.putrequest("PUT", self._base + path)
            connection.putheader("Authorization", f"token {self._hub.token}")
            connection.putheader("Content-Type", "application/x-tar")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            # It may be refused before it is all there; the reason then lies ready to be read.
            with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
                write(Sender(connection))
                connection.send(b"0\r\n\r\n")
            with self._answer(connection) as answer:
                text = b"".join(iter(answer.read, b""))
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        finally:
            connection.close()
        return json.loads(text) if text else None

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)

    def _answer(self, connection: http.client.HTTPConnection) -> Answer:
        # Taken before the answer: http.client forgets it when the server will close the connection.
        sock = connection.sock
        response = connection.getresponse()
        if response.status != http.client.OK:
            text = parse_problem(response.status, response.read(65536))
            connection.close()
            raise BrokerError(text, status=response.status)
        return Answer(sock, response)

    def _broken(self, error: Exception) -> BrokerError:
        return BrokerError(f"{self._hub.url or self._hub.broker_url} cannot be reached: {reason(error)}.")


def patiently(act: Callable[[], _T], *, on_retry: Callable[[str], None], patience_s: float = PATIENCE_S) -> _T:
    """Do it again while hub, proxy or broker are away, for `patience_s`. Raises BrokerError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return act()
        except BrokerError as error:
            is_away = error.status is None or error.status in RESTARTING
            if not is_away or time.monotonic() + _RETRY_S > deadline:
                raise
            on_retry("the hub does not answer; trying again")
        time.sleep(_RETRY_S)


def reason(error: BaseException) -> str:
    """Why a connection failed, without the library's decoration."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
