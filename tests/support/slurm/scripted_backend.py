"""A real core and store with the Slurm backend on a scripted Slurm: tests decide when the backend polls."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuhub.backends.slurm.backend import SlurmBackend
from gpuhub.backends.slurm.scheduler import SlurmScheduler
from gpuhub.broker.controllers.backend_controller import BackendController, CoreHost
from gpuhub.broker.db.store import Store
from gpuhub.broker.operations.admin import AdminOperations
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import JobRequest, LeaseRequest, LeaseState
from gpuhub.common import gpu
from gpuhub.common.errors import NotAllowed
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import Identity, LeaseRow
from gpuhub.nodes.inventory import GpuReading, NodeStatus, build_inventory
from gpuhub.slurm_client.interface import SlurmClient
from gpuhub.slurm_client.models import Submitter
from tests.support.broker.in_process import StubHub
from tests.support.docker.simulated_nodes import CLOSET, build_cluster
from tests.support.slurm.scripted_slurm import UIDS, ScriptedSlurm

INSTANCE = "ghtest"
_keys = itertools.count(1)


def slurm_cluster(cards: dict[str, list[tuple[str, int]]] = CLOSET, **parts: Any) -> ClusterSettings:
    """Return the practice closet's settings with Slurm as the backend."""
    return build_cluster(cards, engine="slurm", **parts)


async def find_submitter(owner: str) -> Submitter:
    """Return the Slurm account of ada, ben or eve."""
    if owner not in UIDS:
        raise NotAllowed(f"user {owner!r} has no account on the head node")
    return Submitter(name=owner, uid=UIDS[owner], gid=UIDS[owner])


def build_backend(cluster: ClusterSettings, slurm: SlurmClient) -> SlurmBackend:
    """Build the backend on this Slurm, for the users that have accounts."""
    return SlurmBackend(cluster, slurm, instance=INSTANCE, find_submitter=find_submitter)


@dataclass(slots=True)
class BrokerHarness:
    """One broker process, called as users and the node controller would."""

    core: BrokerState
    backend: SlurmBackend
    controller: BackendController
    broker: BrokerOperations
    admin: AdminOperations

    @property
    def scheduler(self) -> SlurmScheduler:
        """The scheduler that grants leases."""
        return self.backend.scheduler

    async def request_lease(self, owner: str = "ada", profile: str = "rtx5090", **parts: Any) -> LeaseRow:
        """Request a notebook's lease for a new server."""
        key = f"key-{next(_keys)}"
        parts.setdefault("server", key)
        made = await self.broker.request_lease(Identity(name=owner), LeaseRequest(profile=profile, key=key, **parts))
        return self.lease(made.id)

    async def launch(self, owner: str = "ada", **parts: Any) -> LeaseRow:
        """Request a job's lease."""
        run = f"run-{next(_keys):06}"
        made = await self.broker.request_job(Identity(name=owner), JobRequest(run_id=run, **parts))
        return self.lease(made.lease.id)

    def lease(self, lease_id: str) -> LeaseRow:
        """Return the lease's current state, ended or not."""
        found = self.core.ledger.snapshot.leases.get(lease_id) or self.core.store.get_lease(lease_id)
        assert found is not None
        return found

    def state(self, lease_id: str) -> LeaseState:
        """Return the lease's state."""
        return self.lease(lease_id).state

    async def submit_and_grant(self, lease: LeaseRow, slurm: ScriptedSlurm) -> LeaseRow:
        """Submit, start and grant the lease."""
        await self.controller.step()
        slurm.start(self.lease(lease.id).slurm_job)
        await self.controller.step()
        return self.lease(lease.id)

    async def prove_gone(self, lease_id: str) -> None:
        """Report that the nodes list no container of the lease."""
        for node in self.lease(lease_id).nodes:
            await self.core.ledger.change(mutations.prove_released([lease_id], node))


@dataclass(slots=True)
class BrokerEnvironment:
    """The parts that outlive brokers."""

    folder: Path
    cluster: ClusterSettings = field(default_factory=slurm_cluster)
    cards: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: dict(CLOSET))
    slurm: ScriptedSlurm = field(default_factory=ScriptedSlurm)
    clock: Clock = field(default_factory=Clock)

    async def start(self, store: Store | None = None) -> BrokerHarness:
        """Start a broker on the existing store, without its controllers, on probed nodes."""
        backend = build_backend(self.cluster, self.slurm)
        store = store or Store.open_file(self.folder / "broker.sqlite")
        inventory = build_inventory(self.cluster, {})
        core = BrokerState(
            cluster=self.cluster, store=store, scheduler=backend.scheduler, inventory=inventory, clock=self.clock
        )
        await backend.setup(CoreHost(core))
        await core.start()
        harness = BrokerHarness(
            core,
            backend,
            BackendController(core, backend),
            BrokerOperations(core, backend, StubHub()),
            AdminOperations(core, backend),
        )
        for node in self.cluster.nodes:
            await core.observe(self.record(node.name))
        return harness

    def record(self, name: str, **changes: Any) -> NodeStatus:
        """Return the record of a node that answers."""
        return NodeStatus(
            name=name,
            is_up=True,
            is_reconciled=True,
            daemon_id=f"daemon-{name}",
            boot_id=f"boot-{name}",
            driver="580.95.05",
            gpus=tuple(
                GpuReading(uuid=f"GPU-{name}-{index}", index=index, model=gpu.shorten_model(model), memory_mib=mib)
                for index, (model, mib) in enumerate(self.cards[name])
            ),
            has_readings=True,
            read_at=self.clock.monotonic(),
        ).evolve(**changes)

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[BrokerHarness]:
        """Yield a broker and stop it afterwards."""
        harness = await self.start()
        try:
            yield harness
        finally:
            await self.stop(harness)

    async def stop(self, harness: BrokerHarness) -> None:
        """Stop the broker."""
        await harness.core.close()
        harness.core.store.close()
