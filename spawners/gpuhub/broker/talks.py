"""A conversation with one `gpu-launch-courier`: see `gpu_launch.courier.frames`, whose other side this is."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

from gpuhub.broker.refusals import NoSpace, TooLarge
from gpuhub.containers.execs import STDOUT, Exec
from gpuhub.errors import GpuhubError, InvalidRequest, NotFound, Unavailable

log = logging.getLogger(__name__)

BEGIN, DATA, END, RESIZE = range(4)
_HEADER = struct.Struct(">BI")
#: What fits into one frame.
_MOST_PAYLOAD = 1024 * 1024
#: A courier that says nothing for so long at its beginning is given up, seconds.
_BEGIN_S = 30.0
#: The same where it has work to do: a file server may be slow.
_WORK_S = 120.0
#: Of what it says outside the protocol, so much is kept: a traceback, or why it could not be started.
_KEPT = 2000

_ERRORS: Mapping[str, type[GpuhubError]] = {
    "invalid": InvalidRequest,
    "failed": InvalidRequest,
    "not-found": NotFound,
    "too-large": TooLarge,
    "no-space": NoSpace,
}


class Talk:
    """One of them; an async context, at whose end it is broken off if it goes on."""

    def __init__(self, found: Exec) -> None:
        self._exec = found
        self._line = b""
        self._noise = ""
        self._said: dict[str, Any] = {}
        #: Its two streams overtake each other: what it wrote may come before its word that it begins, or after its
        #: word that it is done.
        self._early: list[bytes] = []

    async def __aenter__(self) -> Self:
        """Begin.

        Raises:
            InvalidRequest, NotFound, TooLarge: what the courier says.
            Unavailable: it says nothing.
        """
        try:
            async with asyncio.timeout(_BEGIN_S):
                await self._exec.send(_HEADER.pack(BEGIN, 0))
                while not self._said and (data := await self._next()) is not None:
                    self._early.append(data)
        except TimeoutError:
            self._exec.close()
            raise Unavailable(f"the courier did not begin within {_BEGIN_S:.0f} s") from None
        except BaseException:
            self._exec.close()
            raise
        if "ready" not in self._said:
            self._exec.close()
            raise self._failure()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Break it off."""
        self._exec.close()

    @property
    def is_over(self) -> bool:
        """It has said that it is done, or why not."""
        return "done" in self._said or "error" in self._said

    async def send(self, data: bytes) -> None:
        """Data for it.

        Raises:
            NodeUnreachable: it has ended.
        """
        for start in range(0, len(data), _MOST_PAYLOAD):
            await self._send(DATA, data[start : start + _MOST_PAYLOAD])

    async def resize(self, columns: int, rows: int) -> None:
        """Another size for its terminal."""
        await self._send(RESIZE, json.dumps([columns, rows]).encode())

    async def finish(self) -> None:
        """There is no more data, or nothing more to be waited for."""
        await self._send(END, b"")

    async def output(self, *, limit_s: float | None = None) -> AsyncIterator[bytes]:
        """What it writes until it is done; `limit_s` is the longest silence.

        Raises:
            As `result` does.
        """
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    data = self._early.pop(0) if self._early else await self._next()
            except TimeoutError:
                raise Unavailable(f"the courier said nothing for {limit_s:.0f} s") from None
            if data is None:
                break
            if data:
                yield data
        if "done" not in self._said:
            raise self._failure()

    @property
    def done(self) -> dict[str, Any]:
        """What it said when it was done; empty before."""
        return dict(self._said.get("done") or {})

    async def result(self) -> dict[str, Any]:
        """What it says when it is done; what it writes is passed over.

        Raises:
            InvalidRequest, NotFound, TooLarge, NoSpace: what the courier says.
            Unavailable: it says nothing for too long.
            GpuhubError: it ended without a word.
        """
        async for _ in self.output(limit_s=_WORK_S):
            pass
        return self.done

    async def _send(self, kind: int, payload: bytes) -> None:
        await self._exec.send(_HEADER.pack(kind, len(payload)) + payload)

    async def _next(self) -> bytes | None:
        """What it wrote next, empty when it said something beside; None when it has ended."""
        part = await self._exec.read()
        if part is None:
            return None
        stream, data = part
        if stream == STDOUT:
            return data
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._hear(line.decode("utf-8", "replace"))
        return b""

    def _hear(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if isinstance(said, dict):
            self._said |= said
        else:
            self._noise = f"{self._noise}{line}\n"[-_KEPT:]

    def _failure(self) -> GpuhubError:
        error = self._said.get("error")
        if isinstance(error, dict):
            return _ERRORS.get(error.get("code", ""), GpuhubError)(str(error.get("text", "")))
        noise = f"{self._noise}{self._line.decode('utf-8', 'replace')}".strip()
        log.warning("a courier ended without a word; it wrote: %s", noise)
        return GpuhubError("what serves files on the node ended unexpectedly; the broker's log says more")
