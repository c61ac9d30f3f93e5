"""Users' couriers: started when somebody sends or reads files, removed when nobody has for a while."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from gpuhub import names
from gpuhub.broker.core import Core
from gpuhub.broker.intake import DEFAULT_IMAGE
from gpuhub.broker.talks import Talk
from gpuhub.containers.arguments import COURIER_COMMAND
from gpuhub.containers.courier import CourierSpec
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.execs import Exec, start_exec
from gpuhub.errors import (
    Conflict,
    GpuhubError,
    ImageMissing,
    NodeUnreachable,
    NotFound,
    StorageUnavailable,
    Unavailable,
)

#: Starts a courier in place of one that is there; its container's id.
StartCourier = Callable[[CourierSpec], Awaitable[str]]

#: A courier that nobody used for so long is removed, seconds.
IDLE_S = 120.0
_ENDED = frozenset({"exited", "dead", "removing"})


@dataclass(slots=True)
class Courier:
    """A courier that runs."""

    node: str
    container: str
    #: Who uses it at present.
    users: int = 0
    #: When somebody last did; monotonic.
    used_at: float = 0.0


class Couriers:
    """At most one for each owner that is given to new callers."""

    def __init__(self, *, core: Core, daemons: Daemons, start: StartCourier) -> None:
        self._core = core
        self._daemons = daemons
        self._start = start
        self._current: dict[str, Courier] = {}
        #: All of this run of the broker that are there, by container.
        self._known: dict[str, Courier] = {}
        self._starting: set[tuple[str, str]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def talk(self, owner: str, words: Sequence[str]) -> AsyncIterator[Talk]:
        """Let the owner's courier do one thing, see `gpu_launch.courier.command`.

        Raises:
            Unavailable: no node that takes work can start one.
            GpuhubError: what the courier says, see `Talk`.
        """
        courier, found = await self._open(owner, (*COURIER_COMMAND, *words))
        courier.users += 1
        try:
            async with Talk(found) as talk:
                yield talk
        finally:
            courier.users -= 1
            courier.used_at = self._core.clock.monotonic()

    def unwanted(self, node: str, listed: Sequence[Mapping[str, Any]]) -> list[str]:
        """Of a node's containers, as its daemon lists them, those of couriers that are to be removed: of an earlier run
        of the broker, ended ones, and those that nobody used for `IDLE_S`, or uses on a node that is to be left.
        """
        couriers = {str(raw["Id"]): raw for raw in listed if _labels(raw).get(names.LABEL_KIND) == names.KIND_COURIER}
        # One that was made since the list began is not in it: it is told from a lost one by its use.
        lost = [one for one, known in self._known.items() if known.node == node and one not in couriers]
        gone = [one for one, raw in couriers.items() if not self._is_wanted(one, node, raw)]
        for container in [one for one in lost if self._is_idle(self._known[one])] + gone:
            self._forget(container)
        return gone

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_wanted(self, container: str, node: str, raw: Mapping[str, Any]) -> bool:
        if (_labels(raw).get(names.LABEL_OWNER, ""), node) in self._starting:
            return True
        courier = self._known.get(container)
        if courier is None or str(raw.get("State")).lower() in _ENDED:
            return False
        is_current = courier in self._current.values() and self._is_good(node)
        return courier.users > 0 or (is_current and not self._is_idle(courier))

    def _is_idle(self, courier: Courier) -> bool:
        return not courier.users and self._core.clock.monotonic() - courier.used_at > IDLE_S

    def _forget(self, container: str) -> None:
        courier = self._known.pop(container, None)
        self._current = {owner: one for owner, one in self._current.items() if one is not courier}

    async def _borrow(self, owner: str) -> Courier:
        lock = self._locks.get(owner)
        if lock is None:
            lock = self._locks[owner] = asyncio.Lock()
        async with lock:
            courier = self._current.get(owner)
            if courier is None or not self._is_good(courier.node):
                courier = await self._start_somewhere(owner)
            # From here on it is not idle, whenever its node is looked at.
            courier.used_at = self._core.clock.monotonic()
            return courier

    async def _open(self, owner: str, command: Sequence[str]) -> tuple[Courier, Exec]:
        courier = await self._borrow(owner)
        try:
            return courier, await start_exec(self._daemons, courier.node, courier.container, command)
        except (NotFound, Conflict):
            # Somebody removed it, or its node was started anew.
            self._forget(courier.container)
        courier = await self._borrow(owner)
        return courier, await start_exec(self._daemons, courier.node, courier.container, command)

    async def _start_somewhere(self, owner: str) -> Courier:
        nodes = [node for node in self._core.inventory.nodes if self._is_good(node)]
        # Users are spread over the nodes, each always on the same one.
        first = zlib.crc32(owner.encode()) % max(1, len(nodes))
        failed: GpuhubError = Unavailable("no node takes work at present, so files can be neither sent nor read")
        for node in nodes[first:] + nodes[:first]:
            self._starting.add((owner, node))
            try:
                container = await self._start(CourierSpec(owner=owner, node=node, image=DEFAULT_IMAGE))
            except (NodeUnreachable, StorageUnavailable, ImageMissing, Conflict) as error:
                failed = error
            else:
                courier = Courier(node=node, container=container, used_at=self._core.clock.monotonic())
                self._current[owner] = self._known[container] = courier
                return courier
            finally:
                self._starting.discard((owner, node))
        raise failed

    def _is_good(self, node: str) -> bool:
        return self._core.inventory.nodes[node].is_up and node not in self._core.cordons


def _labels(raw: Mapping[str, Any]) -> Mapping[str, str]:
    return raw.get("Labels") or {}
