"""HTTP requests to the broker for files, logs and states of jobs."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import ssl
import tarfile
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast
from urllib.parse import quote, urlencode

from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.problems import build_error
from gpu_launch.cli.connection.credentials import Hub
from gpu_launch.common import job_manifest
from gpu_launch.common.client_tls import load_client_tls
from gpu_launch.errors import BrokerError, UsageError

#: Seconds until an answer must begin, and for which a stream may be silent.
ANSWER_TIMEOUT_S = 30.0
#: Maximum wait of an ordinary request for a restart of hub, proxy or broker, seconds.
RETRY_LIMIT_S = 60.0
_RETRY_S = 0.5  # seconds
_T = TypeVar("_T")
#: Answers of proxy and hub while one of them restarts.
RESTARTING = frozenset({502, 503, 504})
#: Block size of the tar stream.
_BLOCK_BYTES = 256 * 1024


class Transfer:
    """Transfers the user's files and job data. Requests are repeated while the hub restarts, if that is safe."""

    def __init__(self, connection: Connection, *, on_retry: Callable[[str], None]) -> None:
        self._connection, self._on_retry = connection, on_retry

    def put(self, path: str, write: Callable[[tarfile.TarFile], None]) -> dict[str, Any]:
        """Unpack the tar that `write` fills below `path` in the home; return the numbers of files and bytes."""

        def send(sender: ChunkedWriter) -> None:
            # A stream needs neither a temporary copy nor memory for all data. It is compressed lightly, because the
            # thorough compression of tarfile would slow down a fast network.
            with (
                gzip.GzipFile(fileobj=cast("Any", sender), mode="wb", compresslevel=1) as compressed,
                tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK_BYTES) as tar,
            ):
                write(tar)

        answer = retry_while_away(
            lambda: self._connection.put(f"/files?{urlencode({'path': path})}", send), on_retry=self._on_retry
        )
        return answer if isinstance(answer, dict) else {}

    def get(self, path: str) -> ResponseStream:
        """Return a file or folder of the home as a tar stream."""
        return retry_while_away(
            lambda: self._connection.get(f"/files?{urlencode({'path': path})}"), on_retry=self._on_retry
        )

    def open_logs(
        self, job_id: str, *, offset: int, follow: bool, rank: int | None, silence_s: float = ANSWER_TIMEOUT_S
    ) -> ResponseStream:
        """Return the job's output from byte `offset`, with `follow` up to its end. Not repeated."""
        query = {"offset": offset} | ({"follow": 1} if follow else {}) | ({"rank": rank} if rank is not None else {})
        return self._connection.get(f"/jobs/{quote(job_id, safe='')}/logs?{urlencode(query)}", silence_s=silence_s)

    def read_status(self, job_id: str) -> job_manifest.JobStatus | None:
        """Return the status that the job has written, None before that."""

        def request() -> bytes:
            with self._connection.get(f"/jobs/{quote(job_id, safe='')}/state") as answer:
                return b"".join(iter(answer.read, b""))

        try:
            text = retry_while_away(request, on_retry=self._on_retry)
        except BrokerError as error:
            if error.status == 404:
                return None
            raise
        return job_manifest.parse_status(text.decode())

    def read_manifest(self, run_id: str) -> job_manifest.JobManifest:
        """Return the job manifest in the run's folder.

        Raises:
            BrokerError: There is none, or it cannot be read.
        """
        with self.get(f".gpu_launch/jobs/{run_id}/job.json") as answer:
            text = read_first_file(answer)
        try:
            return job_manifest.parse_manifest(text.decode())
        except ValueError:
            raise BrokerError(f"The job manifest of {run_id} is not text.") from None


class Connection:
    """Requests to a hub's broker, each on a connection of its own."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._tls = build_tls_context(hub)
        parts = urllib.parse.urlsplit(hub.broker_url)
        self._host, self._port, self._base = parts.hostname or "", parts.port, f"{parts.path}/api/v1"

    def get(self, path: str, *, silence_s: float = ANSWER_TIMEOUT_S) -> ResponseStream:
        """Return the response of a GET request as a stream.

        Raises:
            BrokerError: The request failed; `status` is the HTTP status if there is one.
        """
        connection = self._open(silence_s)
        try:
            connection.putrequest("GET", self._base + path)
            connection.putheader("Authorization", f"token {self._hub.token}")
            connection.endheaders()
            return self._answer(connection)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._build_error(error) from None
        except BaseException:
            connection.close()
            raise

    def put(self, path: str, write: Callable[[ChunkedWriter], None], *, answer_s: float = 600.0) -> Any:
        """Send the data that `write` writes and return the JSON answer.

        Raises:
            BrokerError: The request failed.
        """
        connection = self._open(answer_s)
        try:
            connection.putrequest("PUT", self._base + path)
            connection.putheader("Authorization", f"token {self._hub.token}")
            connection.putheader("Content-Type", "application/x-tar")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            # A refusal may come before all data was sent; it can be read then.
            with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
                write(ChunkedWriter(connection))
                connection.send(b"0\r\n\r\n")
            with self._answer(connection) as answer:
                text = b"".join(iter(answer.read, b""))
        except (OSError, http.client.HTTPException) as error:
            raise self._build_error(error) from None
        finally:
            connection.close()
        return json.loads(text) if text else None

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)

    def _answer(self, connection: http.client.HTTPConnection) -> ResponseStream:
        # Saved now, because http.client drops the socket when the server will close the connection.
        sock = connection.sock
        response = connection.getresponse()
        if response.status != http.client.OK:
            error = build_error(response.status, response.read(65536), self._hub.url or self._hub.page_url)
            connection.close()
            raise error
        return ResponseStream(sock, response)

    def _build_error(self, error: Exception) -> BrokerError:
        return BrokerError(f"{self._hub.url or self._hub.broker_url} cannot be reached: {describe_error(error)}.")


class ResponseStream:
    """A streamed response of the hub; read it to its end, or close it."""

    def __init__(self, sock: socket.socket, response: http.client.HTTPResponse) -> None:
        self._sock, self._response = sock, response

    def read(self, size: int = 65536) -> bytes:
        """Return the next data, up to `size` bytes; empty at the end.

        Raises:
            BrokerError: The connection broke, or was silent for too long.
        """
        try:
            return self._response.read1(size)
        except (OSError, http.client.HTTPException) as error:
            raise BrokerError(f"The connection broke: {describe_error(error)}.") from None

    def close(self) -> None:
        """Close the stream, even while another thread reads it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChunkedWriter:
    """Sends a body in chunks, as tarfile writes it."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> int:
        """Send one chunk."""
        if data:
            self._connection.send(b"%x\r\n%b\r\n" % (len(data), bytes(data)))
        return len(data)


class ExactReader:
    """A stream for tarfile, which needs reads of exact sizes."""

    def __init__(self, answer: ResponseStream, on_bytes: Callable[[int], None] = lambda size: None) -> None:
        self._answer, self._rest, self._on_bytes = answer, b"", on_bytes

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer at the end."""
        while len(self._rest) < size and (data := self._answer.read()):
            self._rest += data
            self._on_bytes(len(data))
        data_read, self._rest = self._rest[:size], self._rest[size:]
        return data_read


def open_tar(answer: ResponseStream, on_bytes: Callable[[int], None] = lambda size: None) -> tarfile.TarFile:
    """Open the tar stream of a response, compressed or not."""
    try:
        return tarfile.open(fileobj=cast("Any", ExactReader(answer, on_bytes)), mode="r|*", bufsize=65536)
    except tarfile.TarError as error:
        raise BrokerError(f"The answer of the hub is not a tar: {error}.") from None


def read_first_file(response: ResponseStream, *, most: int | None = None) -> bytes:
    """Return the content of the first file in a tar.

    Raises:
        BrokerError: There is none, or it has more than `most` bytes.
    """
    with open_tar(response) as tar:
        for member in tar:
            if most is not None and member.size > most:
                raise BrokerError(f"{member.name} has {member.size} bytes, which is more than {most}.")
            file = tar.extractfile(member)
            if file is not None:
                return file.read()
    raise BrokerError("The tar from the hub contains no file.")


def retry_while_away(
    act: Callable[[], _T], *, on_retry: Callable[[str], None], retry_limit_s: float = RETRY_LIMIT_S
) -> _T:
    """Repeat a request while hub, proxy or broker are unavailable, for `retry_limit_s` seconds at most.

    Raises:
        BrokerError: The request failed.
    """
    deadline = time.monotonic() + retry_limit_s
    while True:
        try:
            return act()
        except BrokerError as error:
            is_away = error.status is None or error.status in RESTARTING
            if not is_away or time.monotonic() + _RETRY_S > deadline:
                raise
            on_retry("the hub does not answer; trying again")
        time.sleep(_RETRY_S)


def build_broker(
    hub: Hub, *, on_retry: Callable[[str], None] = lambda text: None, retry_limit_s: float = RETRY_LIMIT_S
) -> BrokerClient:
    """Build the client for the JSON API."""
    return BrokerClient(
        hub.broker_url,
        hub.token,
        retry_limit_s=retry_limit_s,
        on_retry=on_retry,
        tls=build_tls_context(hub),
        hub_url=hub.url or hub.page_url,
    )


def build_tls_context(hub: Hub) -> ssl.SSLContext | None:
    """Return the TLS settings for the hub, None for plain http.

    Raises:
        UsageError: The file of --ca has no certificate.
        BrokerError: A notebook's own certificates cannot be read.
    """
    if not hub.broker_url.startswith("https:"):
        return None
    if hub.ca_file:
        return load_client_tls(hub.ca_file, hub.certificate, hub.key)
    try:
        return ssl.create_default_context(cadata=hub.ca or None)
    except (ssl.SSLError, ValueError):
        raise UsageError("The file given with --ca contains no certificate in PEM form.") from None


def describe_error(error: BaseException) -> str:
    """Return the reason for a failed connection, without the library's decoration."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
