"""Datasets that a lease's nodes get before its containers start: workers, notebooks and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpuhub.broker.files.dataset_stager import DatasetStager
from gpuhub.config.settings import ProfileSettings, StorageSettings
from gpuhub.docker.containers.staging_container import StagingFailed
from gpuhub.domain import reconcile
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import build_cluster

JOB = {"run_id": "run-000001", "nnodes": 2, "nproc_per_node": 1}
STORAGE = StorageSettings(datasets="/data", stage=("datasets/tokens",))


@dataclass(slots=True)
class Transfers:
    """In place of `DatasetStager.stage`, which needs real nodes; `held` delays its end."""

    held: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    error: str = ""

    async def __call__(
        self, datasets: Sequence[str], nodes: Sequence[str], report: Callable[[str], None] | None = None
    ) -> dict[str, str]:
        self.requests.append((tuple(datasets), tuple(nodes)))
        if report is not None:
            report("Copying datasets/a to rig1: 1 KiB of 2 KiB")
        await self.held.wait()
        if self.error:
            raise StagingFailed(self.error)
        return {dataset: f"volume-{dataset}" for dataset in datasets}


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    replacement = Transfers()

    async def stage(_self: Any, *arguments: Any) -> dict[str, str]:
        return await replacement(*arguments)

    monkeypatch.setattr(DatasetStager, "stage", stage)
    return replacement


async def test_workers_start_with_the_copies_of_their_nodes(setting: Setting, transfers: Transfers) -> None:
    """One request for all nodes of the job, with the datasets of the settings; no worker is created before its end."""
    setting.cluster = build_cluster(storage=STORAGE)
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {**JOB, "stage": ["datasets/a", "datasets/a/train"]}, 201)
        await until(lambda: transfers.requests, "the datasets are requested")
        ((datasets, nodes),) = transfers.requests
        assert datasets == ("datasets/a", "datasets/tokens")
        assert sorted(nodes) == sorted(job["lease"]["nodes"])
        assert running.workers.specs == []
        transfers.held.set()
        await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        staged = {name: f"volume-{name}" for name in datasets}
        assert [dict(spec.staged) for spec in running.workers.specs] == [staged, staged]


async def test_job_fails_with_the_reason_of_its_dataset(setting: Setting, transfers: Transfers) -> None:
    """Its owner reads it, and the GPUs are free again."""
    setting.cluster = build_cluster(storage=STORAGE)
    transfers.error = "datasets/a cannot be copied to the nodes' disks: a.bin (mode 0600) may not be read by all users"
    transfers.held.set()
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {**JOB, "stage": ["datasets/a"]}, 201)
        ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended", "ada")
        assert {worker["message"] for worker in ended["workers"]} == {transfers.error}
        assert running.workers.specs == []


async def test_request_needs_datasets_and_valid_names(setting: Setting, transfers: Transfers) -> None:
    """The text says what would be right; nothing is requested."""
    async with asgi_broker(setting) as running:
        refused = await post(running, "ada", "/jobs", {**JOB, "stage": ["datasets/a"]}, 422)
        assert refused["detail"].startswith("stage: this cluster has no datasets")
        for name in ("imagenet", "datasets", "datasets/", "datasets/../etc", "/datasets/a", "datasets/a b"):
            await post(running, "ada", "/jobs", {**JOB, "stage": [name]}, 422)
    assert transfers.requests == []


async def test_spawner_waits_for_the_copies_of_a_notebook(
    setting: Setting, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the progress, then the volumes; a lease whose datasets are copied is not taken for forgotten."""
    monkeypatch.setattr(reconcile, "START_GRACE_S", -1.0)
    profile = ProfileSettings(name="rtx5090", title="5090", gpu_model="RTX 5090", stage=("datasets/a",))
    setting.cluster = build_cluster(storage=StorageSettings(datasets="/data"), profiles=[profile])
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        path = f"/leases/{lease['id']}"
        for _ in range(2):
            waiting = await post(running, "spawner", f"{path}/stage?wait_s=0.01")
            assert waiting == {
                "is_ready": False,
                "message": "Copying datasets/a to rig1: 1 KiB of 2 KiB",
                "volumes": {},
            }
        assert transfers.requests == [(("datasets/a",), tuple(lease["nodes"]))]
        for _ in range(2):
            before = running.core.capacity.inventory.nodes[lease["nodes"][0]].polled_at
            await until(
                lambda: running.core.capacity.inventory.nodes[lease["nodes"][0]].polled_at != before,  # noqa: B023
                "the node is polled",
            )
        assert (await read(running, "ada", path))["state"] == "granted"
        await post(running, "ben", f"{path}/stage", status=404)
        await post(running, "ada", f"{path}/stage", status=403)
        transfers.held.set()
        ready = await post(running, "spawner", f"{path}/stage?wait_s=5")
        assert ready == {"is_ready": True, "message": "", "volumes": {"datasets/a": "volume-datasets/a"}}
        await run_notebook(running, lease)
        await post(running, "spawner", f"{path}/stage", status=409)
        await delete(running, "ada", path)


async def test_notebook_without_datasets_starts_at_once(setting: Setting, transfers: Transfers) -> None:
    """Nothing is copied for a profile that names none."""
    setting.cluster = build_cluster(storage=StorageSettings(datasets="/data"))
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        ready = await post(running, "spawner", f"/leases/{lease['id']}/stage")
        assert ready == {"is_ready": True, "message": "", "volumes": {}}
    assert transfers.requests == []


async def test_failed_copy_of_a_notebook_can_be_repeated(setting: Setting, transfers: Transfers) -> None:
    """The spawner gets the reason; the next start makes another attempt."""
    setting.cluster = build_cluster(storage=STORAGE)
    transfers.held.set()
    transfers.error = "there is no /datasets/tokens"
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        refused = await post(running, "spawner", f"/leases/{lease['id']}/stage?wait_s=5", status=422)
        assert refused["detail"] == "there is no /datasets/tokens"
        transfers.error = ""
        ready = await post(running, "spawner", f"/leases/{lease['id']}/stage?wait_s=5")
        assert ready["volumes"] == {"datasets/tokens": "volume-datasets/tokens"}


@pytest.mark.parametrize("stage", ["copying", "copied", "started"])
async def test_notebook_that_is_stopped_frees_its_gpu_at_once(
    setting: Setting, transfers: Transfers, stage: str
) -> None:
    """Also a moment after its datasets were copied, and while they are: no container of it has the GPU then."""
    setting.cluster = build_cluster(storage=STORAGE)
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        path = f"/leases/{lease['id']}"
        if stage != "copying":
            transfers.held.set()
        answer = await post(running, "spawner", f"{path}/stage?wait_s=0.1")
        assert answer["is_ready"] is (stage != "copying")
        if stage == "started":
            await run_notebook(running, lease)
        await delete(running, "ada", path)
        await wait_for_state(running, path, "released")
