"""The real broker on a real SQLite file and simulated machines, with users, a hub, and kills.

Other actors run, and the broker can die, at every await of the broker: its external steps (calls to daemons, commits) take
virtual time, and `World.die_after` kills it between any two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fastapi import FastAPI

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.backends.slurm.backend import SlurmBackend
from gpuhub.broker.app import create_app
from gpuhub.broker.db.store import Store
from gpuhub.broker.operations.admin import AdminOperations
from gpuhub.broker.operations.cluster import ClusterOperations
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common.errors import GpuhubError
from gpuhub.config.settings import (
    CircuitSettings,
    ClusterSettings,
    IdleSettings,
    ProfileSettings,
    SchedulingSettings,
    UserSettings,
)
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.user_containers import CourierSpec, WorkerSpec
from gpuhub.domain import models
from gpuhub.domain.models import Identity
from tests.integration.gpuhub.broker.stateful.boxes import Box, BoxDaemons, Killed
from tests.integration.gpuhub.broker.stateful.life import BrokerProcess, GatedStore, ModelHub, start_container
from tests.integration.gpuhub.broker.stateful.slurm_system import SlurmSystem, find_submitter
from tests.integration.gpuhub.broker.stateful.virtual import EPOCH, VirtualClock, VirtualLoop
from tests.support.docker.simulated_nodes import build_cluster, simulated_nodes

CARDS = {
    "rig1": [("NVIDIA GeForce RTX 5090", 32607)] * 2,
    "rig2": [("NVIDIA GeForce RTX 5070", 12227)] * 2,
    "rig3": [("NVIDIA GeForce RTX 5060", 8151)],
}
PROFILES = (
    ProfileSettings(name="any", title="Any GPU"),
    ProfileSettings(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090"),
    ProfileSettings(name="half", title="Half a GPU", gpu_share=2),
    ProfileSettings(name="pair", title="Two GPUs", gpu_count=2),
    ProfileSettings(name="short", title="Any GPU, a minute", time_limit="1m"),
    ProfileSettings(name="cpu", title="No GPU", gpu_count=0),
)
SLURM_PROFILES = tuple(profile for profile in PROFILES if profile.gpu_share == 1)
#: Power limit of every GPU, watts, and a circuit that supplies three of the four GPUs of two nodes.
WATTS = 300
CIRCUIT = CircuitSettings(name="left", volts=120, amps=12.5, nodes=("rig1", "rig2"), enforce=True)
USERS = UserSettings(allowed=("ada", "ben", "cleo"), max_waiting=50)


def builtin_cluster() -> ClusterSettings:
    """Return settings with the builtin scheduler."""
    scheduling = SchedulingSettings(
        preemption=True, suspend_scavengers=True, preempt_grace="20s", quarantine_after="30s", down_after="60s"
    )
    idle = IdleSettings(suspend_after="30s")
    return build_cluster(CARDS, PROFILES, users=USERS, scheduling=scheduling, idle=idle)


def slurm_cluster() -> ClusterSettings:
    """Return settings with Slurm as the backend, which grants whole GPUs."""
    scheduling = SchedulingSettings(quarantine_after="30s", down_after="60s")
    return build_cluster(CARDS, SLURM_PROFILES, users=USERS, scheduling=scheduling, engine="slurm")


#: Settings by backend.
CLUSTERS = {"builtin": builtin_cluster, "slurm": slurm_cluster}
SPAWNER = Identity(name="gpuhub-spawner", is_user=False, any_owner=True)
ADMIN = Identity(name="root", is_admin=True)
#: The heartbeat interval of clients and spawners, seconds.
BEAT_S = 5.0


class NoResponse(Exception):
    """There is no response: the broker died or took too long."""


@dataclass(slots=True)
class World:
    """The whole system; `folder` is a new one."""

    folder: Path
    seed: int = 0
    cluster: ClusterSettings = field(default_factory=builtin_cluster)
    boxes: dict[str, Box] = field(init=False)
    loop: VirtualLoop = field(init=False)
    #: The offset of the head node's clock, seconds.
    skew: float = 0.0
    life: BrokerProcess = field(init=False)
    #: Present with Slurm as the backend.
    slurm: SlurmSystem | None = None
    hub: ModelHub = field(default_factory=ModelHub)
    #: The hub's clients of the daemons; the hub never dies here.
    hub_daemons: DockerClients = field(init=False)
    #: Jobs whose client still sends heartbeats, with their owners.
    attended: dict[str, str] = field(default_factory=dict)
    #: Calls that failed in an unexpected way.
    faults: list[str] = field(default_factory=list)
    _patch: Any = field(init=False)

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(self.seed)
        self.loop.set_exception_handler(self._note_fault)
        asyncio.set_event_loop(self.loop)
        self.boxes = {name: Box(node) for name, node in simulated_nodes(CARDS).items()}
        for box in self.boxes.values():
            box.node.power_limits = dict.fromkeys(range(len(box.node.cards)), WATTS)
        self.hub_daemons = BoxDaemons(self.cluster, self.boxes, self.folder, self.loop, lambda: None)
        self.life = BrokerProcess(self.loop, is_dead=True)
        if self.cluster.engine == "slurm":
            self.slurm = SlurmSystem(self.loop, self.boxes)

        # Ids are random: a repeated search needs the same ones.
        drawn = SimpleNamespace(token_hex=lambda size: f"{self.loop.chance.getrandbits(8 * size):0{2 * size}x}")
        self._patch = patch.object(models, "secrets", drawn)
        self._patch.start()

    @property
    def now(self) -> float:
        """Return the time of the head node's clock."""
        return EPOCH + self.loop.time() + self.skew

    # -- the broker's lives ---------------------------------------------------------------------------------------

    def start(self, steps: int | None = None) -> None:
        """Start a broker on the existing store; it may die within its first steps."""
        life = self.life = BrokerProcess(self.loop, steps_left=steps)
        life.store = Store.open_file(self.folder / "broker.sqlite")
        try:
            self._build(life, life.store)
        except Killed:
            self._bury()
            return
        life.running = self.app.router.lifespan_context(self.app)
        self._run(_wait_first(life.running.__aenter__(), life.ended.wait(), limit_s=30))
        if life.is_dead:
            self._bury()

    def _build(self, life: BrokerProcess, store: Store) -> None:
        daemons = BoxDaemons(self.cluster, self.boxes, self.folder, self.loop, life.gate)

        async def start_worker(spec: WorkerSpec) -> str:
            return await start_container(daemons, spec)

        async def no_courier(spec: CourierSpec) -> str:
            raise AssertionError(f"unexpected request for the courier of {spec.owner}")

        life.app = create_app(
            cluster=self.cluster,
            store=GatedStore(store, life),  # type: ignore[arg-type]
            daemons=daemons,
            hub=self.hub,
            start_worker=start_worker,
            start_courier=no_courier,
            destination_key="key of the tests",
            job_secret="secret of the tests",
            backend=self._build_backend(life),
            clock=VirtualClock(self.loop, lambda: self.skew),
        )

    def _build_backend(self, life: BrokerProcess) -> SchedulingBackend | None:
        if self.slurm is None:
            return None
        return SlurmBackend(
            self.cluster, self.slurm.client(life.gate), instance="ghtest", find_submitter=find_submitter
        )

    def kill(self) -> None:
        """Kill the broker as SIGKILL does: it has no further effect."""
        if self.life.store is not None:
            self.life.is_dead = True
            self._bury()

    def die_after(self, steps: int) -> None:
        """Let the broker die before the given external step, counted from now."""
        self.life.steps_left = steps

    @property
    def is_alive(self) -> bool:
        """Whether a broker runs."""
        return not self.life.is_dead

    @property
    def app(self) -> FastAPI:
        """The running broker's application."""
        assert self.life.app is not None
        return self.life.app

    @property
    def core(self) -> BrokerState:
        """The running broker's core."""
        core: BrokerState = self.app.state.core
        return core

    @property
    def cluster_operations(self) -> ClusterOperations:
        """The running broker's operations that show the cluster."""
        operations: ClusterOperations = self.app.state.cluster
        return operations

    @property
    def broker(self) -> BrokerOperations:
        """The running broker's operations on leases and jobs."""
        broker: BrokerOperations = self.app.state.broker
        return broker

    @property
    def admin(self) -> AdminOperations:
        """The running broker's operations for administrators."""
        admin: AdminOperations = self.app.state.admin
        return admin

    def close(self) -> None:
        """End everything."""
        self._patch.stop()
        self.kill()
        self.hub_daemons.close()
        self._run(self.loop.shutdown_asyncgens())
        self.loop.close()
        asyncio.set_event_loop(None)

    def _bury(self) -> None:
        async def cancel_all() -> None:
            for _ in range(3):
                others = asyncio.all_tasks() - {asyncio.current_task()}
                for task in others:
                    task.cancel()
                if others:
                    await asyncio.wait(others, timeout=5)

        async def leave() -> None:
            # This has no external effect, because a dead process passes no gate. It only ends tasks that wait for each other.
            with suppress(Killed):
                await self.life.running.__aexit__(None, None, None)  # type: ignore[union-attr]

        self._run(cancel_all())
        if self.life.running is not None:
            self._run(_wait_first(leave(), limit_s=30))
            self._run(cancel_all())
            self.life.running = None
        if self.life.store is not None:
            self.life.store.close()
            self.life.store = None

    # -- time and calls -------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass; waiting clients and spawners send heartbeats, and the hub does what it was asked to."""
        end = self.loop.time() + seconds
        while (left := end - self.loop.time()) > 0:
            self._run(_wait_first(asyncio.sleep(min(left, BEAT_S)), self.life.ended.wait(), limit_s=BEAT_S))
            if self.life.is_dead:
                self._bury()
                self._run(asyncio.sleep(left))
                return
            self._beat()

    def call(self, made: Coroutine[Any, Any, Any]) -> Any:
        """Send a client's request to the running broker.

        Raises:
            GpuhubError: The broker's error response.
            NoResponse: There is no response; the request may have been executed.
        """
        task = self.loop.create_task(made)
        self._run(_wait_first(_wait_ignoring_result(task), self.life.ended.wait(), limit_s=60))
        if self.life.is_dead:
            self._bury()
        if not task.done() or task.cancelled() or isinstance(task.exception(), Killed):
            task.cancel()
            raise NoResponse
        return task.result()

    def try_call(self, made: Coroutine[Any, Any, Any]) -> Any:
        """Send a request as `call` does; return None for a refusal or a lost response."""
        try:
            return self.call(made)
        except (GpuhubError, NoResponse):
            return None

    def outside(self, made: Coroutine[Any, Any, Any]) -> Any:
        """Run work of another process on the daemons; return None if it fails."""

        async def guarded() -> Any:
            try:
                return await made
            except GpuhubError:
                return None

        result = self._run(guarded())
        if self.life.is_dead and self.life.store is not None:
            self._bury()
        return result

    def _beat(self) -> None:
        for job, owner in list(self.attended.items()):
            if self.is_alive:
                self.try_call(self.broker.renew(Identity(name=owner), job))

    def _run(self, made: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(made)

    def _note_fault(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):
            self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")


async def _wait_first(*made: Coroutine[Any, Any, Any], limit_s: float) -> None:
    """Wait until one of them is done."""
    tasks = [asyncio.ensure_future(one) for one in made]
    await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _wait_ignoring_result(task: asyncio.Task[Any]) -> None:
    """Wait until it is done, and ignore its result."""
    await asyncio.wait([task])
