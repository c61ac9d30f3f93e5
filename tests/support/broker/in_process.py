"""A real broker on simulated nodes: in this process over ASGI, or in a thread with a port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.api.auth import ADMIN_SCOPE
from gpuhub.broker.api.dependencies import PREFIX
from gpuhub.broker.api.server import build_server_config
from gpuhub.broker.app import create_app
from gpuhub.broker.controllers.nodes.node_probe import EnsureFirewall
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.errors import HubUnreachable
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, NodeUnreachable, NotFound
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.containers.user_containers import CourierSpec, WorkerSpec
from gpuhub.domain.clock import Clock
from tests.support.docker.simulated_nodes import (
    SimulatedDaemons,
    SimulatedNode,
    build_cluster,
    simulated_nodes,
    wait_until,
)

API = f"{PREFIX}/api/v1"
ACCESS = "access:services!service=broker"
#: Of the keys with which jobs reach services.
JOB_SECRET = "secret of the tests"


@dataclass(slots=True)
class StubHub:
    """A hub where the token `name` belongs to that user, and further tokens are in `models`."""

    models: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)
    is_down: bool = False
    started: list[tuple[str, str, str]] = field(default_factory=list)
    stopped: list[tuple[str, str]] = field(default_factory=list)
    #: The options of each server's last start, by owner and name.
    options: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    checked: int = 0
    unknown_users: set[str] = field(default_factory=set)

    async def fetch_token_model(self, token: str) -> Mapping[str, Any] | None:
        self.checked += 1
        if self.is_down:
            raise HubUnreachable("the hub does not answer; try again in a moment")
        if token in self.models:
            return self.models[token]
        if token == "root":
            return {"kind": "user", "name": "root", "admin": True, "scopes": [ACCESS, ADMIN_SCOPE]}
        if token == "spawner":
            return {"kind": "service", "name": "gpuhub-spawner", "scopes": ["custom:gpuhub:any-owner", ACCESS]}
        if token == "narrow":
            return {"kind": "user", "name": "ada", "admin": False, "scopes": ["users:activity!user"]}
        if token == "unknown":
            return None
        return {"kind": "user", "name": token, "admin": False, "scopes": [ACCESS]}

    async def start_server(self, owner: str, server: str, options: Mapping[str, str]) -> None:
        if self.is_down:
            raise HubUnreachable("down")
        if owner in self.unknown_users:
            raise NotFound(f"the hub has no user {owner!r}")
        self.started.append((owner, server, options["profile"]))
        self.options[owner, server] = dict(options)

    async def stop_server(self, owner: str, server: str) -> None:
        self.stopped.append((owner, server))

    async def has_user(self, name: str) -> bool:
        return name not in self.unknown_users

    async def close(self) -> None:
        return


@dataclass(slots=True)
class Workers:
    """Starts workers on simulated nodes; `failing` has error texts by node, `held` delays starts until it is set.

    The next start on each node in `lost_answers` succeeds, and its answer is lost.
    """

    nodes: dict[str, SimulatedNode]
    failing: dict[str, str] = field(default_factory=dict)
    lost_answers: set[str] = field(default_factory=set)
    specs: list[WorkerSpec] = field(default_factory=list)
    held: asyncio.Event | None = None

    async def __call__(self, spec: WorkerSpec) -> str:
        self.specs.append(spec)
        if self.held is not None:
            await self.held.wait()
        if spec.node in self.failing:
            raise GpuhubError(self.failing[spec.node])
        if not self.nodes[spec.node].is_reachable:
            raise NodeUnreachable(f"node {spec.node}: its Docker daemon does not answer in time")
        if spec.before_start is not None:
            await spec.before_start()
        node = self.nodes[spec.node]
        container = node.run_container(
            {
                names.LABEL_KIND: names.KIND_WORKER,
                names.LABEL_LEASE: spec.lease_id,
                names.LABEL_EPOCH: str(spec.epoch),
                names.LABEL_OWNER: spec.owner,
                names.LABEL_JOB: spec.job_id,
                names.LABEL_WORKER: str(spec.index),
                **({} if spec.slurm_job is None else {names.LABEL_SLURM_JOB: str(spec.slurm_job)}),
                "uuids": ",".join(spec.gpu_uuids),
            },
            name=names.worker_container_name(spec.instance, spec.job_id, spec.index),
            state="running" if spec.fill_home is None else "created",
        )
        if spec.fill_home is not None:
            await spec.fill_home(container)
            node.containers[container]["State"] = "running"
        if spec.node in self.lost_answers:
            self.lost_answers.remove(spec.node)
            raise NodeUnreachable(f"node {spec.node}: its Docker daemon does not answer in time")
        return container


@dataclass(slots=True)
class Couriers:
    """Starts couriers on simulated nodes; `failing` has errors by node."""

    nodes: dict[str, SimulatedNode]
    failing: dict[str, GpuhubError] = field(default_factory=dict)
    specs: list[CourierSpec] = field(default_factory=list)

    async def __call__(self, spec: CourierSpec) -> str:
        self.specs.append(spec)
        if spec.node in self.failing:
            raise self.failing[spec.node]
        return self.nodes[spec.node].run_container(
            {names.LABEL_KIND: names.KIND_COURIER, names.LABEL_OWNER: spec.owner},
            name=names.courier_container_name("ghtest", spec.owner),
        )


@dataclass(slots=True)
class Setting:
    """The environment of a broker, which outlives its restarts."""

    folder: Path
    cluster: ClusterSettings = field(default_factory=build_cluster)
    nodes: dict[str, SimulatedNode] = field(default_factory=simulated_nodes)
    hub: StubHub = field(default_factory=StubHub)
    own_token: str = "own-token"
    spawner_token: str = ""
    metrics_token: str = ""
    clock: Clock | None = None
    couriers: Couriers = field(init=False)
    #: None: nodes have no packet filter and need none.
    ensure_filter: EnsureFirewall | None = None
    #: The head node's free disk space and the ends of certificates, for metrics.
    read_head_free: Callable[[], int] | None = None
    read_certificate_ends: Callable[[], Mapping[str, float]] | None = None
    #: Builds a backend in place of the builtin one, for each start of the broker.
    build_backend: Callable[[ClusterSettings], SchedulingBackend] | None = None

    def __post_init__(self) -> None:
        self.couriers = Couriers(self.nodes)
        for node in self.nodes.values():
            node.homes = self.folder / "homes"

    @property
    def stopped_nodes(self) -> Path:
        """The file of nodes that `gpuhub down` has stopped."""
        return self.folder / "stopped-nodes.json"

    @property
    def bench_file(self) -> Path:
        """What `gpuhub bench` measured."""
        return self.folder / "bench.json"

    def home(self, owner: str) -> Path:
        """Return a user's home, which is the same on every node."""
        home = self.folder / "homes" / owner
        home.mkdir(parents=True, exist_ok=True)
        return home

    def build(self, store: Store, workers: Workers) -> FastAPI:
        """Build the application."""
        return create_app(
            cluster=self.cluster,
            store=store,
            daemons=SimulatedDaemons(self.cluster.nodes, self.nodes, self.folder),
            hub=self.hub,
            start_worker=workers,
            start_courier=self.couriers,
            destination_key="key of the tests",
            job_secret=JOB_SECRET,
            ensure_filter=self.ensure_filter,
            backend=None if self.build_backend is None else self.build_backend(self.cluster),
            stopped_nodes=self.stopped_nodes,
            bench_file=self.bench_file,
            own_token=self.own_token,
            spawner_token=self.spawner_token,
            metrics_token=self.metrics_token,
            read_head_free=self.read_head_free,
            read_certificate_ends=self.read_certificate_ends,
            clock=self.clock,
        )


@dataclass(slots=True)
class Running:
    """A running broker."""

    setting: Setting
    app: FastAPI
    store: Store
    workers: Workers
    #: The ASGI transport of the broker; None if it has a `url`.
    transport: httpx.AsyncBaseTransport | None = None
    url: str = f"http://broker{PREFIX}"

    @property
    def core(self) -> BrokerState:
        """The broker's core."""
        core: BrokerState = self.app.state.core
        return core

    def client(self, token: str | None) -> httpx.AsyncClient:
        """Return a client that sends the token."""
        headers = {} if token is None else {"Authorization": f"token {token}"}
        return httpx.AsyncClient(
            transport=self.transport, base_url=self.url, headers=headers, timeout=30, trust_env=False
        )

    def send(self, method: str, path: str, token: str | None = "ada", **arguments: Any) -> httpx.Response:
        """Send one request from outside an event loop, to a broker in a thread."""
        headers = {} if token is None else {"Authorization": f"token {token}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False) as client:
            return client.request(method, path, **arguments)


@contextmanager
def held_writes(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Changes]]:
    """Hold every change of the ledger where it is being written to the store, until the end of the block.

    Yields a list to which held changes are added.
    """
    save, is_released = running.store.save, threading.Event()
    held: list[Changes] = []

    def save_later(changes: Changes) -> None:
        held.append(changes)
        assert is_released.wait(30)
        save(changes)

    with monkeypatch.context() as patch:
        patch.setattr(running.store, "save", save_later)
        try:
            yield held
        finally:
            is_released.set()


def are_read(app: FastAPI) -> bool:
    """Return whether the GPUs of every reachable node have been read."""
    core: BrokerState = app.state.core
    monotonic = core.clock.monotonic()
    return all(
        node.is_up and (node.is_fresh(monotonic) or node.gpu_error is not None)
        for node in core.capacity.inventory.nodes.values()
    )


@asynccontextmanager
async def asgi_broker(setting: Setting, *, wait: bool = True) -> AsyncIterator[Running]:
    """Run the broker in this event loop, with its controllers."""
    store = Store.open_file(setting.folder / "broker.sqlite")
    workers = Workers(setting.nodes)
    app = setting.build(store, workers)
    try:
        async with app.router.lifespan_context(app):
            if wait:
                await until(lambda: are_read(app), "the nodes' GPUs are read")
            # Unexpected errors become responses as in the server, and are not raised in the test.
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            yield Running(setting, app, store, workers, transport)
    finally:
        store.close()


@contextmanager
def served_broker(setting: Setting, *, wait: bool = True, port: int = 0, loop: Any = "auto") -> Iterator[Running]:
    """Run the broker in a thread with a port on loopback, as in production; `loop` is as Uvicorn's `--loop`."""
    store = Store.open_file(setting.folder / "broker.sqlite")
    workers = Workers(setting.nodes)
    app = setting.build(store, workers)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        server = uvicorn.Server(build_server_config(app, lifespan="on", loop=loop))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="broker")
        thread.start()
        try:
            wait_until(lambda: server.started, "the broker listens")
            if wait:
                wait_until(lambda: are_read(app), "the nodes' GPUs are read")
            yield Running(setting, app, store, workers, None, f"http://127.0.0.1:{listening.getsockname()[1]}{PREFIX}")
        finally:
            server.should_exit = True
            thread.join(15)
            store.close()
    assert not thread.is_alive()


async def list_event_texts(running: Running, kind: str) -> list[str]:
    """Return the texts of all events of a kind."""
    return [event.text for event in await running.core.read_events(None, 1000, None) if event.kind == kind]


async def until(condition: Any, what: str, deadline_s: float = 30.0) -> Any:
    """Return the condition's value as soon as it is true; the condition may be async."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while (waited_s := loop.time() - began) < deadline_s:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        # With growing intervals: the broker refuses clients that poll too often.
        await asyncio.sleep(min(0.01 + waited_s / 20, 0.1))
    raise AssertionError(f"not within {deadline_s} s: {what}")
