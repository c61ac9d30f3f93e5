"""Keeps the containers of all services running, and removes those of services that the settings no longer have."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from gpuhub.broker_api.schemas.services import ServiceState
from gpuhub.common.errors import GpuhubError, ImageMissing, NodeUnreachable, Unavailable
from gpuhub.config.containers.services import ServiceSettings, find_service_node
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.services import service_container
from gpuhub.docker.services.service_container import ServiceContainers

log = logging.getLogger(__name__)

#: Interval between two polls of a service's containers, seconds.
PERIOD_S = 3.0
#: First delay before a service that ended is started again, seconds; doubled each time.
FIRST_DELAY_S = 1.0
#: Maximum delay, seconds.
LONGEST_DELAY_S = 60.0
#: Time after which a service that runs counts as healthy, so that the delay begins again with the first; seconds.
HEALTHY_S = 60.0
#: Interval between two attempts of what a node has refused, such as an image that cannot be pulled, seconds.
REFUSED_DELAY_S = 60.0
#: Interval between two searches for containers of former services, seconds.
_CLEAN_PERIOD_S = 30.0
#: Maximum time that a new start waits for one that is under way, seconds.
_LOCK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """The state of a service, as last seen."""

    state: ServiceState = ServiceState.STARTING
    #: Why it does not run; for administrators.
    message: str = ""
    #: How often its program has been started again since the broker started.
    restarts: int = 0
    #: Container in which connections to it begin; empty where there is none.
    relay_id: str = ""


@dataclass(slots=True)
class _Watched:
    settings: ServiceSettings
    node: str
    status: ServiceStatus = field(default_factory=ServiceStatus)
    delay_s: float = FIRST_DELAY_S
    #: When the program was last started, and when it may be started again; of the event loop.
    started_at: float = 0.0
    may_start_at: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServiceSupervisor:
    """Starts, watches and restarts the services; each has a task of its own, so that a dead node delays no other."""

    def __init__(self, cluster: ClusterSettings, daemons: DockerClients) -> None:
        self._cluster = cluster
        self._daemons = daemons
        self._watched: dict[str, _Watched] = {}
        for service in cluster.services:
            node = find_service_node(service, cluster.nodes)
            if node is not None:
                self._watched[service.name] = _Watched(service, node.name)

    def status(self, service: str) -> ServiceStatus:
        """Return the last known state of a service that the settings have."""
        return self._watched[service].status

    def node(self, service: str) -> str:
        """Return the node of a service that the settings have."""
        return self._watched[service].node

    async def run(self) -> None:
        """Keep the services running, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._clean())
            for watched in self._watched.values():
                group.create_task(self._watch(watched))

    async def restart(self, service: str) -> None:
        """Replace a service's containers.

        Raises:
            Unavailable: It is being started, which takes long, such as the pull of its image.
            GpuhubError: Its node does not answer, or refuses.
        """
        watched = self._watched[service]
        try:
            async with asyncio.timeout(_LOCK_S):
                await watched.lock.acquire()
        except TimeoutError:
            raise Unavailable(f"the service {service} is being started: {watched.status.message}") from None
        try:
            watched.status = replace(watched.status, state=ServiceState.STARTING, message="", relay_id="")
            await service_container.remove_service(self._daemons, watched.node, service)
            watched.delay_s, watched.may_start_at = FIRST_DELAY_S, 0.0
        finally:
            watched.lock.release()
        watched.wake.set()

    async def read_log(self, service: str, lines: int) -> bytes:
        """Return the last lines of a service's output.

        Raises:
            GpuhubError: It has no container, or its node does not answer.
        """
        return await service_container.read_log(self._daemons, self._watched[service].node, service, lines)

    async def _watch(self, watched: _Watched) -> None:
        while True:
            try:
                async with watched.lock:
                    await self.poll(watched.settings.name)
            except NodeUnreachable as error:
                self._note(watched, ServiceState.UNREACHABLE, str(error))
            except GpuhubError as error:
                self._note(watched, ServiceState.FAILED, str(error))
                watched.may_start_at = asyncio.get_running_loop().time() + REFUSED_DELAY_S
            except Exception as error:
                log.exception("service %s: unexpected failure", watched.settings.name)
                self._note(watched, ServiceState.FAILED, f"unexpected failure: {type(error).__name__}")
                watched.may_start_at = asyncio.get_running_loop().time() + REFUSED_DELAY_S
            try:
                async with asyncio.timeout(PERIOD_S):
                    await watched.wake.wait()
            except TimeoutError:
                continue
            watched.wake.clear()

    async def poll(self, service: str) -> None:
        """Poll a service's containers once, and create or start them where that is due.

        Raises:
            NodeUnreachable, GpuhubError: It cannot be started now.
        """
        watched, now = self._watched[service], asyncio.get_running_loop().time()
        settings, node = watched.settings, watched.node
        found = await service_container.inspect_service(self._daemons, node, service)
        if not found.is_running and now < watched.may_start_at:
            return
        build = await self._find_build(watched)
        if not found.is_built_as(build):
            self._note(watched, ServiceState.STARTING, "")
            await service_container.create_service(self._daemons, self._cluster, node, settings, build)
            found = await service_container.inspect_service(self._daemons, node, service)
        elif found.is_running:
            if now - watched.started_at > HEALTHY_S:
                watched.delay_s = FIRST_DELAY_S
            watched.status = replace(watched.status, state=ServiceState.RUNNING, message="", relay_id=found.relay_id)
            return
        elif watched.started_at and found.has_ended and await self._delay(watched, found, now):
            return
        await service_container.start_service(self._daemons, self._cluster, node, settings, found)
        watched.started_at, watched.may_start_at = now, 0.0
        watched.status = replace(watched.status, state=ServiceState.RUNNING, message="", relay_id=found.relay_id)
        log.info("service %s runs on node %s", service, node)

    async def _delay(self, watched: _Watched, found: ServiceContainers, now: float) -> bool:
        """Return whether a program that has ended has to wait, and note why it ended."""
        if watched.may_start_at:
            # The delay is over.
            watched.status = replace(watched.status, restarts=watched.status.restarts + 1)
            return False
        code = None if found.program is None else found.program["State"]["ExitCode"]
        output = await service_container.read_log(self._daemons, watched.node, watched.settings.name, 1)
        last = output.decode("utf-8", "replace").strip().partition(" ")[2][:300]
        delay_s = FIRST_DELAY_S if now - watched.started_at > HEALTHY_S else watched.delay_s
        self._note(watched, ServiceState.FAILED, f"it ended with exit code {code}" + (f": {last}" if last else ""))
        watched.may_start_at, watched.delay_s = now + delay_s, min(delay_s * 2, LONGEST_DELAY_S)
        return True

    async def _find_build(self, watched: _Watched) -> str:
        try:
            return await service_container.find_build(self._daemons, watched.node, watched.settings)
        except ImageMissing:
            self._note(watched, ServiceState.STARTING, f"node {watched.node} pulls the image {watched.settings.image}")
            await service_container.pull_image(self._daemons, watched.node, watched.settings.image)
        return await service_container.find_build(self._daemons, watched.node, watched.settings)

    def _note(self, watched: _Watched, state: ServiceState, message: str) -> None:
        if (state, message) != (watched.status.state, watched.status.message) and message:
            log.warning("service %s: %s", watched.settings.name, message)
        watched.status = replace(watched.status, state=state, message=message)

    async def _clean(self) -> None:
        """Remove containers of services that are no longer on their node, again and again."""
        while True:
            nodes = [node.name for node in self._cluster.nodes if node.docker and not node.guest]
            await asyncio.gather(*(self._clean_node(node) for node in nodes))
            await asyncio.sleep(_CLEAN_PERIOD_S)

    async def _clean_node(self, node: str) -> None:
        try:
            for service in await service_container.list_services(self._daemons, node):
                watched = self._watched.get(service)
                if watched is None or watched.node != node:
                    await service_container.remove_service(self._daemons, node, service)
                    log.info(
                        "node %s: service %s is no longer in the settings: its containers are removed", node, service
                    )
        except GpuhubError as error:
            log.info("node %s: former services stay for now: %s", node, error)
