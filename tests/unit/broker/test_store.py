"""The store on real SQLite files."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from gpuhub.broker import job_rules, leases, model
from gpuhub.broker.rows import Ask, JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, Purpose
from gpuhub.broker.store import Changes, SeenGpu, Store
from gpuhub.engines.base import Share, Slot
from gpuhub.errors import SetupError, Unavailable
from gpuhub.gpus import Card

CARD = Card(model="RTX 5090", memory_mib=32607)


def row(name: str, seq: int) -> LeaseRow:
    return LeaseRow(
        id=name,
        seq=seq,
        key="k",
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject='it\'s "quoted"\n⚙',
        profile="rtx5090",
        ask=Ask(nodes=2, model="RTX 5090", exclude=("rig3",)),
        created_at=1.5,
        since=1.5,
    )


def granted(name: str, seq: int, uuid: str = "GPU-1") -> LeaseRow:
    slot = Slot(uuid=uuid, node="rig1", index=0, card=CARD)
    return leases.grant(row(name, seq), [Share(node="rig1", slots=(slot,))], 2.5)


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    """A lease and a job with workers come back equal, over a restart, in the order in which they came."""
    lease, later = granted("l1", 7), row("l0", 8)
    job = job_rules.begin(
        JobRow(
            id="j1",
            run_id="run-000001",
            owner="ada",
            server="",
            notebook_lease="l0",
            lease_id="l1",
            image="gpuhub/notebook:latest",
            nnodes=1,
            nproc_per_node=1,
            created_at=1.0,
            since=1.0,
        ),
        lease,
        3.0,
    )
    store = Store.open_file(tmp_path / "b.sqlite")
    store.save(Changes(leases=[(None, lease), (None, later)], jobs=[(None, job)]))
    started = job_rules.worker_running(job, 0, "c1", 4.0)
    store.save(Changes(jobs=[(job, started)]))
    store.close()
    store = Store.open_file(tmp_path / "b.sqlite")
    assert store.load() == ([lease, later], [started])
    assert store.highest()[0] == 8
    assert started.state is JobState.RUNNING
    assert store.job_of_run("ada", "run-000001") == started
    assert store.job_of_run("ben", "run-000001") is None
    store.close()


def test_a_doubled_gpu_cannot_be_written(tmp_path: Path) -> None:
    """The index itself refuses a second holder, in the same transaction or in a later one, and nothing is written."""
    store = Store.open_file(tmp_path / "b.sqlite")
    store.save(Changes(leases=[(None, granted("l1", 1))]))
    with pytest.raises(sa.exc.IntegrityError, match=r"lease_gpus\.gpu_uuid"):
        store.save(Changes(leases=[(None, granted("l2", 2))]))
    assert store.lease("l2") is None
    store.close()
    with sqlite3.connect(tmp_path / "b.sqlite") as raw, pytest.raises(sqlite3.IntegrityError):
        raw.execute("INSERT INTO lease_gpus VALUES ('l1', 'GPU-1', 'rig1', 0, 'm', 1, 0, NULL)")
        raw.execute("INSERT INTO lease_gpus VALUES ('l9', 'GPU-1', 'rig1', 0, 'm', 1, 0, NULL)")
    raw.close()


def test_a_gpu_given_back_may_be_given_in_the_same_transaction(tmp_path: Path) -> None:
    """Release and next grant are one step, in whatever order the leases stand."""
    store = Store.open_file(tmp_path / "b.sqlite")
    first = granted("l2", 1)
    store.save(Changes(leases=[(None, first)]))
    released = leases.prove_gone(leases.release(first, "stopped", 3.0), "rig1", 4.0)
    store.save(Changes(leases=[(None, granted("l1", 2)), (first, released)]))
    assert [lease.id for lease in store.load()[0]] == ["l1"]
    assert store.lease("l2") == released
    store.close()


def test_a_second_broker_on_the_same_store_refuses(tmp_path: Path) -> None:
    """Two brokers would each believe to be the only one."""
    store = Store.open_file(tmp_path / "b.sqlite")
    with pytest.raises(SetupError, match="another broker runs"):
        Store.open_file(tmp_path / "b.sqlite")
    store.close()
    Store.open_file(tmp_path / "b.sqlite").close()


def test_the_migrations_make_the_tables_of_the_model(tmp_path: Path) -> None:
    """Alembic finds no difference between what it made and what the code expects."""
    Store.open_file(tmp_path / "b.sqlite").close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'b.sqlite'}")
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), model.metadata)
        version = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    assert differences == []
    assert version == "0001"


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A file that is no database is refused with its path, and the lock is free again."""
    (tmp_path / "b.sqlite").write_text("this is not a database, it only has its name" * 50)
    for _ in range(2):
        with pytest.raises(SetupError, match=r"b\.sqlite.*file is not a database"):
            Store.open_file(tmp_path / "b.sqlite")


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process keeps the file locked, a change is refused as unavailable, and nothing is written."""
    monkeypatch.setattr("gpuhub.broker.store.BUSY_TIMEOUT_S", 0.05)
    store = Store.open_file(tmp_path / "b.sqlite")
    blocker = sqlite3.connect(tmp_path / "b.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="database is locked"):
        store.save(Changes(leases=[(None, row("l1", 1))]))
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.load() == ([], [])
    store.close()


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    """Who holds what is nobody else's to read from the disk."""
    Store.open_file(tmp_path / "b.sqlite").close()
    assert (tmp_path / "b.sqlite").stat().st_mode & 0o077 == 0


def test_gpus_as_last_seen_follow_their_node(tmp_path: Path) -> None:
    """A node's list is replaced as a whole, and a card that moved is taken from its old node."""
    store = Store.open_file(tmp_path / "b.sqlite")

    def seen(uuid: str, node: str) -> SeenGpu:
        return SeenGpu(uuid=uuid, node=node, index=0, model="RTX 5090", memory_mib=1, seen_at=1.0)

    store.save_seen("rig1", [seen("a", "rig1"), seen("b", "rig1")])
    store.save_seen("rig2", [seen("b", "rig2")])
    assert sorted((gpu.uuid, gpu.node) for gpu in store.seen_gpus()) == [("a", "rig1"), ("b", "rig2")]
    store.save_seen("rig1", [])
    assert [gpu.uuid for gpu in store.seen_gpus()] == ["b"]
    store.close()
