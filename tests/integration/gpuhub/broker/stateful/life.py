"""The parts of a world next to its machines: a broker process, its store, the hub, and a worker's container."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from gpuhub.broker.db.store import Store
from gpuhub.common import names
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_lifecycle import ensure_created
from gpuhub.docker.containers.user_containers import WorkerSpec
from tests.integration.gpuhub.broker.stateful.boxes import UUIDS, Killed
from tests.integration.gpuhub.broker.stateful.virtual import VirtualLoop


@dataclass(slots=True)
class BrokerProcess:
    """One process of the broker, from start to death."""

    loop: VirtualLoop
    is_dead: bool = False
    #: The number of external steps until it dies; None for never.
    steps_left: int | None = None
    store: Store | None = None
    app: FastAPI | None = None
    running: AbstractAsyncContextManager[Any] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def gate(self) -> None:
        """Count an external step; raise when the process is dead."""
        if not self.is_dead and self.steps_left is not None:
            self.steps_left -= 1
            self.is_dead = self.steps_left < 0
            if self.is_dead:
                self.ended.set()
        if self.is_dead:
            raise Killed


class GatedStore:
    """The store of a process that may die before or after each call."""

    def __init__(self, store: Store, life: BrokerProcess) -> None:
        self._store = store
        self._life = life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._life.gate()
            result = found(*args, **kwargs)
            self._life.gate()
            return result

        return call


@dataclass(slots=True)
class ModelHub:
    """Requests of the broker to the hub, executed between two steps as by another process."""

    stops: list[tuple[str, str]] = field(default_factory=list)
    starts: list[tuple[str, str, str]] = field(default_factory=list)

    async def fetch_token_model(self, token: str) -> Mapping[str, Any] | None:
        return {"kind": "user", "name": token, "admin": False, "scopes": []}

    async def start_server(self, owner: str, server: str, options: Mapping[str, str]) -> None:
        self.starts.append((owner, server, options["profile"]))

    async def stop_server(self, owner: str, server: str) -> None:
        self.stops.append((owner, server))

    async def close(self) -> None:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpecStub:
    """The part of a container's specification that `ensure_created` needs."""

    name: str
    labels: dict[str, str]

    def create(self, client: Any) -> str:
        """Create the container without starting it."""
        made = client.create_container(image="gpuhub/notebook:latest", name=self.name, labels=self.labels)
        return str(made["Id"])


async def start_container(daemons: DockerClients, spec: WorkerSpec) -> str:
    """Start a worker's container by the product's own steps, without the user's network and account."""
    made = ContainerSpecStub(
        name=names.worker_container_name(spec.instance, spec.job_id, spec.index),
        labels={
            names.LABEL_INSTANCE: spec.instance,
            names.LABEL_KIND: names.KIND_WORKER,
            names.LABEL_LEASE: spec.lease_id,
            names.LABEL_EPOCH: str(spec.epoch),
            names.LABEL_OWNER: spec.owner,
            names.LABEL_JOB: spec.job_id,
            names.LABEL_WORKER: str(spec.index),
            UUIDS: ",".join(spec.gpu_uuids),
            **({} if spec.slurm_job is None else {names.LABEL_SLURM_JOB: str(spec.slurm_job)}),
        },
    )
    container = await ensure_created(daemons, spec.node, made, adopt=True)  # type: ignore[arg-type]
    if not container.is_running:
        if spec.before_start is not None:
            await spec.before_start()
        await daemons.call(spec.node, "start", container.id)
    return container.id
