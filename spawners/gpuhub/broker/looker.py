"""Asks one node what is there: its containers, which daemon it is, and what its GPU agent last said.

No question takes longer than `LOOK_S`, whatever hangs on the node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpuhub import names
from gpuhub.broker.clock import Clock
from gpuhub.broker.found import Container, parse_container, parse_devices
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError, NodeUnreachable, NotFound
from gpuhub.nodes import readings
from gpuhub.nodes.agent_container import ensure_agent, read_last_line
from gpuhub.nodes.records import NodeRecord

log = logging.getLogger(__name__)

#: The most that one question may take, seconds.
LOOK_S = 4.0
#: Which daemon answers is asked again after so long, seconds.
IDENTITY_S = 30.0
#: Containers that could not be inspected are tried again after so long, seconds.
INSPECT_AGAIN_S = 30.0

T = TypeVar("T")


@dataclass(slots=True)
class _Known:
    """What is remembered of one node between looks."""

    asked_at: float | None = None
    agent: str | None = None
    devices: dict[str, frozenset[str]] = field(default_factory=dict)
    inspect_at: float = 0.0
    reading: asyncio.Task[tuple[float, bytes]] | None = None


class Looker:
    """Asks nodes; one question of a kind at a time for each."""

    def __init__(self, *, daemons: Daemons, clock: Clock) -> None:
        self._daemons = daemons
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = [known.reading for known in self._known.values() if known.reading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def list_containers(self, node: str) -> list[Mapping[str, Any]]:
        """Every container of this instance, as the daemon lists it.

        Raises:
            NodeUnreachable, GpuhubError.
        """
        label = f"{names.LABEL_INSTANCE}={self._daemons.instance}"
        found: list[Mapping[str, Any]] = await self._ask(
            node, lambda client: client.containers(all=True, filters={"label": [label]})
        )
        return found

    async def daemon_id(self, record: NodeRecord, listed: Sequence[Mapping[str, Any]]) -> str:
        """Which daemon answers: asked anew now and then, and when something speaks for another one.

        Raises:
            NodeUnreachable, GpuhubError.
        """
        known = self._of(record.name)
        agent = next((str(raw["Id"]) for raw in listed if _is_agent(raw)), None)
        is_recent = known.asked_at is not None and self._clock.monotonic() - known.asked_at < IDENTITY_S
        if record.daemon_id is not None and is_recent and record.failures == 0 and agent == known.agent:
            return record.daemon_id
        found = await self.ask_daemon_id(record.name)
        known.agent = agent
        return found

    async def ask_daemon_id(self, node: str) -> str:
        """Which daemon answers at this moment.

        Raises:
            NodeUnreachable, GpuhubError.
        """
        info: Mapping[str, Any] = await self._ask(node, lambda client: client.info())
        self._of(node).asked_at = self._clock.monotonic()
        return str(info["ID"])

    async def parse(self, node: str, listed: Sequence[Mapping[str, Any]]) -> tuple[Container, ...]:
        """The listed containers, with the GPUs they were made with where the daemon tells."""
        known = self._of(node)
        ids = [str(raw["Id"]) for raw in listed if _kind(raw) not in names.LEASELESS]
        known.devices = {one: known.devices[one] for one in ids if one in known.devices}
        missing = [one for one in ids if one not in known.devices]
        if missing and self._clock.monotonic() >= known.inspect_at:
            try:
                async with asyncio.timeout(LOOK_S):
                    for one in missing:
                        known.devices[one] = await self._inspect(node, one)
            except (TimeoutError, GpuhubError) as error:
                # A container on a dead file server hangs when it is inspected; the node itself answers.
                log.info("node %s: containers cannot be inspected at present: %s", node, error)
                known.inspect_at = self._clock.monotonic() + INSPECT_AGAIN_S
        return tuple(parse_container(raw, known.devices.get(str(raw["Id"]))) for raw in listed)

    async def read_agent(self, record: NodeRecord, listed: Sequence[Mapping[str, Any]]) -> NodeRecord:
        """The record with what the node's GPU agent last said; the agent is started where none runs.

        Raises:
            NodeUnreachable: the daemon stopped to answer.
        """
        known = self._of(record.name)
        if known.reading is None or _has_failed(known.reading):
            # A failure that no look waited for tells of a moment that is past.
            agent = next((raw for raw in listed if _is_agent(raw)), None)
            known.reading = asyncio.ensure_future(self._last_line(record.name, agent))
        done, _ = await asyncio.wait({known.reading}, timeout=LOOK_S)
        if not done:
            # Making a container may take long; the GPUs' last reading grows old meanwhile.
            return record
        reading, known.reading = known.reading, None
        try:
            began, line = reading.result()
        except NodeUnreachable:
            raise
        except GpuhubError as error:
            return readings.agent_failed(record, str(error))
        found = readings.parse_agent_line(line)
        return record if found is None else readings.agent_read(record, found, began)

    def agents(self, listed: Sequence[Mapping[str, Any]]) -> list[str]:
        """The listed containers that are GPU agents."""
        return [str(raw["Id"]) for raw in listed if _is_agent(raw)]

    async def _inspect(self, node: str, container: str) -> frozenset[str]:
        try:
            return parse_devices(await self._daemons.call(node, "inspect_container", container))
        except NotFound:
            return frozenset()

    async def _last_line(self, node: str, listed: Mapping[str, Any] | None) -> tuple[float, bytes]:
        agent = await ensure_agent(self._daemons, node, listed)
        began = self._clock.monotonic()
        return began, await read_last_line(self._daemons, node, agent)

    async def _ask(self, node: str, question: Callable[[Any], T]) -> T:
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._daemons.run(node, question)
        except TimeoutError:
            raise NodeUnreachable(f"node {node}: its Docker daemon did not answer within {LOOK_S:.0f} s") from None

    def _of(self, node: str) -> _Known:
        return self._known.setdefault(node, _Known())


def _has_failed(task: asyncio.Task[tuple[float, bytes]]) -> bool:
    return task.done() and task.exception() is not None


def _is_agent(raw: Mapping[str, Any]) -> bool:
    return _kind(raw) == names.KIND_AGENT


def _kind(raw: Mapping[str, Any]) -> str:
    return str((raw.get("Labels") or {}).get(names.LABEL_KIND, ""))
