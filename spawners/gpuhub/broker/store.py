"""The only opener of the broker's database. Sync; every call is one short transaction.

SQLite (WAL, every commit on the disk) by default; PostgreSQL by URL. One broker a store: `Store.open` holds a lock
file for as long as the store is open.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event, exc

from gpuhub.broker import convert, model
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState
from gpuhub.errors import SetupError, Unavailable

BUSY_TIMEOUT_S = 5
#: SQLAlchemy rewrites an IN with many values into many parameters; SQLite takes up to 32766.
_CHUNK = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """A GPU as last seen."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one transaction writes: pairs of the value before (None when new) and after."""

    leases: Sequence[tuple[LeaseRow | None, LeaseRow]] = ()
    jobs: Sequence[tuple[JobRow | None, JobRow]] = ()

    def __bool__(self) -> bool:
        return bool(self.leases or self.jobs)


class Store:
    """The open database."""

    def __init__(self, engine: sa.Engine, lock: int) -> None:
        self._engine = engine
        self._lock = lock

    @classmethod
    def open(cls, url: str, lock_file: Path) -> Self:
        """Take the lock, connect, and bring the tables to this version.

        Raises:
            SetupError: when another broker holds the store, or it cannot be opened.
        """
        lock = _take_lock(lock_file)
        engine = _build_engine(url)
        try:
            with engine.begin() as connection:
                _migrate(connection)
        except exc.SQLAlchemyError as error:
            engine.dispose()
            os.close(lock)
            raise SetupError(f"the broker's store {engine.url!r} cannot be opened: {_text(error)}") from error
        return cls(engine, lock)

    @classmethod
    def open_file(cls, path: Path) -> Self:
        """The SQLite file at `path`, made when it is missing, readable by its owner only."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        return cls.open(f"sqlite:///{path}", path.with_suffix(".lock"))

    def close(self) -> None:
        """Let another broker open the store."""
        self._engine.dispose()
        os.close(self._lock)

    def load(self) -> tuple[list[LeaseRow], list[JobRow]]:
        """All leases and jobs that have not ended, in the order in which they came."""
        with self._transaction() as connection:
            leases = _read_leases(connection, model.leases.c.state != LeaseState.RELEASED.value)
            jobs = _read_jobs(connection, model.jobs.c.state != JobState.ENDED.value)
        return leases, jobs

    def highest(self) -> tuple[int, int]:
        """The highest `seq` and the highest version ever written, 0 in an empty store."""
        with self._transaction() as connection:
            seq, version = connection.execute(
                sa.select(sa.func.max(model.leases.c.seq), sa.func.max(model.leases.c.version))
            ).one()
            job_version = connection.execute(sa.select(sa.func.max(model.jobs.c.version))).scalar_one()
        return seq or 0, max(version or 0, job_version or 0)

    def lease(self, lease_id: str) -> LeaseRow | None:
        """One lease, ended or not."""
        with self._transaction() as connection:
            found = _read_leases(connection, model.leases.c.id == lease_id)
        return found[0] if found else None

    def job(self, job_id: str) -> JobRow | None:
        """One job, ended or not."""
        with self._transaction() as connection:
            found = _read_jobs(connection, model.jobs.c.id == job_id)
        return found[0] if found else None

    def job_of_run(self, owner: str, run_id: str) -> JobRow | None:
        """The job of an owner's run, ended or not."""
        with self._transaction() as connection:
            found = _read_jobs(connection, (model.jobs.c.owner == owner) & (model.jobs.c.run_id == run_id))
        return found[0] if found else None

    def save(self, changes: Changes) -> None:
        """Write everything or nothing.

        Raises:
            Unavailable: when it cannot be written; nothing was.
        """
        with self._transaction() as connection:
            for before, lease in changes.leases:
                _write(connection, model.leases, before is None, convert.lease_record(lease), ["id"])
            # GPUs given back first: another lease of the same transaction may get them.
            for before, lease in changes.leases:
                _free_gpus(connection, before, lease)
            for before, lease in changes.leases:
                _insert_gpus(connection, before, lease)
            for job_before, job in changes.jobs:
                _write(connection, model.jobs, job_before is None, convert.job_record(job), ["id"])
                _write_workers(connection, job_before, job)

    def seen_gpus(self) -> list[SeenGpu]:
        """All GPUs that were ever seen and not replaced."""
        with self._transaction() as connection:
            return [SeenGpu(**row) for row in connection.execute(sa.select(model.gpus)).mappings()]

    def save_seen(self, node: str, gpus: Sequence[SeenGpu]) -> None:
        """Replace what was seen on a node; a GPU that moved here is taken from its old node."""
        with self._transaction() as connection:
            uuids = [gpu.uuid for gpu in gpus]
            connection.execute(sa.delete(model.gpus).where((model.gpus.c.node == node) | model.gpus.c.uuid.in_(uuids)))
            for gpu in gpus:
                connection.execute(
                    sa.insert(model.gpus).values(
                        uuid=gpu.uuid,
                        node=gpu.node,
                        index=gpu.index,
                        model=gpu.model,
                        memory_mib=gpu.memory_mib,
                        seen_at=gpu.seen_at,
                    )
                )

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except exc.OperationalError as error:
            raise Unavailable(f"the broker's store does not work at present: {_text(error)}") from error


def _text(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error)


def _take_lock(lock_file: Path) -> int:
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SetupError(f"another broker runs on this store (it holds {lock_file}): stop it first") from None
    return lock


def _build_engine(url: str) -> sa.Engine:
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver's own transactions begin too late and not before DDL; `_begin_immediate` begins them instead.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
        "journal_mode = WAL",
        "synchronous = FULL",  # a grant must survive a power cut: the container on another node does
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _migrate(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", "gpuhub.broker:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _read_leases(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[LeaseRow]:
    query = sa.select(model.leases).where(condition).order_by(model.leases.c.seq)
    rows = connection.execute(query).mappings().all()
    gpus = _children(connection, model.lease_gpus, "lease_id", [row["id"] for row in rows])
    return [convert.parse_lease(dict(row), gpus.get(row["id"], [])) for row in rows]


def _read_jobs(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[JobRow]:
    query = sa.select(model.jobs).where(condition).order_by(model.jobs.c.created_at)
    rows = connection.execute(query).mappings().all()
    workers = _children(connection, model.workers, "job_id", [row["id"] for row in rows])
    return [convert.parse_job(dict(row), workers.get(row["id"], [])) for row in rows]


def _children(
    connection: sa.Connection, table: sa.Table, parent: str, ids: Sequence[str]
) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for start in range(0, len(ids), _CHUNK):
        query = sa.select(table).where(table.c[parent].in_(ids[start : start + _CHUNK]))
        for row in connection.execute(query).mappings():
            found.setdefault(row[parent], []).append(dict(row))
    return found


def _write(
    connection: sa.Connection, table: sa.Table, is_new: bool, record: dict[str, Any], keys: Sequence[str]
) -> None:
    if is_new:
        connection.execute(sa.insert(table).values(record))
        return
    same = sa.and_(*(table.c[key] == record[key] for key in keys))
    connection.execute(sa.update(table).where(same).values(record))


def _free_gpus(connection: sa.Connection, before: LeaseRow | None, after: LeaseRow) -> None:
    held = set() if before is None else {gpu.uuid for gpu in before.held}
    for gpu in after.gpus:
        if gpu.uuid in held and gpu.released_at is not None:
            record = convert.gpu_record(after.id, gpu)
            _write(connection, model.lease_gpus, False, record, ["lease_id", "gpu_uuid"])


def _insert_gpus(connection: sa.Connection, before: LeaseRow | None, after: LeaseRow) -> None:
    known = set() if before is None else {gpu.uuid for gpu in before.gpus}
    for gpu in after.gpus:
        if gpu.uuid not in known:
            connection.execute(sa.insert(model.lease_gpus).values(convert.gpu_record(after.id, gpu)))


def _write_workers(connection: sa.Connection, before: JobRow | None, after: JobRow) -> None:
    known = {} if before is None else {worker.index: worker for worker in before.workers}
    for worker in after.workers:
        if known.get(worker.index) != worker:
            record = convert.worker_record(after.id, worker)
            _write(connection, model.workers, worker.index not in known, record, ["job_id", "index"])
