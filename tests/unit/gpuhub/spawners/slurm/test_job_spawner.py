"""What is asked of Slurm for a notebook, what its answers mean, and what a hub knows of a start that an earlier hub began."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhub.broker_api.schemas import LeaseRequest
from gpuhub.common.errors import Conflict, InvalidRequest
from gpuhub.common.names import slurm_container_id
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.slurm_client.models import (
    SlurmJob,
    SlurmJobState,
    SlurmNode,
    SlurmPartition,
    SlurmSite,
    SlurmSnapshot,
    SlurmSubmission,
    Submitter,
)
from gpuhub.spawners.slurm import job_spawner
from gpuhub.spawners.slurm.job_spawner import JobRecord, JobRecordStore, JobSpawner
from tests.support.hub.fake_broker import FakeBroker

ADA = UserIdentity(name="ada", uid=71001, gid=71001, groups=(2000,), group_names=("ada", "lab"))
NODES = (
    SlurmNode(name="sx1", state="idle", takes_work=True, gpus={"rtx5090": 1}),
    SlurmNode(name="sx2", state="idle", takes_work=True, gpus={"rtx5070": 1}),
    SlurmNode(name="stranger", state="idle", takes_work=True, gpus={"rtx5090": 8}),
)
LIMITED = SlurmSite(
    version=(22, 5, 8),
    cluster="c",
    partitions=(
        SlurmPartition(name="gpu", max_time_s=86400),
        SlurmPartition(name="all", is_default=True, max_time_s=3600),
    ),
    nodes=NODES,
    has_accounting=False,
)


def cluster(**profile: Any) -> ClusterSettings:
    return ClusterSettings.model_validate(
        {
            "engine": "slurm",
            "nodes": [
                {
                    "name": f"rig{number}",
                    "slurm": f"sx{number}",
                    "address": f"10.0.0.{number}",
                    "docker": f"ssh://rig{number}",
                    "gpus": [{"model": model, "memory": "8G"}],
                }
                for number, model in ((1, "RTX 5090"), (2, "RTX 5070"))
            ],
            "profiles": [{"name": "p", "title": "P", "gpu_model": "RTX 5090"} | profile],
            "users": {"allowed": ["ada"]},
            "slurm": {"runtime": "plain", "command": "/opt/bin/jupyterhub-singleuser", "account": "lab"},
        }
    )


async def submit(of: ClusterSettings) -> SlurmSubmission:
    broker = FakeBroker(of)
    lease = await broker.request_lease(LeaseRequest(profile="p", key="nb-1234567890", owner="ada"))
    return job_spawner.build_notebook_submission(
        lease,
        of.profiles[0],
        ADA,
        cluster=of,
        view=await broker.cluster(),
        snapshot=SlurmSnapshot(jobs=(), nodes=NODES),
        site=LIMITED,
        name="gh-lease-l1",
    )


async def test_notebook_job_has_the_resources_of_its_profile() -> None:
    asked = await submit(cluster(cpus=1.5, memory="3GiB", time_limit="30m", partition="gpu"))
    assert asked.submitter == Submitter(name="ada", uid=71001, gid=71001, groups=(2000,))
    assert (asked.name, asked.nodes, asked.gpus_per_node, asked.gpu_type) == ("gh-lease-l1", 1, 1, "rtx5090")
    assert (asked.cpus, asked.memory_mib, asked.time_limit_s) == (2, 3072, 1920)
    assert (asked.partition, asked.account, asked.qos) == ("gpu", "lab", None)
    # gpuhub knows no address of it.
    assert "stranger" in asked.exclude


async def test_time_limit_is_capped_by_the_partition() -> None:
    assert (await submit(cluster(time_limit="1h"))).time_limit_s == 3600
    assert (await submit(cluster())).time_limit_s is None


async def test_notebook_without_gpu_requests_none() -> None:
    asked = await submit(cluster(gpu_count=0, gpu_model=None))
    assert (asked.gpus_per_node, asked.gpu_type) == (0, None)


async def test_profile_that_no_node_can_serve_is_refused() -> None:
    of = cluster()
    profile = of.profiles[0].model_copy(update={"gpu_model": None, "gpu_memory": 1024**4})
    with pytest.raises(Conflict, match="choose another profile"):
        await submit(of.model_copy(update={"profiles": (profile,)}))


def job(**changes: Any) -> SlurmJob:
    values: dict[str, Any] = {"id": 7, "name": "gh-lease-l1", "user_id": 71001, "state": SlurmJobState.RUNNING}
    return SlurmJob(**(values | changes))


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (job(), None),
        (job(state=SlurmJobState.PENDING), None),
        (job(state=SlurmJobState.SUSPENDED), None),
        (job(is_completing=True), 1),
        (job(state=SlurmJobState.COMPLETING), 1),
        (job(state=SlurmJobState.COMPLETED), 0),
        (job(state=SlurmJobState.NODE_FAIL), 1),
        (job(state=SlurmJobState.CANCELLED), 1),
        (None, 0),
    ],
)
def test_exit_code_follows_the_job_state(found: SlurmJob | None, code: int | None) -> None:
    assert job_spawner.compute_exit_code(found) == code


def test_job_records_are_private_and_can_be_deleted(tmp_path: Path) -> None:
    records = JobRecordStore(tmp_path / "jobs")
    assert records.find("l1") is None
    records.save("l1", JobRecord(token="t"))
    records.save("l1", JobRecord(token="t", job=7, port=40000))
    assert records.find("l1") == JobRecord(token="t", job=7, port=40000)
    assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "jobs" / "l1.json").stat().st_mode & 0o777 == 0o600
    assert records.find("l2") is None
    records.delete("l1")
    records.delete("l1")
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', '{"token": "t", "more": 1}'])
def test_incomplete_job_record_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "l1.json").write_text(text)
    assert JobRecordStore(tmp_path).find("l1") is None


@pytest.mark.parametrize("lease", ["../l1", "", "a/b", "l1\n", ".hidden"])
def test_lease_ids_with_path_characters_are_refused(lease: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        JobRecordStore(tmp_path).find(lease)


async def test_server_that_is_stopped_while_a_hub_restores_it_ends_quietly() -> None:
    """Its lease is still activated with the job that it had, and nothing asks for a job without a number."""

    class Restored(SimpleNamespace):
        _container = JobSpawner._container

    activated: list[tuple[str, str]] = []

    async def stop_meanwhile() -> None:
        spawner.job_id = ""

    async def recover(lease_id: str, container: str) -> None:
        activated.append((lease_id, container))

    spawner = Restored(
        job_id="7", lease_id="l1", notebook_port=40000, server=None, http_timeout=30, _is_restored=True,
        _is_watched=True, _query_exit_code=stop_meanwhile, _recover_lease=recover,
    )  # fmt: skip
    assert await JobSpawner.poll(spawner) is None
    await spawner._recovery_task
    assert activated == [("l1", slurm_container_id(7))]
