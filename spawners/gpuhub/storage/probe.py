"""Probes NFS servers before a start, so that no start waits for a mount that cannot succeed.

A probe is one call of ONC RPC (RFC 5531) over TCP to procedure 0, which does nothing. It needs no NFS client and
changes nothing on the server.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpuhub.common.errors import StorageUnavailable
from gpuhub.config.machines.storage import nfs_port, nfs_version
from gpuhub.storage.blocking_calls import BlockingCallPool

#: The program number of NFS.
NFS_PROGRAM = 100003
#: Maximum length of the reply to procedure 0, bytes; real ones have some dozen.
MAX_REPLY_BYTES = 4096
#: Size of a fragment's header, which holds its length; the highest bit is set in a record's last fragment.
HEADER_BYTES = 4
_LAST = 0x8000_0000
_CALL, _REPLY = 0, 1
_RPC_VERSION = 2
_ACCEPTED = 0
_PROGRAM_UNAVAILABLE, _PROGRAM_MISMATCH = 1, 2
#: Time for which an answer is cached, seconds; a failure is cached for less, so that a retry soon sees a server that is
#: back.
SUCCESS_CACHE_S = 10.0
FAILURE_CACHE_S = 2.0
_PROBE_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class NfsServer:
    """Address and version of an NFS server that volumes use."""

    host: str
    port: int
    #: 3 or 4.
    version: int

    @property
    def target(self) -> str:
        """Return its name among the targets of blocking calls."""
        return f"nfs {self.host} {self.port}"

    @property
    def display_name(self) -> str:
        return self.host if self.port == 2049 else f"{self.host} (port {self.port})"


def find_servers(sources: Iterable[str | None], options: str) -> list[NfsServer]:
    """Return the servers of the sources of the form `nfs://server/path`, without duplicates."""
    hosts = dict.fromkeys(urlsplit(source).hostname for source in sources if source and source.startswith("nfs://"))
    return [NfsServer(host=host, port=nfs_port(options), version=nfs_version(options)) for host in hosts if host]


class NfsProber:
    """Probes servers and caches the results for some seconds. Safe to use from several event loops."""

    def __init__(self, blocking_calls: BlockingCallPool) -> None:
        self._blocking_calls = blocking_calls
        self._lock = threading.Lock()
        #: Time of each server's last probe, and the problem that it found.
        self._results: dict[NfsServer, tuple[float, str | None]] = {}

    async def ensure_answers(self, server: NfsServer, limit_s: float) -> None:
        """Return when the server answers.

        Raises:
            StorageUnavailable: It does not answer within `limit_s` seconds, or does not serve the version; the text has
                a remedy.
        """
        timeout_message = f"The file server {server.display_name} does not answer"
        # A little less for the probe itself, so that its result is cached for the next caller.
        probe_s = limit_s * _PROBE_SHARE
        problem = await self._blocking_calls.run(
            server.target, lambda: self._probe(server, probe_s), limit_s=limit_s, timeout_message=timeout_message
        )
        if problem is not None:
            raise StorageUnavailable(problem)

    def _probe(self, server: NfsServer, limit_s: float) -> str | None:
        """Return a server's problem from the cache or from a new probe. Blocks."""
        with self._lock:
            asked_at, problem = self._results.get(server, (float("-inf"), None))
        if time.monotonic() - asked_at < (SUCCESS_CACHE_S if problem is None else FAILURE_CACHE_S):
            return problem
        problem = probe_server(server, limit_s)
        with self._lock:
            self._results[server] = time.monotonic(), problem
        return problem


def probe_server(server: NfsServer, limit_s: float) -> str | None:
    """Return a server's problem for users and administrators, or None if it answers properly. Blocks."""
    subject = f"The file server {server.display_name}"
    try:
        reply = call_null(server, limit_s)
    except TimeoutError:
        return f"{subject} does not answer: it is down, busy, or cut off from the head node"
    except (OSError, ValueError) as error:
        return f"{subject} {_describe(error, server)}"
    if reply.serves:
        return None
    if reply.lowest is None:
        return f"{subject} does not serve NFS on port {server.port}"
    return (
        f"{subject} serves NFS versions {reply.lowest} to {reply.highest}, and not {server.version}: "
        "nfs_options in [storage] must name one that it serves"
    )


def _describe(error: OSError | ValueError, server: NfsServer) -> str:
    if isinstance(error, socket.gaierror):
        return f"is not known: its name cannot be looked up on the head node ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return f"does not serve NFS now: it refuses connections to port {server.port}"
    if isinstance(error, OSError):
        return f"cannot be reached from the head node: {error.strerror or error}"
    return f"answers on port {server.port}, but not as an NFS server does: {error}"


def call_null(server: NfsServer, limit_s: float) -> NullReply:
    """Call NFS's procedure 0. Blocks for at most `limit_s` seconds plus the resolution of the name.

    Raises:
        OSError: The server cannot be reached, or does not answer in time (TimeoutError).
        ValueError: The reply does not come from an RPC server.
    """
    deadline = time.monotonic() + limit_s
    xid = secrets.randbits(32)
    with socket.create_connection((server.host, server.port), timeout=limit_s) as connection:
        connection.sendall(build_call(xid, NFS_PROGRAM, server.version))
        body, is_last = b"", False
        while not is_last:
            length, is_last = parse_fragment_header(_read(connection, HEADER_BYTES, deadline))
            body += _read(connection, length, deadline)
            if len(body) > MAX_REPLY_BYTES:
                raise ValueError("the reply is not an RPC reply")
    return parse_reply(xid, body)


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("it closes the connection without a reply")
        data += part
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class NullReply:
    """A server's reply to procedure 0."""

    #: Whether it serves the version, or does not deny it.
    serves: bool
    #: Range of versions that it serves, if the reply has one.
    lowest: int | None = None
    highest: int | None = None


def build_call(xid: int, program: int, version: int) -> bytes:
    """Build a call of a program's procedure 0, without credentials, as one record.

    Args:
        xid: Any number below 2**32; the reply repeats it.
    """
    body = struct.pack(">10I", xid, _CALL, _RPC_VERSION, program, version, 0, 0, 0, 0, 0)
    return struct.pack(">I", _LAST | len(body)) + body


def parse_fragment_header(header: bytes) -> tuple[int, bool]:
    """Return the number of bytes after a fragment's header, and whether the fragment is the record's last.

    Raises:
        ValueError: The header does not come from an RPC server.
    """
    (word,) = struct.unpack(">I", header)
    length = word & ~_LAST
    if length > MAX_REPLY_BYTES:
        raise ValueError("the reply is not an RPC reply")
    return length, bool(word & _LAST)


def parse_reply(xid: int, body: bytes) -> NullReply:
    """Parse the record that answers the call `xid`.

    Raises:
        ValueError: It is not such a reply.
    """
    words = struct.unpack(f">{len(body) // 4}I", body[: len(body) // 4 * 4])
    if len(words) < 3 or words[0] != xid or words[1] != _REPLY:
        raise ValueError("the reply is not an RPC reply")
    if words[2] != _ACCEPTED:
        # The server wants credentials, which concerns only the mount.
        return NullReply(serves=True)
    verifier_words = (words[4] + 3) // 4 if len(words) > 4 else 0
    status = words[5 + verifier_words] if len(words) > 5 + verifier_words else None
    if status == _PROGRAM_MISMATCH and len(words) >= 8 + verifier_words:
        return NullReply(serves=False, lowest=words[6 + verifier_words], highest=words[7 + verifier_words])
    return NullReply(serves=status not in {_PROGRAM_UNAVAILABLE, _PROGRAM_MISMATCH})
