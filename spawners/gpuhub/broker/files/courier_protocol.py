"""The broker's side of the courier protocol; `gpu_launch.courier.protocol` is the other side."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

from gpuhub.broker_api.errors import NoSpace, SizeLimitExceeded
from gpuhub.common.errors import GpuhubError, InvalidRequest, NotFound, Unavailable
from gpuhub.docker.exec_session import STDOUT, ExecSession

log = logging.getLogger(__name__)

BEGIN, DATA, END, RESIZE = range(4)
_HEADER = struct.Struct(">BI")
#: Maximum payload of one frame, bytes.
_MAX_PAYLOAD = 1024 * 1024
#: Time that a courier may take until it is ready, seconds.
_START_TIMEOUT_S = 30.0
#: Longest silence of a courier that works, since a file server may be slow; seconds.
_WORK_TIMEOUT_S = 120.0
#: Characters of output outside the protocol that are kept for the log, such as a traceback.
_MAX_STRAY_CHARACTERS = 2000

_ERRORS: Mapping[str, type[GpuhubError]] = {
    "invalid": InvalidRequest,
    "failed": InvalidRequest,
    "not-found": NotFound,
    "too-large": SizeLimitExceeded,
    "no-space": NoSpace,
}


class CourierClient:
    """One command that a courier runs: an async context manager, whose exit ends the command."""

    def __init__(self, session: ExecSession) -> None:
        self._exec = session
        self._line = b""
        self._stray_output = ""
        self._status: dict[str, Any] = {}
        #: Output that came before the message that the courier is ready: its two streams may overtake each other.
        self._early_output: list[bytes] = []

    async def __aenter__(self) -> Self:
        """Start the command and wait until the courier is ready.

        Raises:
            InvalidRequest, NotFound, SizeLimitExceeded: the courier refuses the command.
            Unavailable: it does not respond in time.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._exec.send(_HEADER.pack(BEGIN, 0))
                while not self._status and (data := await self._next()) is not None:
                    self._early_output.append(data)
        except TimeoutError:
            self._exec.close()
            raise Unavailable(f"the courier did not start within {_START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            self._exec.close()
            raise
        if "ready" not in self._status:
            self._exec.close()
            raise self._failure()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exec.close()

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
                    data = self._early_output.pop(0) if self._early_output else await self._next()
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
        return dict(self._status.get("done") or {})

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
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._parse_line(line.decode("utf-8", "replace"))
        return b""

    def _parse_line(self, line: str) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            self._status |= message
        else:
            self._stray_output = f"{self._stray_output}{line}\n"[-_MAX_STRAY_CHARACTERS:]

    def _failure(self) -> GpuhubError:
        error = self._status.get("error")
        if isinstance(error, dict):
            return _ERRORS.get(error.get("code", ""), GpuhubError)(str(error.get("text", "")))
        stray = f"{self._stray_output}{self._line.decode('utf-8', 'replace')}".strip()
        log.warning("a courier ended without a result; it wrote: %s", stray)
        return GpuhubError("the courier on the node ended unexpectedly; the broker's log has details")
