"""The pool of users' couriers, started for the first transfer and removed when idle, and the client of one courier.

`gpu_launch.courier.protocol` is the other side of the client's protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.errors import NoSpace, SizeLimitExceeded
from gpuhub.broker_api.schemas import WorkerState
from gpuhub.common import names
from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    ImageMissing,
    InvalidRequest,
    NodeUnreachable,
    NotFound,
    StorageUnavailable,
    Unavailable,
)
from gpuhub.common.names import DEFAULT_IMAGE
from gpuhub.common.units import format_size
from gpuhub.docker.client import DockerClients
from gpuhub.docker.container_spec import COURIER_COMMAND
from gpuhub.docker.exec_session import STDOUT, ExecSession, start_exec
from gpuhub.docker.user_containers import CourierSpec
from gpuhub.domain.models import JobRow

log = logging.getLogger(__name__)

#: Starts a courier, replacing an existing one, and returns its container's id.
StartCourier = Callable[[CourierSpec], Awaitable[str]]

BEGIN, DATA, END, RESIZE = range(4)
_HEADER = struct.Struct(">BI")
#: Maximum payload of one frame, bytes.
_MAX_PAYLOAD = 1024 * 1024
#: Time that a courier may take until it is ready, seconds.
_START_TIMEOUT_S = 30.0
#: Longest silence of a courier that works, since a file server may be slow; seconds.
_WORK_TIMEOUT_S = 120.0
#: Longest line of a report, and the most that a courier may write to stderr in all, bytes. The courier runs as its
#: user, who can make it send anything.
MAX_LINE = 64 * 1024
MAX_REPORTS = 256 * 1024
#: Lines that are parsed; the protocol needs two.
_MAX_PARSED = 100
#: Most output that is kept before the courier's first report, bytes.
MAX_EARLY_OUTPUT = 1024 * 1024
#: Output outside the protocol that is kept for the log, such as a traceback, bytes.
_MAX_STRAY_BYTES = 2000
#: Longest text of an error, characters.
_MAX_ERROR = 2000
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

#: Time without use after which a courier is removed, seconds.
IDLE_TIMEOUT_S = 120.0
_ENDED = frozenset({"exited", "dead", "removing"})


class CourierClient:
    """One command that a courier runs: an async context manager, whose exit ends the command."""

    def __init__(self, session: ExecSession) -> None:
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
        log.warning("a courier ended without a result; it wrote: %s", self._format_stray_output())
        return GpuhubError("the courier on the node ended unexpectedly; the broker's log has details")


@dataclass(slots=True)
class Courier:
    """A courier container that runs."""

    node: str
    container: str
    #: Number of commands that run in it.
    users: int = 0
    #: When the last command ended; monotonic.
    used_at: float = 0.0


class CourierPool:
    """The couriers of all users, at most one for each that new commands are sent to."""

    def __init__(self, *, core: BrokerState, daemons: DockerClients, start: StartCourier) -> None:
        self._core = core
        self._daemons = daemons
        self._start = start
        self._current: dict[str, Courier] = {}
        #: All couriers that this run of the broker started, by container id.
        self._running: dict[str, Courier] = {}
        self._starting: set[tuple[str, str]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def connect(self, owner: str, arguments: Sequence[str]) -> AsyncIterator[CourierClient]:
        """Run one command in the owner's courier, see `gpu_launch.courier.main`.

        Raises:
            Unavailable: no node that takes work can start a courier.
            GpuhubError: as for `CourierClient`.
        """
        courier, session = await self._open(owner, (*COURIER_COMMAND, *arguments))
        courier.users += 1
        try:
            async with CourierClient(session) as client:
                yield client
        finally:
            courier.users -= 1
            courier.used_at = self._core.clock.monotonic()

    @asynccontextmanager
    async def connect_job(self, job: JobRow, arguments: Sequence[str]) -> AsyncIterator[CourierClient]:
        """Run one command where the files of a job are now: in its container, while that runs on a guest, else in the
        owner's courier.

        Raises:
            Unavailable, GpuhubError: as for `connect`.
        """
        session = await self._open_on_guest(job, arguments)
        if session is None:
            async with self.connect(job.owner, arguments) as client:
                yield client
        else:
            async with CourierClient(session) as client:
                yield client

    async def _open_on_guest(self, job: JobRow, arguments: Sequence[str]) -> ExecSession | None:
        for worker in job.workers:
            is_there = worker.state is WorkerState.RUNNING and worker.container_id is not None
            if worker.index == 0 and is_there and self._core.cluster.node(worker.node).guest:
                # It may have ended in the meantime.
                with suppress(NotFound, Conflict):
                    return await start_exec(
                        self._daemons, worker.node, worker.container_id or "", (*COURIER_COMMAND, *arguments)
                    )
        return None

    def find_unwanted(self, node: str, listed: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the ids of the node's courier containers that should be removed.

        These are couriers of an earlier run of the broker, ended and idle ones, and unused ones on a node that takes
        no work.

        Args:
            node: the node's name.
            listed: the containers of the node, as its daemon lists them.
        """
        couriers = {str(raw["Id"]): raw for raw in listed if _labels(raw).get(names.LABEL_KIND) == names.KIND_COURIER}
        # The list lacks a courier that was created after it as well; its recent use distinguishes it from a lost one.
        missing = [
            container
            for container, courier in self._running.items()
            if courier.node == node and container not in couriers and self._is_idle(courier)
        ]
        unwanted = [container for container, raw in couriers.items() if not self._is_wanted(container, node, raw)]
        for container in missing + unwanted:
            self._forget(container)
        return unwanted

    def _is_wanted(self, container: str, node: str, raw: Mapping[str, Any]) -> bool:
        if (_labels(raw).get(names.LABEL_OWNER, ""), node) in self._starting:
            return True
        courier = self._running.get(container)
        if courier is None or str(raw.get("State")).lower() in _ENDED:
            return False
        is_current = courier in self._current.values() and self._is_usable(node)
        return courier.users > 0 or (is_current and not self._is_idle(courier))

    def _is_idle(self, courier: Courier) -> bool:
        return not courier.users and self._core.clock.monotonic() - courier.used_at > IDLE_TIMEOUT_S

    def _forget(self, container: str) -> None:
        courier = self._running.pop(container, None)
        self._current = {owner: current for owner, current in self._current.items() if current is not courier}

    async def _acquire(self, owner: str) -> Courier:
        lock = self._locks.get(owner)
        if lock is None:
            lock = self._locks[owner] = asyncio.Lock()
        async with lock:
            courier = self._current.get(owner)
            if courier is None or not self._is_usable(courier.node):
                courier = await self._start_on_any_node(owner)
            # From here on it does not count as idle, even if its node is polled now.
            courier.used_at = self._core.clock.monotonic()
            return courier

    async def _open(self, owner: str, command: Sequence[str]) -> tuple[Courier, ExecSession]:
        courier = await self._acquire(owner)
        try:
            return courier, await start_exec(self._daemons, courier.node, courier.container, command)
        except (NotFound, Conflict):
            # The container was removed, or its node restarted.
            self._forget(courier.container)
        courier = await self._acquire(owner)
        return courier, await start_exec(self._daemons, courier.node, courier.container, command)

    async def _start_on_any_node(self, owner: str) -> Courier:
        nodes = [node for node in self._core.capacity.inventory.nodes if self._is_usable(node)]
        # Users are spread over the nodes, and each user stays on the same one.
        first = zlib.crc32(owner.encode()) % max(1, len(nodes))
        failure: GpuhubError = Unavailable("no node takes work now, so files can be neither sent nor read")
        for node in nodes[first:] + nodes[:first]:
            self._starting.add((owner, node))
            try:
                container = await self._start(CourierSpec(owner=owner, node=node, image=DEFAULT_IMAGE))
            except (NodeUnreachable, StorageUnavailable, ImageMissing, Conflict) as error:
                failure = error
            else:
                courier = Courier(node=node, container=container, used_at=self._core.clock.monotonic())
                self._current[owner] = self._running[container] = courier
                return courier
            finally:
                self._starting.discard((owner, node))
        raise failure

    def _is_usable(self, node: str) -> bool:
        # A guest has no homes.
        if self._core.cluster.node(node).guest:
            return False
        return self._core.capacity.inventory.nodes[node].is_up and node not in self._core.capacity.cordons


def _labels(raw: Mapping[str, Any]) -> Mapping[str, str]:
    return raw.get("Labels") or {}
