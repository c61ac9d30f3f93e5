"""The pool of users' couriers, started for the first transfer and removed when idle."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from gpuhub.broker.files.courier_client import CourierClient
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import WorkerState
from gpuhub.common import names
from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    ImageMissing,
    NodeUnreachable,
    NotFound,
    StorageUnavailable,
    Unavailable,
)
from gpuhub.common.names import DEFAULT_IMAGE
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_spec import COURIER_COMMAND
from gpuhub.docker.containers.user_containers import CourierSpec
from gpuhub.docker.exec_session import ExecSession, start_exec
from gpuhub.domain.models import JobRow, WorkerRow

#: Starts a courier, replacing an existing one, and returns its container's id.
StartCourier = Callable[[CourierSpec], Awaitable[str]]


#: Time without use after which a courier is removed, seconds.
IDLE_TIMEOUT_S = 120.0
_ENDED = frozenset({"exited", "dead", "removing"})


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

    @asynccontextmanager
    async def connect_worker(
        self, job: JobRow, worker: WorkerRow, arguments: Sequence[str]
    ) -> AsyncIterator[CourierClient]:
        """Run one command in the container of a running worker.

        Raises:
            Unavailable, GpuhubError: as for `connect`.
        """
        command = (*COURIER_COMMAND, *arguments)
        session = await start_exec(self._daemons, worker.node, worker.container_id or "", command)
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
        if not nodes:
            raise Unavailable(self._explain_no_node())
        failure: GpuhubError = Unavailable("no node can start a courier")
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

    def is_starting_on(self, node: str) -> bool:
        """Return whether a courier is being started on a node, which its daemon may not list yet."""
        return any(starting == node for _, starting in self._starting)

    def _explain_no_node(self) -> str:
        """Return why files cannot be reached; where only sleeping nodes could, one of them is woken."""
        capacity = self._core.capacity
        for node, record in capacity.inventory.nodes.items():
            if record.is_put_to_sleep and node not in capacity.cordons:
                capacity.wake_requests.add(node)
                return f"all nodes sleep, so files can be neither sent nor read: {node} is being woken, try again soon"
        return "no node takes work now, so files can be neither sent nor read"

    def _is_usable(self, node: str) -> bool:
        # A guest has no homes.
        if self._core.cluster.node(node).guest:
            return False
        record = self._core.capacity.inventory.nodes[node]
        return record.is_up and not record.is_put_to_sleep and node not in self._core.capacity.cordons


def _labels(raw: Mapping[str, Any]) -> Mapping[str, str]:
    return raw.get("Labels") or {}
