"""Machines with their physical state, which their Docker daemons may misreport, and the faults that tests inject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, NodeUnreachable
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import CallKind, DockerClients
from tests.integration.gpuhub.broker.stateful.virtual import VirtualLoop
from tests.support.docker.simulated_nodes import SimulatedClient, SimulatedNode

T = TypeVar("T")
#: docker-py's limit for one call, seconds.
CALL_LIMIT_S = 10.0
#: A label on simulated containers: their GPUs, separated by `,`.
UUIDS = "uuids"


class Killed(BaseException):
    """The broker's process is dead, so this step does not happen."""


class Link(Enum):
    """The connection from the head node to a machine's daemon."""

    UP = "up"
    #: Requests are refused at once.
    DOWN = "down"
    #: Requests get no response; they are executed when the daemon continues.
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Running:
    """A container whose processes really run."""

    id: str
    lease: str
    kind: str
    worker: str
    epoch: str
    uuids: tuple[str, ...]


@dataclass(slots=True)
class Box:
    """One machine: its daemon, and what its kernel runs."""

    node: SimulatedNode
    link: Link = Link.UP
    #: Running containers that the daemon has forgotten, because its data was wiped.
    ghosts: list[dict[str, Any]] = field(default_factory=list)
    #: Requests received while the daemon hung.
    backlog: list[Callable[[], None]] = field(default_factory=list)
    #: Whether the daemon was wiped since the machine's start.
    is_wiped: bool = False
    missing: list[tuple[str, int]] = field(default_factory=list)
    _turn: int = 0

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    def running(self) -> Iterator[Running]:
        """Yield every container with GPUs or a lease that really runs, whether or not the daemon knows it."""
        listed = [found for found in self.node.containers.values() if found["State"] in {"running", "paused"}]
        for found in (*listed, *self.ghosts):
            labels = found["Labels"]
            if labels.get(names.LABEL_KIND) in {names.KIND_NOTEBOOK, names.KIND_WORKER}:
                yield Running(
                    id=found["Id"],
                    lease=labels.get(names.LABEL_LEASE, ""),
                    kind=labels[names.LABEL_KIND],
                    worker=labels.get(names.LABEL_WORKER, ""),
                    epoch=labels.get(names.LABEL_EPOCH, ""),
                    # A suspended one has nothing on its GPU, and cannot start there.
                    uuids=()
                    if found["Id"] in self.node.moved
                    else tuple(uuid for uuid in labels.get(UUIDS, "").split(",") if uuid),
                )

    def heal_link(self) -> None:
        """Restore the link; requests received in the meantime are executed first."""
        self.link = Link.UP
        todo, self.backlog = self.backlog, []
        for effect in todo:
            effect()

    def reboot(self) -> None:
        """Power off until the link heals: a new boot id, nothing runs any more, and the daemon still lists its
        containers.
        """
        self._turn += 1
        self.link = Link.DOWN
        self.ghosts.clear()
        self.backlog.clear()
        self.node.moved.clear()
        self.node.processes.clear()
        self.node.used_mib.clear()
        self.is_wiped = False
        self.node.boot_id = f"boot-{self.name}-{self._turn}"
        for found in self.node.containers.values():
            if found["State"] != "created":
                found.update(State="exited", ExitCode=137)

    def wipe(self) -> None:
        """Restart the daemon with empty data and a new id; the machine was never down, so its containers still run."""
        self._turn += 1
        self.is_wiped = True
        self.backlog.clear()
        self.node.daemon_id = f"daemon-{self.name}-{self._turn}"
        for found in list(self.node.containers.values()):
            if found["State"] == "running" and found["Labels"].get(names.LABEL_KIND) != names.KIND_AGENT:
                self.ghosts.append(found)
        self.node.containers.clear()

    def lose_gpu(self) -> None:
        """Let the last GPU fall off the bus."""
        if len(self.node.cards) > 1:
            self.missing.append(self.node.cards.pop())

    def restore_gpus(self) -> None:
        """Restore all GPUs."""
        while self.missing:
            self.node.cards.append(self.missing.pop())


class BoxClient(SimulatedClient):
    """The simulated client, with the further methods that adopting and naming a container need."""

    def inspect_container(self, container: str) -> dict[str, Any]:
        found = self._named(container) or self._find(container)
        state = {key: found[key] for key in ("ExitCode", "OOMKilled")} | {"Running": found["State"] == "running"}
        return {"Id": found["Id"], "State": state, "Config": {"Labels": dict(found["Labels"])}}

    def _named(self, name: str) -> dict[str, Any] | None:
        return next((found for found in self._node.containers.values() if f"/{name}" in found["Names"]), None)


class BoxDaemons(DockerClients):
    """The daemons as seen by one process. It passes `gate` before and after each step, which stops dead processes."""

    def __init__(
        self, cluster: ClusterSettings, boxes: dict[str, Box], folder: Path, loop: VirtualLoop, gate: Callable[[], None]
    ) -> None:
        super().__init__(cluster.nodes, instance="ghtest", run_dir=folder)
        self._boxes = boxes
        self._virtual = loop
        self._gate = gate

    async def run(self, node: str, work: Callable[[Any], T], *, kind: CallKind = CallKind.SHORT) -> T:
        self._gate()
        answer: asyncio.Future[T] = self._virtual.create_future()
        # In another task: a sent request is executed even if its sender dies.
        self._virtual.call_later(self._virtual.latency(), self._arrive, self._boxes[node], work, answer)
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                result = await answer
        except TimeoutError:
            raise NodeUnreachable(f"node {node}: its Docker daemon does not answer in time") from None
        self._gate()
        return result

    def _arrive(self, box: Box, work: Callable[[Any], T], answer: asyncio.Future[T]) -> None:
        if box.link is Link.DOWN:
            self._answer(answer, NodeUnreachable(f"node {box.name}: its Docker daemon cannot be reached"))
        elif box.link is Link.HUNG:
            box.backlog.append(partial(self._carry_out, box, work, answer))
        else:
            self._carry_out(box, work, answer)

    def _carry_out(self, box: Box, work: Callable[[Any], T], answer: asyncio.Future[T]) -> None:
        try:
            result: Any = work(BoxClient(box.node))
        except GpuhubError as error:
            result = error
        if box.link is Link.DOWN:
            result = NodeUnreachable(f"node {box.name}: the answer was lost")
        self._virtual.call_later(self._virtual.latency(), self._answer, answer, result)

    def _answer(self, answer: asyncio.Future[T], result: Any) -> None:
        if answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
