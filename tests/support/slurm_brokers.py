"""A real core, store and Slurm queue on a scripted Slurm: a test says when the queue looks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuhub import gpus
from gpuhub.broker.auth import Identity
from gpuhub.broker.clock import Clock
from gpuhub.broker.core import Core
from gpuhub.broker.gpu_time import GpuTimes
from gpuhub.broker.rows import LeaseRow
from gpuhub.broker.schemas import JobRequest, LeaseRequest, LeaseState
from gpuhub.broker.slurm_queue import SlurmQueue
from gpuhub.broker.slurm_service import SlurmBroker
from gpuhub.broker.slurm_submitting import build_engine
from gpuhub.broker.store import Store
from gpuhub.engines.slurm import SlurmEngine
from gpuhub.errors import NotAllowed
from gpuhub.nodes.inventory import GpuReading, NodeRecord, start_inventory
from gpuhub.settings import Cluster
from gpuhub.slurm.values import Submitter
from tests.support.scripted_slurm import UIDS, ScriptedSlurm
from tests.support.simulated import CLOSET, build_cluster

INSTANCE = "ghtest"
_keys = itertools.count(1)


def slurm_cluster(cards: dict[str, list[tuple[str, int]]] = CLOSET, **parts: Any) -> Cluster:
    """The practice closet's settings, with Slurm as the engine."""
    return build_cluster(cards, engine="slurm", **parts)


async def find_submitter(owner: str) -> Submitter:
    """ada, ben and eve have accounts."""
    if owner not in UIDS:
        raise NotAllowed(f"user {owner!r} has no account on the head node")
    return Submitter(name=owner, uid=UIDS[owner], gid=UIDS[owner])


@dataclass(slots=True)
class Desk:
    """One life of a broker, asked as users and the keeper would."""

    core: Core
    engine: SlurmEngine
    queue: SlurmQueue
    broker: SlurmBroker

    async def ask(self, owner: str = "ada", profile: str = "rtx5090", **parts: Any) -> LeaseRow:
        """A notebook's lease, for a server of its own."""
        key = f"key-{next(_keys)}"
        parts.setdefault("server", key)
        made = await self.broker.request_lease(Identity(name=owner), LeaseRequest(profile=profile, key=key, **parts))
        return self.lease(made.id)

    async def launch(self, owner: str = "ada", **parts: Any) -> LeaseRow:
        """A job's lease."""
        run = f"run-{next(_keys):06}"
        made = await self.broker.request_job(Identity(name=owner), JobRequest(run_id=run, **parts))
        return self.lease(made.lease.id)

    def lease(self, lease_id: str) -> LeaseRow:
        """As it is now, ended or not."""
        found = self.core.ledger.snapshot.leases.get(lease_id) or self.core.store.lease(lease_id)
        assert found is not None
        return found

    def state(self, lease_id: str) -> LeaseState:
        """Its state."""
        return self.lease(lease_id).state

    async def settle(self, lease: LeaseRow, slurm: ScriptedSlurm) -> LeaseRow:
        """Submit it, start it, grant it."""
        await self.queue.step()
        slurm.start(self.lease(lease.id).slurm_job)
        await self.queue.step()
        return self.lease(lease.id)

    async def prove_gone(self, lease_id: str) -> None:
        """The nodes show no container of it."""
        for node in self.lease(lease_id).nodes:
            await self.core.prove_gone([lease_id], node)


@dataclass(slots=True)
class Site:
    """What outlives brokers."""

    folder: Path
    cluster: Cluster = field(default_factory=slurm_cluster)
    cards: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: dict(CLOSET))
    slurm: ScriptedSlurm = field(default_factory=ScriptedSlurm)
    clock: Clock = field(default_factory=Clock)

    async def start(self, store: Store | None = None) -> Desk:
        """A broker on the store that is there, without its loops, on nodes that have been read."""
        engine = build_engine(self.cluster, INSTANCE)
        store = store or Store.open_file(self.folder / "broker.sqlite")
        inventory = start_inventory(self.cluster, {})
        core = Core(cluster=self.cluster, store=store, engine=engine, inventory=inventory, clock=self.clock)
        await core.take_up()
        queue = SlurmQueue(core, engine, self.slurm, instance=INSTANCE, find_submitter=find_submitter)
        desk = Desk(core, engine, queue, SlurmBroker(core, engine, queue, GpuTimes(self.slurm, self.clock)))
        for node in self.cluster.nodes:
            await core.observe(self.record(node.name))
        return desk

    def record(self, name: str, **changes: Any) -> NodeRecord:
        """A node that answers, as it was read."""
        return NodeRecord(
            name=name,
            is_up=True,
            is_settled=True,
            daemon_id=f"daemon-{name}",
            boot_id=f"boot-{name}",
            driver="580.95.05",
            gpus=tuple(
                GpuReading(uuid=f"GPU-{name}-{index}", index=index, model=gpus.short_model(model), memory_mib=mib)
                for index, (model, mib) in enumerate(self.cards[name])
            ),
            is_known=True,
            read_at=self.clock.monotonic(),
        ).evolve(**changes)

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[Desk]:
        """A broker, closed afterwards."""
        desk = await self.start()
        try:
            yield desk
        finally:
            await self.stop(desk)

    async def stop(self, desk: Desk) -> None:
        """The broker ends."""
        await desk.core.close()
        desk.core.store.close()
