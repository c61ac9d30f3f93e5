"""Files, logs and states between this machine and the home on the cluster."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import quote, urlencode

from gpu_launch import order
from gpu_launch.cli.connection import ANSWER_S, Answer, Connection, Sender, patiently
from gpu_launch.errors import BrokerError

#: Bytes at once.
_BLOCK = 256 * 1024


class Transfer:
    """One's own files and jobs. Everything raises BrokerError; what can be repeated is, while the hub restarts."""

    def __init__(self, connection: Connection, *, on_retry: Callable[[str], None]) -> None:
        self._connection, self._on_retry = connection, on_retry

    def put(self, path: str, write: Callable[[tarfile.TarFile], None]) -> dict[str, Any]:
        """Unpack what `write` adds to a tar below `path` in the home. The answer counts files and bytes."""

        def send(sender: Sender) -> None:
            # A stream: neither a temporary copy nor all of it in memory. Compressed lightly, so that a fast network is
            # not kept waiting: tarfile's own compression is the thorough one.
            with (
                gzip.GzipFile(fileobj=cast("Any", sender), mode="wb", compresslevel=1) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK) as tar,
            ):
                write(tar)

        found = patiently(
            lambda: self._connection.put(f"/files?{urlencode({'path': path})}", send), on_retry=self._on_retry
        )
        return found if isinstance(found, dict) else {}

    def get(self, path: str) -> Answer:
        """A file or folder of the home as a tar stream."""
        return patiently(lambda: self._connection.get(f"/files?{urlencode({'path': path})}"), on_retry=self._on_retry)

    def logs(self, job_id: str, *, offset: int, follow: bool, rank: int | None, silence_s: float = ANSWER_S) -> Answer:
        """The job's output from byte `offset`, to the job's end with `follow`; not tried again."""
        wanted = {"offset": offset} | ({"follow": 1} if follow else {}) | ({"rank": rank} if rank is not None else {})
        return self._connection.get(f"/jobs/{quote(job_id, safe='')}/logs?{urlencode(wanted)}", silence_s=silence_s)

    def state(self, job_id: str) -> order.State | None:
        """Where the job says it is; None before it has said anything."""

        def ask() -> bytes:
            with self._connection.get(f"/jobs/{quote(job_id, safe='')}/state") as answer:
                return b"".join(iter(answer.read, b""))

        try:
            text = patiently(ask, on_retry=self._on_retry)
        except BrokerError as error:
            if error.status == 404:
                return None
            raise
        return order.parse_state(text.decode())

    def order(self, run_id: str) -> order.Order:
        """What the run was asked to do, from its folder. Raises BrokerError where there is none."""
        with self.get(f".gpu_launch/jobs/{run_id}/job.json") as answer:
            text = read_one(answer)
        try:
            return order.parse_order(text.decode())
        except ValueError:
            raise BrokerError(f"The order of {run_id} is no text.") from None


class Reader:
    """A stream for tarfile, which asks for exact sizes."""

    def __init__(self, answer: Answer, on_bytes: Callable[[int], None] = lambda size: None) -> None:
        self._answer, self._rest, self._on_bytes = answer, b"", on_bytes

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer at the end."""
        while len(self._rest) < size and (data := self._answer.read()):
            self._rest += data
            self._on_bytes(len(data))
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


def open_tar(answer: Answer, on_bytes: Callable[[int], None] = lambda size: None) -> tarfile.TarFile:
    """The tar stream in an answer, compressed or not."""
    try:
        return tarfile.open(fileobj=cast("Any", Reader(answer, on_bytes)), mode="r|*", bufsize=65536)
    except tarfile.TarError as error:
        raise BrokerError(f"What came is no tar: {error}.") from None


def read_one(answer: Answer) -> bytes:
    """The first file's content."""
    with open_tar(answer) as tar:
        for member in tar:
            opened = tar.extractfile(member)
            if opened is not None:
                return opened.read()
    raise BrokerError("What came holds no file.")
