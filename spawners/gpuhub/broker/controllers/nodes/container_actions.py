"""Removals of containers, and signals to them, in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.common.tasks import cancel_tasks
from gpuhub.docker.client import CallKind, DockerClients

log = logging.getLogger(__name__)

#: Time from SIGTERM to SIGKILL when a container is stopped, seconds.
STOP_GRACE_S = 2

#: Called with a stopped container's node and id before it is removed.
FetchFiles = Callable[[str, str], Awaitable[None]]
#: A container: the node's name and the container's id.
_Key = tuple[str, str]


class ContainerActions:
    """Background removals, at most one at a time for each container, and signals, one for each container."""

    def __init__(
        self, *, daemons: DockerClients, on_removed: Callable[[str], None], before_removal: FetchFiles | None = None
    ) -> None:
        self._daemons = daemons
        self._before_removal = before_removal
        #: Called with the node's name after a removal.
        self._on_removed = on_removed
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._attempted: set[_Key] = set()
        self._signalled: set[_Key] = set()

    async def close(self) -> None:
        """Cancel running actions; the next run of the broker starts them again."""
        await cancel_tasks(self._tasks.values())

    def remove(self, node: str, container_id: str) -> bool:
        """Start to stop and remove a container; return whether this is the first attempt."""
        key = (node, container_id)
        is_first = self._begin(key, self._remove(node, container_id)) and key not in self._attempted
        self._attempted.add(key)
        return is_first

    def signal(self, node: str, container_id: str) -> bool:
        """Start to send SIGTERM to a container; return False if it was sent before or another action is running."""
        if (node, container_id) in self._signalled:
            return False
        return self._begin((node, container_id), self._signal(node, container_id))

    def forget_absent(self, node: str, present: Collection[str]) -> None:
        """Forget actions on containers of the node that are not among `present`, the ids of those that still exist."""
        self._signalled = {key for key in self._signalled if key[0] != node or key[1] in present}
        self._attempted = {key for key in self._attempted if key[0] != node or key[1] in present}

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
            # `mounting`: a container on a dead file server blocks this call alone, while polls of the node continue.
            await self._daemons.run(
                node, lambda client: client.stop(container_id, timeout=STOP_GRACE_S), kind=CallKind.MOUNTING
            )
            if self._before_removal is not None:
                await self._before_removal(node, container_id)
            await self._daemons.run(
                node, lambda client: client.remove_container(container_id, force=True, v=True), kind=CallKind.MOUNTING
            )
        except NotFound:
            log.info("node %s: container %s has already been removed", node, container_id[:12])
        except GpuhubError as error:
            log.warning("node %s: container %s cannot be removed yet: %s", node, container_id[:12], error)
            return
        self._on_removed(node)

    async def _signal(self, node: str, container_id: str) -> None:
        try:
            await self._daemons.call(node, "kill", container_id, signal="SIGTERM")
        except (NotFound, Conflict) as error:
            log.info("node %s: container %s ended before SIGTERM was sent: %s", node, container_id[:12], error)
        except GpuhubError as error:
            log.warning("node %s: SIGTERM cannot be sent to container %s yet: %s", node, container_id[:12], error)
            return
        self._signalled.add((node, container_id))
