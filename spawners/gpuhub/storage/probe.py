"""Whether NFS servers answer, asked before a start, so that nobody waits on a mount that cannot succeed."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpuhub.errors import StorageUnavailable
from gpuhub.storage import rpc
from gpuhub.storage.options import port_of, version_of
from gpuhub.storage.patience import Patience

#: An answer counts for so long, seconds; silence for less, so that who tries again soon finds a server that is back.
REMEMBERED_S = 10.0
SILENCE_REMEMBERED_S = 2.0
_ASKING = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An NFS server as volumes reach it."""

    host: str
    port: int
    #: 3 or 4.
    version: int

    @property
    def place(self) -> str:
        """Its name among places that may hang."""
        return f"nfs {self.host} {self.port}"

    @property
    def shown(self) -> str:
        """For a person."""
        return self.host if self.port == 2049 else f"{self.host} (port {self.port})"


def servers_of(places: Iterable[str | None], options: str) -> list[Server]:
    """The servers of those places that are `nfs://server/path`, each once."""
    hosts = dict.fromkeys(urlsplit(place).hostname for place in places if place and place.startswith("nfs://"))
    return [Server(host=host, port=port_of(options), version=version_of(options)) for host in hosts if host]


class Prober:
    """Asks servers, and remembers what they said for a moment. Safe to use from several event loops."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        #: When a server was asked, and what is wrong with it.
        self._known: dict[Server, tuple[float, str | None]] = {}

    async def ensure_answers(self, server: Server, limit_s: float) -> None:
        """Return when the server answers.

        Raises:
            StorageUnavailable: it does not within `limit_s`, or it does not serve the version; with what to do.
        """
        silent = f"The file server {server.shown} does not answer"
        # A little less for the question itself, so that what came of it is remembered for those who ask next.
        ask_s = limit_s * _ASKING
        trouble = await self._patience.run(
            server.place, lambda: self._trouble(server, ask_s), limit_s=limit_s, silent=silent
        )
        if trouble is not None:
            raise StorageUnavailable(trouble)

    def _trouble(self, server: Server, limit_s: float) -> str | None:
        """What is wrong with a server, asked unless it was just now; blocks."""
        with self._lock:
            asked_at, trouble = self._known.get(server, (float("-inf"), None))
        if time.monotonic() - asked_at < (REMEMBERED_S if trouble is None else SILENCE_REMEMBERED_S):
            return trouble
        trouble = find_trouble(server, limit_s)
        with self._lock:
            self._known[server] = time.monotonic(), trouble
        return trouble


def find_trouble(server: Server, limit_s: float) -> str | None:
    """What is wrong with a server, for users and administrators; None where it answers as it should. Blocks."""
    who = f"The file server {server.shown}"
    try:
        answer = call_null(server, limit_s)
    except TimeoutError:
        return f"{who} does not answer: it is down, busy, or cut off from the head node"
    except (OSError, ValueError) as error:
        return f"{who} {_describe(error, server)}"
    if answer.serves:
        return None
    if answer.lowest is None:
        return f"{who} does not serve NFS on port {server.port}"
    return (
        f"{who} serves NFS versions {answer.lowest} to {answer.highest}, and not {server.version}: "
        "nfs_options in [storage] must name one that it serves"
    )


def _describe(error: OSError | ValueError, server: Server) -> str:
    if isinstance(error, socket.gaierror):
        return f"is not known: its name cannot be looked up on the head node ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return f"does not serve NFS at present: it refuses connections to port {server.port}"
    if isinstance(error, OSError):
        return f"cannot be reached from the head node: {error.strerror or error}"
    return f"answers on port {server.port}, but not as an NFS server does: {error}"


def call_null(server: Server, limit_s: float) -> rpc.Answer:
    """Call NFS's procedure 0. Blocks, names' resolution aside, for `limit_s` at the most.

    Raises:
        OSError: it cannot be reached, or does not answer in time (TimeoutError).
        ValueError: what answers is no RPC server.
    """
    deadline = time.monotonic() + limit_s
    xid = secrets.randbits(32)
    with socket.create_connection((server.host, server.port), timeout=limit_s) as connection:
        connection.sendall(rpc.build_call(xid, rpc.NFS_PROGRAM, server.version))
        body, is_last = b"", False
        while not is_last:
            length, is_last = rpc.piece_length(_read(connection, rpc.HEADER_BYTES, deadline))
            body += _read(connection, length, deadline)
            if len(body) > rpc.LARGEST_ANSWER:
                raise ValueError("the answer is no answer of RPC")
    return rpc.parse_answer(xid, body)


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("it ends the connection without a word")
        data += part
    return data
