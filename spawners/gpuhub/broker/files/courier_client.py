"""The client of one command that a courier runs; `gpu_launch.courier.protocol` is the other side of its protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Protocol, Self

from gpuhub.broker_api.errors import NoSpace, SizeLimitExceeded
from gpuhub.common.errors import (
    GpuhubError,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from gpuhub.common.log_text import escape_lines
from gpuhub.common.program_session import STDOUT, ProgramSession
from gpuhub.common.units import format_size
from gpuhub.domain.models import JobRow, WorkerRow

log = logging.getLogger(__name__)
BEGIN, DATA, END, RESIZE = range(4)
_HEADER = struct.Struct(">BI")
#: Maximum payload of one frame, bytes.
_MAX_PAYLOAD = 1024 * 1024
#: Time that a courier may take until it is ready, seconds.
_START_TIMEOUT_S = 30.0
#: Maximum silence of a courier that works, since a file server may be slow; seconds.
_WORK_TIMEOUT_S = 120.0
#: Maximum length of a line of a report, bytes. The courier runs as its user, who can make it send anything.
MAX_LINE = 64 * 1024
#: Maximum number of bytes that a courier may write to stderr in all.
MAX_REPORTS = 256 * 1024
#: Lines that are parsed; the protocol needs two.
_MAX_PARSED = 100
#: Maximum output that is kept before the courier's first report, bytes.
MAX_EARLY_OUTPUT = 1024 * 1024
#: Output outside the protocol that is kept for the log, such as a traceback, bytes.
_MAX_STRAY_BYTES = 2000
#: Maximum length of an error's text, characters.
_MAX_ERROR = 2000
#: Maximum length of the last line of a courier that ended without an error, characters.
_MAX_LAST_LINE = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: Keys of the courier's reports, with the type of their values.
_REPORTS: Mapping[str, type] = {"ready": bool, "done": dict, "error": dict}
_ERRORS: Mapping[str, type[GpuhubError]] = {
    "invalid": InvalidRequest,
    "failed": InvalidRequest,
    "not-found": NotFound,
    "too-large": SizeLimitExceeded,
    "no-space": NoSpace,
    "unavailable": Unavailable,
}


class Couriers(Protocol):
    """What runs couriers: in containers (`CourierPool`), or by the backend (`BackendCouriers`)."""

    def connect(self, owner: str, arguments: Sequence[str]) -> AbstractAsyncContextManager[CourierClient]:
        """Run one command on the files of an owner's home, see `gpu_launch.courier.main`."""
        ...

    def connect_job(self, job: JobRow, arguments: Sequence[str]) -> AbstractAsyncContextManager[CourierClient]:
        """Run one command where the files of a job are now."""
        ...

    def connect_worker(
        self, job: JobRow, worker: WorkerRow, arguments: Sequence[str]
    ) -> AbstractAsyncContextManager[CourierClient]:
        """Run one command beside a running worker."""
        ...


class CourierClient:
    """One command that a courier runs: an async context manager, whose exit ends the command."""

    def __init__(self, session: ProgramSession) -> None:
        self._exec = session
        self._line = bytearray()
        self._reports_size = self._reports_count = 0
        self._stray_output = bytearray()
        self._status: dict[str, Any] = {}
        #: Output that came before the message that the courier is ready: its two streams may overtake each other.
        self._early_output = bytearray()

    async def __aenter__(self) -> Self:
        """Start the command and wait until the courier is ready, which much output shows as well.

        Raises:
            InvalidRequest, NotFound, SizeLimitExceeded: the courier refuses the command.
            Unavailable: it does not respond in time.
            GpuhubError: its reports are too large.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._exec.send(_HEADER.pack(BEGIN, 0))
                while not self._has_started and (data := await self._next()) is not None:
                    self._early_output += data
        except TimeoutError:
            self._exec.close()
            raise Unavailable(f"the courier did not start within {_START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            self._exec.close()
            raise
        if "error" in self._status or not self._has_started:
            self._exec.close()
            raise self._failure()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exec.close()

    @property
    def _has_started(self) -> bool:
        return bool(self._status) or len(self._early_output) >= MAX_EARLY_OUTPUT

    @property
    def is_finished(self) -> bool:
        """True when the courier has reported its result or an error."""
        return "done" in self._status or "error" in self._status

    async def send(self, data: bytes) -> None:
        """Send input to the command.

        Raises:
            NodeUnreachable: the courier has ended.
        """
        for start in range(0, len(data), _MAX_PAYLOAD):
            await self._send(DATA, data[start : start + _MAX_PAYLOAD])

    async def resize(self, columns: int, rows: int) -> None:
        """Change the size of the command's terminal."""
        await self._send(RESIZE, json.dumps([columns, rows]).encode())

    async def end_input(self) -> None:
        """Signal the end of the input, or that the command need not wait for more output."""
        await self._send(END, b"")

    async def read_output(self, *, limit_s: float | None = None) -> AsyncIterator[bytes]:
        """Yield the command's output until its end.

        Args:
            limit_s: the longest silence, seconds; None for no limit.

        Raises:
            Unavailable: the courier is silent for longer.
            GpuhubError: as for `wait_result`.
        """
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    data = self._take_early_output() or await self._next()
            except TimeoutError:
                raise Unavailable(f"the courier has been silent for {limit_s:.0f} s") from None
            if data is None:
                break
            if data:
                yield data
        if "done" not in self._status:
            raise self._failure()

    @property
    def result(self) -> dict[str, Any]:
        """The result that the courier reported; empty before."""
        return dict(self._status.get("done", {}))

    async def wait_result(self) -> dict[str, Any]:
        """Return the result of the command, and discard its output.

        Raises:
            InvalidRequest, NotFound, SizeLimitExceeded, NoSpace: the courier reports this error.
            Unavailable: the courier is silent for too long.
            GpuhubError: the courier ended without a result.
        """
        async for _ in self.read_output(limit_s=_WORK_TIMEOUT_S):
            pass
        return self.result

    async def _send(self, kind: int, payload: bytes) -> None:
        await self._exec.send(_HEADER.pack(kind, len(payload)) + payload)

    async def _next(self) -> bytes | None:
        """Return the next output, empty after a message of the protocol; None when the courier has ended."""
        part = await self._exec.read()
        if part is None:
            return None
        stream, data = part
        if stream == STDOUT:
            return data
        self._reports_size += len(data)
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._extend_line(end)
            self._parse_line()
            self._line.clear()
        self._extend_line(rest)
        return b""

    def _take_early_output(self) -> bytes:
        data = bytes(self._early_output)
        self._early_output.clear()
        return data

    def _extend_line(self, data: bytes) -> None:
        self._line += data
        for size, limit, what in (
            (len(self._line), MAX_LINE, "a line"),
            (self._reports_size, MAX_REPORTS, "reports"),
        ):
            if size > limit:
                log.warning("a courier sent too much (%s); it wrote: %s", what, self._format_stray_output())
                raise GpuhubError(
                    f"the courier on the node sent {what} of more than {format_size(limit)}: a program in your home, "
                    "such as usercustomize.py, changes what it does"
                )

    def _parse_line(self) -> None:
        message = None
        if self._line.startswith(b"{") and self._reports_count < _MAX_PARSED:
            self._reports_count += 1
            with suppress(ValueError, RecursionError):
                message = json.loads(self._line)
        if isinstance(message, dict):
            for key, kind in _REPORTS.items():
                if isinstance(message.get(key), kind):
                    self._status.setdefault(key, message[key])
        else:
            self._stray_output += self._line + b"\n"
            del self._stray_output[:-_MAX_STRAY_BYTES]

    def _format_stray_output(self) -> str:
        """Return the end of what the courier wrote outside the protocol."""
        return (self._stray_output + self._line)[-_MAX_STRAY_BYTES:].decode("utf-8", "replace").strip()

    def _failure(self) -> GpuhubError:
        error = self._status.get("error")
        if error is not None:
            text = str(error.get("text", ""))[:_MAX_ERROR]
            return _ERRORS.get(str(error.get("code", "")), GpuhubError)(text)
        stray = self._format_stray_output()
        log.warning("a courier ended without a result; it wrote: %s", stray)
        last = escape_lines(_COLOUR.sub("", stray).rpartition("\n")[2].encode())[:_MAX_LAST_LINE]
        reason = f"its last line is: {last}" if last else "it wrote nothing"
        return GpuhubError(f"the courier on the node ended unexpectedly; {reason}")
