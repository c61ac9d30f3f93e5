"""Known bugs, planted into the real code one at a time, are detected: a scenario that passes without one fails with it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers.nodes import node_controller
from gpuhub.broker.db.store import Store
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.broker.state.transaction import RowIndex
from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NodeUnreachable
from gpuhub.docker import client as daemons_module
from gpuhub.docker.client import DockerClients
from gpuhub.domain import lease_states, reconcile, suspension
from gpuhub.spawners.docker.spawner import GpuDockerSpawner
from tests.integration.gpuhub.broker.stateful import scenarios
from tests.integration.gpuhub.broker.stateful.people import People
from tests.integration.gpuhub.broker.stateful.world import CLUSTERS, World
from tests.support.docker.simulated_nodes import build_cluster

Patch = pytest.MonkeyPatch
Scenario = Callable[[World, People], None]


def treat_expiry_as_proof(patch: Patch) -> None:
    """The time limit is taken for a proof that nothing runs."""
    real = lease_states.release

    def release(lease: Any, reason: str, now: float) -> Any:
        ended = real(lease, reason, now)
        return _mark_released(ended, now) if lease_states.is_expired(lease, now) else ended

    patch.setattr(lease_states, "release", release)


def treat_hub_state_as_proof(patch: Patch) -> None:
    """A server that the hub reports as stopped is taken for gone."""
    real = lease_states.release
    patch.setattr(lease_states, "release", lambda lease, reason, now: _mark_released(real(lease, reason, now), now))


def treat_unreachable_node_as_empty(patch: Patch) -> None:
    """An unreachable node is taken for one that lists no containers."""
    real = node_controller.NodeProbe.list_containers

    async def list_containers(self: Any, node: str) -> Any:
        try:
            return await real(self, node)
        except NodeUnreachable:
            return []

    async def ask_daemon_id(self: Any, node: str) -> str:
        cache = self._cache_of(node)
        cache.daemon_asked_at = self._clock.monotonic()
        return f"daemon-{node}"

    async def daemon_id(self: Any, record: Any, listed: Any) -> str:
        return str(record.daemon_id or await ask_daemon_id(self, record.name))

    patch.setattr(node_controller.NodeProbe, "list_containers", list_containers)
    patch.setattr(node_controller.NodeProbe, "find_daemon_id", daemon_id)
    patch.setattr(node_controller, "relies_on_absence", lambda actions: False)


def trust_wiped_daemon(patch: Patch) -> None:
    """The list of any daemon is taken for a proof."""
    patch.setattr(reconcile, "explain_missing_proof", lambda lease, observed_node: None)


def accept_stale_epochs(patch: Patch) -> None:
    """The epoch on a container is not compared."""
    real = reconcile._explain_foreign

    def why_foreign(container: Any, node: str, lease: Any, job: Any) -> str | None:
        return real(container if lease is None else replace(container, epoch=lease.epoch), node, lease, job)

    patch.setattr(reconcile, "_explain_foreign", why_foreign)


def allow_duplicate_workers(patch: Patch) -> None:
    """The name of a worker's container does not prevent a second one."""
    real, count = names.worker_container_name, itertools.count()
    patch.setattr(names, "worker_container_name", lambda *of: f"{real(*of)}-{next(count)}")


def ignore_request_keys(patch: Patch) -> None:
    """A repeated request is taken for a new one."""
    real = RowIndex.find_one
    patch.setattr(RowIndex, "find_one", lambda self, *tag: None if tag[0] == "key" else real(self, *tag))
    patch.setattr(Store, "find_leases_by_key", lambda self, keys: {})


def treat_silence_as_stopped(patch: Patch) -> None:
    """A server that cannot be polled is taken for one that has stopped, as JupyterHub does at a restart."""

    async def poll(self: Any) -> int | None:
        try:
            found = await self.daemons.call(self.node, "inspect_container", self.object_id)
        except GpuhubError:
            return 0
        return None if found["State"]["Running"] else 0

    patch.setattr(GpuDockerSpawner, "poll", poll)


def store_changes_late(patch: Patch) -> None:
    """A change is stored only with the next change, after its response was sent."""
    real, waiting = Store.save, []

    def save(self: Store, changes: Any) -> None:
        if waiting:
            real(self, waiting.pop())
        waiting.append(changes)

    patch.setattr(Store, "save", save)


def ignore_unknown_containers(patch: Patch) -> None:
    """The reconciler ignores containers of unknown leases."""
    real = reconcile._explain_foreign
    patch.setattr(reconcile, "_explain_foreign", lambda one, node, lease, job: lease and real(one, node, lease, job))


def activate_ended_leases(patch: Patch) -> None:
    """A lease holder that slept past its lease's end may continue."""
    real = BrokerOperations.activate

    async def activate(self: BrokerOperations, who: Any, lease_id: str, activation: Any) -> Any:
        try:
            return await real(self, who, lease_id, activation)
        except Conflict:
            return await self.lease(who, lease_id)

    patch.setattr(BrokerOperations, "activate", activate)


def free_shrinking_gpus_at_once(patch: Patch) -> None:
    """GPUs of an elastic job are granted again as soon as it was asked to release them."""
    real = lease_states.shrink

    def shrink(lease: Any, nodes: Any, now: float) -> Any:
        told = real(lease, nodes, now)
        gpus = tuple(replace(gpu, released_at=now) if gpu.shrink_requested_at is not None else gpu for gpu in told.gpus)
        return told.evolve(gpus=gpus)

    patch.setattr(lease_states, "shrink", shrink)


def take_a_suspension_for_proof(patch: Patch) -> None:
    """The GPU of a job that is suspended is granted before its node has shown that it is empty."""
    real = suspension.begin_job

    def begin_job(lease: Any, memory_mib: int, now: float) -> Any:
        return suspension.prove(real(lease, memory_mib, now), memory_mib, now)

    patch.setattr(suspension, "begin_job", begin_job)


def _mark_released(lease: Any, now: float) -> Any:
    if lease.state is not LeaseState.RELEASING:
        return lease
    gpus = tuple(replace(gpu, released_at=now) for gpu in lease.gpus)
    return lease.evolve(state=LeaseState.RELEASED, gpus=gpus, released_at=now)


BUGS: list[tuple[Callable[[Patch], None], Scenario]] = [
    (treat_expiry_as_proof, scenarios.time_limit_expires_during_partition),
    (treat_hub_state_as_proof, scenarios.notebook_is_stopped_during_partition),
    (treat_unreachable_node_as_empty, scenarios.notebook_is_stopped_during_partition),
    (trust_wiped_daemon, scenarios.daemon_returns_with_empty_data),
    (accept_stale_epochs, scenarios.container_of_an_earlier_epoch_appears),
    (allow_duplicate_workers, scenarios.broker_dies_while_starting_workers),
    (ignore_request_keys, scenarios.request_is_repeated_after_its_lease_ended),
    (treat_silence_as_stopped, scenarios.hub_restarts_during_partition),
    (store_changes_late, scenarios.broker_dies_after_every_response),
    (ignore_unknown_containers, scenarios.container_of_an_ended_lease_appears),
    (activate_ended_leases, scenarios.holder_resumes_after_its_lease_was_reassigned),
    (free_shrinking_gpus_at_once, scenarios.elastic_job_shrinks),
    (take_a_suspension_for_proof, scenarios.broker_dies_while_a_job_makes_way),
]
SCENARIOS_WITHOUT_A_BUG: list[Scenario] = [
    scenarios.daemon_is_wiped_after_a_reboot,
    scenarios.clock_is_set_back_while_the_broker_is_down,
    scenarios.daemon_is_wiped_while_the_broker_is_down,
]


#: These run with the builtin scheduler only: Slurm's own preemption ends whole jobs.
BUILTIN_ONLY = {scenarios.elastic_job_shrinks, scenarios.broker_dies_while_a_job_makes_way}


def _backends_of(scenario: Scenario) -> list[str]:
    return ["builtin"] if scenario in BUILTIN_ONLY else sorted(CLUSTERS)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Everything is up, and every GPU is free; the parameter is the backend."""
    world = World(tmp_path, cluster=CLUSTERS[request.param]())
    world.start()
    world.advance(12)
    yield world
    world.close()


@pytest.mark.parametrize(
    ("world", "scenario"),
    [
        pytest.param(backend, scenario, id=f"{backend}-{scenario.__name__}")
        for scenario in [*dict.fromkeys(scenario for _, scenario in BUGS), *SCENARIOS_WITHOUT_A_BUG]
        for backend in _backends_of(scenario)
    ],
    indirect=["world"],
)
def test_scenario_passes_without_a_bug(world: World, scenario: Scenario) -> None:
    """The scenario passes with the unchanged product."""
    scenario(world, People(world))
    assert world.is_alive


@pytest.mark.parametrize(
    ("world", "trap", "scenario"),
    [
        pytest.param(backend, trap, scenario, id=f"{backend}-{trap.__name__}")
        for trap, scenario in BUGS
        for backend in _backends_of(scenario)
    ],
    indirect=["world"],
)
def test_scenario_fails_with_a_bug(
    world: World, trap: Callable[[Patch], None], scenario: Scenario, monkeypatch: Patch
) -> None:
    """The same scenario fails with one bug."""
    trap(monkeypatch)
    with pytest.raises(AssertionError):
        scenario(world, People(world))


class _HangingClient:
    """A daemon's client; the first node's client responds only when it is released."""

    def __init__(self, node: str, go_on: threading.Event) -> None:
        self._node = node
        self._go_on = go_on

    def info(self) -> dict[str, str]:
        if self._node == "rig1":
            self._go_on.wait(60)
        return {"ID": self._node}

    def close(self) -> None:
        return


async def _query_next_to_a_hung_node(folder: Path, patch: Patch, *, deadline_s: float) -> bool:
    """Return whether another node answers while the first one hangs."""
    go_on = threading.Event()
    patch.setattr(daemons_module, "_build_client", lambda node, _tunnel, _timeout: _HangingClient(node.name, go_on))
    daemons = DockerClients(build_cluster().nodes, instance="ghtest", run_dir=folder)
    hung = [asyncio.ensure_future(daemons.call("rig1", "info")) for _ in range(8)]
    try:
        await asyncio.sleep(0)  # the calls have begun
        async with asyncio.timeout(deadline_s):
            return bool(await daemons.call("rig2", "info") == {"ID": "rig2"})
    except TimeoutError:
        return False
    finally:
        go_on.set()
        await asyncio.gather(*hung)
        daemons.close()


async def test_hung_node_does_not_block_other_nodes(tmp_path: Path, monkeypatch: Patch) -> None:
    """While eight calls to one node hang, another node answers."""
    assert await _query_next_to_a_hung_node(tmp_path, monkeypatch, deadline_s=30)


async def test_scenario_fails_with_one_thread_for_all_nodes(tmp_path: Path, monkeypatch: Patch) -> None:
    """The same scenario fails with one thread for all nodes, as in DockerSpawner."""
    shared = ThreadPoolExecutor(1)
    monkeypatch.setattr(daemons_module, "ThreadPoolExecutor", lambda *_args, **_kwargs: shared)
    assert not await _query_next_to_a_hung_node(tmp_path, monkeypatch, deadline_s=3)
