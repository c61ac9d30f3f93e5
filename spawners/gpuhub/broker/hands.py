"""Stops, removes and signals containers beside the looks, so that a slow one holds up nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from gpuhub.containers.daemons import Daemons
from gpuhub.errors import Conflict, GpuhubError, NotFound

log = logging.getLogger(__name__)

#: From SIGTERM to SIGKILL when a container is stopped, seconds.
STOP_S = 2

_Key = tuple[str, str]


class Hands:
    """At most one removal of each container at a time, and one signal for each in a run of the broker."""

    def __init__(self, *, daemons: Daemons, on_removed: Callable[[str], None]) -> None:
        self._daemons = daemons
        #: Called with the node's name.
        self._on_removed = on_removed
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._tried: set[_Key] = set()
        self._signalled: set[_Key] = set()

    async def close(self) -> None:
        """Give up what is under way; the next run takes it up again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def remove(self, node: str, container_id: str) -> bool:
        """Begin to stop and remove a container; false where that is under way, or was tried before."""
        key = (node, container_id)
        is_first = self._begin(key, self._remove(node, container_id)) and key not in self._tried
        self._tried.add(key)
        return is_first

    def signal(self, node: str, container_id: str) -> bool:
        """Begin to send SIGTERM to a container's program; false where it was sent, or something is under way."""
        if (node, container_id) in self._signalled:
            return False
        return self._begin((node, container_id), self._signal(node, container_id))

    def forget(self, node: str, there: Collection[str]) -> None:
        """Only these containers are still on the node."""
        self._signalled = {key for key in self._signalled if key[0] != node or key[1] in there}
        self._tried = {key for key in self._tried if key[0] != node or key[1] in there}

    def _begin(self, key: _Key, work: Coroutine[Any, Any, None]) -> bool:
        if key in self._tasks:
            work.close()
            return False
        task = asyncio.ensure_future(work)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return True

    async def _remove(self, node: str, container_id: str) -> None:
        try:
            # Apart from the looks: what hangs in a dead file server hangs here, while its node answers.
            await self._daemons.run(node, lambda client: client.stop(container_id, timeout=STOP_S), mounting=True)
            await self._daemons.run(
                node, lambda client: client.remove_container(container_id, force=True, v=True), mounting=True
            )
        except NotFound:
            log.info("node %s: container %s is gone already", node, container_id[:12])
        except GpuhubError as error:
            log.warning("node %s: container %s cannot be removed yet: %s", node, container_id[:12], error)
            return
        self._on_removed(node)

    async def _signal(self, node: str, container_id: str) -> None:
        try:
            await self._daemons.call(node, "kill", container_id, signal="SIGTERM")
        except (NotFound, Conflict) as error:
            log.info("node %s: container %s ended before it was told to: %s", node, container_id[:12], error)
        except GpuhubError as error:
            log.warning("node %s: container %s cannot be told to end yet: %s", node, container_id[:12], error)
            return
        self._signalled.add((node, container_id))
