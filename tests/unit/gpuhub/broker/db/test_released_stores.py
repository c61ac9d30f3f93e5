"""From the store that version 0.1.0 wrote to this version's and back, with notebooks and a job that run."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuhub.broker.db import tables
from gpuhub.broker.db.engine import build_engine, check_revision, find_newest_revision
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker_api.schemas import JobState, LeaseState
from gpuhub.common.errors import SetupError
from gpuhub.domain import lease_states
from tests.support.broker.store_revisions import RELEASED, move_store

STORES = Path(__file__).parent / "stores"
REVISIONS = [f"{number:04}" for number in range(1, int(find_newest_revision()) + 1)]


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A store as 0.1.0 left it."""
    file = tmp_path / "broker.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.executescript((STORES / "0.1.0.sql").read_text())
    return file


def read_schema(file: Path) -> dict[str, Any]:
    """Return every table's columns, keys, indexes and checks."""
    engine = build_engine(f"sqlite:///{file}")
    inspector = sa.inspect(engine)
    found = {}
    for table in inspector.get_table_names():
        columns = [
            (each["name"], str(each["type"]), each["nullable"], each["default"])
            for each in inspector.get_columns(table)
        ]
        found[table] = {
            "columns": sorted(columns),
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "foreign": sorted(
                (tuple(key["constrained_columns"]), key["referred_table"]) for key in inspector.get_foreign_keys(table)
            ),
            "indexes": sorted(
                (tuple(filter(None, index["column_names"])), bool(index["unique"]))
                for index in inspector.get_indexes(table)
            ),
            "unique": sorted(tuple(each["column_names"]) for each in inspector.get_unique_constraints(table)),
            "checks": sorted(each["sqltext"] for each in inspector.get_check_constraints(table)),
        }
    engine.dispose()
    return found


def read_rows(file: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with closing(sqlite3.connect(file)) as database:
        database.row_factory = sqlite3.Row
        for (name,) in database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        ):
            rows = [dict(row) for row in database.execute(f"SELECT * FROM {name}")]
            yield name, sorted(rows, key=str)


def test_running_notebooks_and_jobs_of_0_1_0_continue(old_store: Path) -> None:
    """Leases, GPUs, halves, places in the queue, containers and daemons' identities are what they were."""
    store = Store.open_file(old_store)
    rows, [job] = store.load_open()
    leases = {lease.owner + lease.subject: lease for lease in rows}
    ada, ben, cyd, of_job = (leases[name] for name in ("ada", "benx", "cyd", "adarun-1"))
    assert (ada.state, ada.container_id, ada.epoch, ada.expires_at) == (LeaseState.ACTIVE, "c" * 64, 1, 29801.0)
    assert (ada.groups, ada.identities) == (("lab",), {"rig1": ("DAEMON1", "boot1")})
    assert [(gpu.uuid, gpu.share, gpu.part) for gpu in ben.held] == [("GPU-2", 2, 1)]
    assert (cyd.state, cyd.resources.models, cyd.resources.exclude) == (LeaseState.REQUESTED, ("RTX 5090",), ("rig3",))
    assert [lease.seq for lease in rows] == [1, 2, 3, 4]
    assert (job.state, job.detached, job.name, job.lease_id) == (JobState.RUNNING, True, "train.py", of_job.id)
    assert [(worker.node, worker.container_id) for worker in job.workers] == [("rig3", "e" * 64)]
    assert store.find_highest() == (5, 9)
    assert [event.lease for event in store.list_events(after=None, limit=9)] == ["l-ada"]
    # What is held stays held, also in the database itself.
    with pytest.raises(sa.exc.IntegrityError):
        store.save(Changes(leases=[(None, ada.evolve(id="l9", seq=9, key="other"))]))
    store.close()


def test_back_to_0_1_0(old_store: Path) -> None:
    """After the way there and back, schema and rows are those that 0.1.0 wrote, with notebooks still running."""
    schema, rows = read_schema(old_store), dict(read_rows(old_store))
    Store.open_file(old_store).close()
    move_store(old_store, RELEASED)
    assert read_schema(old_store) == schema
    assert dict(read_rows(old_store)) == rows


def test_what_ended_in_the_new_version_is_ended_in_the_old_one(old_store: Path) -> None:
    """Changes of the time in between are kept."""
    store = Store.open_file(old_store)
    ada = store.load_open()[0][0]
    gone = lease_states.prove_released(lease_states.release(ada, "stopped", 2000.0), "rig1", 2001.0)
    store.save(Changes(leases=[(ada, gone)]))
    store.close()
    move_store(old_store, RELEASED)
    states = {row["id"]: (row["state"], row["released_at"]) for row in dict(read_rows(old_store))["leases"]}
    assert states["l-ada"] == ("released", 2001.0)
    assert states["l-ben"] == ("active", None)


@pytest.mark.parametrize("revision", REVISIONS)
def test_each_migration_has_a_way_back(tmp_path: Path, revision: str) -> None:
    """Going one further and back leaves exactly the tables of the revision."""
    file = tmp_path / "b.sqlite"
    move_store(file, revision)
    schema = read_schema(file)
    further = f"{int(revision) + 1:04}"
    if further in REVISIONS:
        move_store(file, further)
        assert read_schema(file) != schema
        move_store(file, revision)
        assert read_schema(file) == schema
    else:
        assert set(schema) == {*tables.metadata.tables, "alembic_version"}
    move_store(file, "base")
    assert set(read_schema(file)) <= {"alembic_version"}


def test_a_new_store_has_the_tables_that_migrations_make(tmp_path: Path) -> None:
    """It is created from the model at once, and has the newest revision."""
    migrated, created = tmp_path / "migrated.sqlite", tmp_path / "created.sqlite"
    move_store(migrated, REVISIONS[-1])
    Store.open_file(created).close()
    assert read_schema(created) == read_schema(migrated)
    assert dict(read_rows(created))["alembic_version"] == [{"version_num": REVISIONS[-1]}]


def test_newer_store_is_refused(old_store: Path) -> None:
    """The error says which version wrote it and what to do; the file is not changed."""
    Store.open_file(old_store).close()
    with closing(sqlite3.connect(old_store)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0999'")
    before = dict(read_rows(old_store))
    with pytest.raises(SetupError, match=r"written by a newer version of gpuhub.*revision 0999.*`gpuhub restore`"):
        Store.open_file(old_store)
    assert dict(read_rows(old_store)) == before
    check_revision(None, "an empty store")
    # The lock is free again.
    with pytest.raises(SetupError, match="newer version"):
        Store.open_file(old_store)
