"""From earlier versions' stores to this one's and back, with leases that are open."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from gpuhub.broker.db.engine import build_engine
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose
from gpuhub.domain import lease_states
from gpuhub.domain.models import LeaseRow, ResourceRequest

OLD_ASK = {"nodes": 1, "gpus_per_node": 1, "model": "RTX 5090", "least_memory_mib": 0, "exclude": ["rig3"]}
OLD_LEASE = {
    "seq": 1, "key": "k", "owner": "ada", "purpose": "notebook", "subject": "", "profile": "rtx5090",
    "ask": json.dumps(OLD_ASK), "state": "active", "since": 5.0, "epoch": 1, "time_limit_s": 3600, "created_at": 1.0,
    "granted_at": 2.0, "expires_at": 3602.0, "container_id": "c" * 64, "nodes": '["rig1"]', "version": 7,
}  # fmt: skip
OLD_GPU = {"node": "rig1", "index": 0, "model": "RTX 5090", "memory_mib": 32607, "worker": 0, "released_at": None}


def migrate(path: Path, to: str) -> None:
    # As the broker opens it: with DDL in transactions.
    engine = build_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", "gpuhub.broker.db:migrations")
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            (command.downgrade if (_version(connection) or "") > to else command.upgrade)(config, to)
    finally:
        engine.dispose()


def _version(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return str(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar())


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        yield connection


def insert(connection: sqlite3.Connection, table: str, **values: Any) -> None:
    names = ", ".join(f'"{name}"' for name in values)
    marks = ", ".join("?" for _ in values)
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(values.values()))


@pytest.fixture
def first_version_store(tmp_path: Path) -> Path:
    """A store of the first version: a running notebook, a waiting one, a job that runs, and one that ended."""
    path = tmp_path / "broker.sqlite"
    migrate(path, "0001")
    with raw(path) as connection:
        insert(connection, "leases", id="l1", **OLD_LEASE)
        insert(connection, "lease_gpus", lease_id="l1", gpu_uuid="GPU-1", **OLD_GPU)
        waiting = {**OLD_LEASE, "state": "waiting", "seq": 2, "owner": "ben", "granted_at": None, "nodes": "[]"}
        insert(connection, "leases", id="l2", **waiting)
        job_lease = {**OLD_LEASE, "seq": 3, "key": "job:r", "purpose": "job", "nodes": '["rig2"]'}
        insert(connection, "leases", id="l3", **job_lease)
        insert(connection, "lease_gpus", lease_id="l3", gpu_uuid="GPU-2", **{**OLD_GPU, "node": "rig2"})
        ended = {**OLD_LEASE, "seq": 4, "state": "released", "released_at": 9.0}
        insert(connection, "leases", id="l4", **ended)
        insert(connection, "lease_gpus", lease_id="l4", gpu_uuid="GPU-1", **{**OLD_GPU, "released_at": 9.0})
        insert(
            connection, "jobs", id="j1", run_id="run-000001", owner="ada", server="", notebook_lease="l1",
            lease_id="l3", image="gpuhub/notebook:latest", nnodes=1, nproc_per_node=1, state="running", since=4.0,
            created_at=3.0, version=8,
        )  # fmt: skip
        insert(connection, "workers", job_id="j1", index=0, node="rig2", state="running", container_id="w")
        insert(connection, "gpus", uuid="GPU-1", node="rig1", index=0, model="RTX 5090", memory_mib=32607, seen_at=1.0)
    return path


def test_open_leases_and_jobs_survive_the_upgrade(first_version_store: Path) -> None:
    """All of it is there, with defaults for what is new, and the queue as it was."""
    store = Store.open_file(first_version_store)
    rows, jobs = store.load_open()
    running, waiting, of_job = rows
    assert (running.id, running.state, running.container_id, running.nodes) == ("l1", "active", "c" * 64, ("rig1",))
    assert running.resources == ResourceRequest(models=("RTX 5090",), exclude=("rig3",))
    assert (running.groups, running.identities, running.note, running.time_limit_s) == ((), {}, None, 3600)
    assert [(gpu.uuid, gpu.share, gpu.part, gpu.shrink_requested_at) for gpu in running.held] == [("GPU-1", 1, 0, None)]
    assert (waiting.id, waiting.state, waiting.owner) == ("l2", LeaseState.REQUESTED, "ben")
    assert (jobs[0].state, jobs[0].lease_id, jobs[0].min_nnodes, jobs[0].preemptions) == (JobState.RUNNING, "l3", 1, 0)
    assert jobs[0].workers[0].container_id == "w"
    assert of_job.purpose is Purpose.JOB
    assert store.find_highest() == (4, 8)
    assert [(gpu.uuid, gpu.capability, gpu.is_mig) for gpu in store.load_seen_gpus()] == [("GPU-1", None, False)]
    assert [(spent.owner, spent.ended_at) for spent in store.load_usage(0.0)] == [("ada", 9.0)]
    store.close()


def test_gpus_held_before_the_upgrade_stay_held(first_version_store: Path) -> None:
    """The guard tables have what open leases hold, and let it go with them."""
    store = Store.open_file(first_version_store)
    first = store.load_open()[0][0]
    second = first.evolve(id="l9", seq=9, key="other")
    with pytest.raises(sa.exc.IntegrityError, match=r"held_gpus\.gpu_uuid"):
        store.save(Changes(leases=[(None, second)]))
    gone = lease_states.prove_released(lease_states.release(first, "stopped", 10.0), "rig1", 11.0)
    store.save(Changes(leases=[(first, gone), (None, second)]))
    assert [lease.id for lease in store.load_open()[0]] == ["l2", "l3", "l9"]
    store.close()


def test_duplicate_keys_stay_with_the_newest_lease(first_version_store: Path) -> None:
    """From now on a key makes one lease; before it did not."""
    Store.open_file(first_version_store).close()
    with raw(first_version_store) as connection:
        keys = {row["id"]: row["key"] for row in connection.execute("SELECT id, key FROM leases")}
    assert keys == {"l1": "old:l1", "l2": "k", "l3": "job:r", "l4": "k"}


def test_downgrade_and_upgrade_lose_no_data(first_version_store: Path) -> None:
    """Where nothing new is in use the older version finds what it knows, and the newer one finds it again."""
    store = Store.open_file(first_version_store)
    before = store.load_open()
    quarantined = _quarantine(before[0][0])
    store.save(Changes(leases=[(before[0][0], quarantined)]))
    store.close()
    migrate(first_version_store, "0001")
    with raw(first_version_store) as connection:
        rows = {row["id"]: dict(row) for row in connection.execute("SELECT * FROM leases")}
        tables = {
            row["name"]
            for row in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
            )
        }
        with pytest.raises(sqlite3.IntegrityError):
            insert(connection, "lease_gpus", lease_id="l2", gpu_uuid="GPU-1", **OLD_GPU)
    assert {lease: row["state"] for lease, row in rows.items()} == {
        "l1": "releasing", "l2": "waiting", "l3": "active", "l4": "released",
    }  # fmt: skip
    assert json.loads(rows["l2"]["ask"]) == OLD_ASK
    assert set(rows["l1"]) == {*OLD_LEASE, "id", "released_at", "reason"}
    assert tables == {"alembic_version", "leases", "lease_gpus", "jobs", "workers", "gpus"}
    store = Store.open_file(first_version_store)
    leases_after, jobs_after = store.load_open()
    assert leases_after[1:] == before[0][1:]
    assert leases_after[0] == quarantined.evolve(state=LeaseState.RELEASING, note=None, quarantined_at=None)
    assert jobs_after == before[1]
    store.close()


def test_jobs_of_the_second_version_survive_the_upgrade(first_version_store: Path) -> None:
    """They are what they were: of a notebook, with nobody to join, and found among what somebody ran lately."""
    migrate(first_version_store, "0002")
    with raw(first_version_store) as connection:
        connection.execute("UPDATE jobs SET preemptions = 2, array = 'runs'")
        ended = {**dict(connection.execute("SELECT * FROM jobs").fetchone()), "id": "j2", "run_id": "run-000002"}
        insert(connection, "jobs", **ended | {"state": "ended", "ended_at": 9.0, "reason": "done"})
    store = Store.open_file(first_version_store)
    (job,) = store.load_open()[1]
    assert (job.preemptions, job.array, job.state) == (2, "runs", JobState.RUNNING)
    new = (job.detached, job.name, job.joins, job.first_worker, job.started_at, job.exit_code)
    assert new == (False, "", None, 0, None, None)
    assert [(one.id, one.reason) for one, _ in store.list_ended_jobs("ada", 5.0, 10)] == [("j2", "done")]
    assert store.list_ended_jobs("ada", 9.0, 10) == store.list_ended_jobs("ben", 5.0, 10) == []
    store.close()


def test_downgrade_to_the_second_version_refuses_detached_jobs(first_version_store: Path) -> None:
    """It would end it, since nobody renews it; when it has ended, the way back is open."""
    store = Store.open_file(first_version_store)
    job = store.load_open()[1][0]
    store.save(Changes(jobs=[(job, job.evolve(detached=True, name="train.py"))]))
    store.close()
    with pytest.raises(RuntimeError, match="does not know: a detached job"):
        migrate(first_version_store, "0002")
    store = Store.open_file(first_version_store)
    detached = store.load_open()[1][0]
    store.save(Changes(jobs=[(detached, detached.evolve(state=JobState.ENDED, ended_at=9.0))]))
    store.close()
    migrate(first_version_store, "0002")
    with raw(first_version_store) as connection:
        assert "detached" not in dict(connection.execute("SELECT * FROM jobs").fetchone())


def test_leases_of_the_third_version_have_no_slurm_job(first_version_store: Path) -> None:
    """They are gpuhub's own; from then on a lease may have one, and keeps it when it is read again."""
    migrate(first_version_store, "0003")
    store = Store.open_file(first_version_store)
    running, waiting, of_job = store.load_open()[0]
    assert [lease.slurm_job for lease in (running, waiting, of_job)] == [None, None, None]
    # A federation's numbers are beyond 32 bits.
    submitted = waiting.evolve(slurm_job=(1 << 40) + 7)
    store.save(Changes(leases=[(waiting, submitted)]))
    store.close()
    store = Store.open_file(first_version_store)
    assert store.load_open()[0] == [running, submitted, of_job]
    store.close()


def test_downgrade_to_the_third_version_refuses_slurm_leases(first_version_store: Path) -> None:
    """It would give the GPU without asking Slurm; when it has ended, the way back is open."""
    store = Store.open_file(first_version_store)
    waiting = store.load_open()[0][1]
    submitted = waiting.evolve(slurm_job=4711)
    store.save(Changes(leases=[(waiting, submitted)]))
    store.close()
    with pytest.raises(RuntimeError, match="does not know: a lease that is a Slurm job"):
        migrate(first_version_store, "0003")
    store = Store.open_file(first_version_store)
    store.save(Changes(leases=[(submitted, lease_states.release(submitted, "stopped", 10.0))]))
    assert store.get_lease("l2") is not None
    store.close()
    migrate(first_version_store, "0003")
    with raw(first_version_store) as connection:
        assert "slurm_job" not in dict(connection.execute("SELECT * FROM leases").fetchone())


def _quarantine(lease: LeaseRow) -> LeaseRow:
    return lease_states.quarantine(lease_states.release(lease, "stopped", 10.0), "node rig1 does not answer", 50.0)


def test_downgrade_refuses_unsupported_data(first_version_store: Path) -> None:
    """A request with a new demand, or a cordon, is in the way, and is named."""
    store = Store.open_file(first_version_store)
    waiting = store.load_open()[0][1]
    store.save(Changes(leases=[(waiting, waiting.evolve(resources=ResourceRequest(share=2)))]))
    store.close()
    with pytest.raises(RuntimeError, match="the older version does not know: a part of a GPU"):
        migrate(first_version_store, "0001")
    store = Store.open_file(first_version_store)
    assert store.load_open()[0][1].resources == ResourceRequest(share=2)
    store.close()
