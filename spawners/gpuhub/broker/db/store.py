"""The store: opens the broker's database under a lock, and reads and writes its tables."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import exc

from gpuhub.broker.db import gpu_records, retention, tables, writer
from gpuhub.broker.db.cost_store import CostStore
from gpuhub.broker.db.engine import READ_ONLY, AdvisoryLock, build_engine, migrate, take_advisory_lock
from gpuhub.broker.db.gpu_records import SeenGpu
from gpuhub.broker.db.limit_store import LimitStore
from gpuhub.broker.db.outbox import Outbox
from gpuhub.broker.db.power_store import PowerStore
from gpuhub.broker.db.share_store import ShareStore
from gpuhub.broker.db.writer import Changes
from gpuhub.broker_api.schemas import JobState, LeaseState
from gpuhub.common.errors import Conflict, SetupError, Unavailable
from gpuhub.common.gpu import GpuSpec
from gpuhub.common.paths import Paths, acquire_lock
from gpuhub.config.database import DatabaseSettings, build_database_url
from gpuhub.domain.models import EventRow, JobRow, LeaseRow, ReservationRow
from gpuhub.domain.suspension import is_without_gpu
from gpuhub.nodes.gpu_faults import GpuRecord
from gpuhub.nodes.status import Cordon
from gpuhub.scheduler.interface import UsageRecord

#: SQLAlchemy expands the values of an IN into parameters; SQLite accepts up to 32766.
_MAX_IN_VALUES = 500
#: Time that a transaction waits for those of other threads, seconds.
_TURN_S = 10.0
_UNUSABLE = "the broker's store cannot be used at the moment"
#: Error texts for a second request with the same key: SQLite names the columns, PostgreSQL the constraint.
_DUPLICATE_KEYS = ("leases.owner, leases.key", "jobs.owner, jobs.run_id", "ux_leases_owner_key", "uq_jobs_owner_run_id")


def lock_path(store: Path) -> Path:
    """Return the file that a broker locks while it runs on this store."""
    return store.with_suffix(".lock")


class Store:
    """The open database."""

    def __init__(self, engine: sa.Engine, lock: int, advisory_lock: AdvisoryLock | None = None) -> None:
        self._engine = engine
        self._lock = lock
        self._advisory_lock = advisory_lock
        self._is_closed = False
        # SQLite has no order in which waiting threads get its lock: under load some wait until their time is over.
        self._write_lock = threading.Lock() if engine.dialect.name == "sqlite" else None
        self.outbox = Outbox(self._transaction)
        self.costs = CostStore(self._transaction)
        self.shares = ShareStore(self._transaction)
        self.power = PowerStore(self._transaction)
        self.limits = LimitStore(self._transaction)

    @classmethod
    def open(cls, url: str, lock_file: Path) -> Self:
        """Take the lock, connect, and migrate the tables to this version.

        Raises:
            SetupError: Another broker has the store open, or it cannot be opened.
        """
        lock = acquire_lock(lock_file, "another broker runs on this store")
        engine = build_engine(url)
        try:
            guard = take_advisory_lock(engine)
            with engine.begin() as connection:
                migrate(connection)
        except exc.SQLAlchemyError as error:
            engine.dispose()
            os.close(lock)
            raise SetupError(f"the broker's store {engine.url!r} cannot be opened: {_error_text(error)}") from error
        except SetupError:
            engine.dispose()
            os.close(lock)
            raise
        return cls(engine, lock, guard)

    @classmethod
    def open_file(cls, path: Path) -> Self:
        """Open the SQLite file at `path`; a missing file is created, readable by its owner only."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        return cls.open(f"sqlite:///{path}", lock_path(path))

    @classmethod
    def open_configured(cls, database: DatabaseSettings, paths: Paths) -> Self:
        """Open the store of an instance where its settings say."""
        if database.url is None:
            return cls.open_file(paths.store)
        return cls.open(build_database_url(database, paths, "broker"), lock_path(paths.store))

    def close(self) -> None:
        """Close the database and release the lock; a transaction of another thread closes its connection itself."""
        self._is_closed = True
        if self._advisory_lock is not None:
            self._advisory_lock.close()
        self._engine.dispose()
        os.close(self._lock)

    def load_open(self) -> tuple[list[LeaseRow], list[JobRow]]:
        """Return all leases and jobs that have not ended, oldest first."""
        with self._transaction(READ_ONLY) as connection:
            leases = _read_leases(connection, tables.leases.c.state != LeaseState.RELEASED.value)
            jobs = _read_jobs(connection, tables.jobs.c.state != JobState.ENDED.value)
        return leases, jobs

    def find_highest(self) -> tuple[int, int]:
        """Return the highest `seq` and the highest version ever written; 0 in an empty store."""
        with self._transaction(READ_ONLY) as connection:
            seq, version = connection.execute(
                sa.select(sa.func.max(tables.leases.c.seq), sa.func.max(tables.leases.c.version))
            ).one()
            job_version = connection.execute(sa.select(sa.func.max(tables.jobs.c.version))).scalar_one()
        return seq or 0, max(version or 0, job_version or 0)

    def get_lease(self, lease_id: str) -> LeaseRow | None:
        """Return a lease, ended or not."""
        with self._transaction(READ_ONLY) as connection:
            rows = _read_leases(connection, tables.leases.c.id == lease_id)
        return rows[0] if rows else None

    def get_job(self, job_id: str) -> JobRow | None:
        """Return a job, ended or not."""
        with self._transaction(READ_ONLY) as connection:
            rows = _read_jobs(connection, tables.jobs.c.id == job_id)
        return rows[0] if rows else None

    def find_leases_by_key(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], LeaseRow]:
        """Return leases, ended or not, by owner and the key of their request."""
        columns = sa.tuple_(tables.leases.c.owner, tables.leases.c.key)
        rows: list[LeaseRow] = []
        with self._transaction(READ_ONLY) as connection:
            for start in range(0, len(keys), _MAX_IN_VALUES):
                rows += _read_leases(connection, columns.in_(keys[start : start + _MAX_IN_VALUES]))
        return {(row.owner, row.key): row for row in rows}

    def find_jobs_by_run(self, owner: str, run_ids: Sequence[str]) -> dict[str, JobRow]:
        """Return the jobs of an owner's runs by run id, ended or not."""
        rows: dict[str, JobRow] = {}
        with self._transaction(READ_ONLY) as connection:
            for start in range(0, len(run_ids), _MAX_IN_VALUES):
                condition = tables.jobs.c.run_id.in_(run_ids[start : start + _MAX_IN_VALUES])
                rows |= {job.run_id: job for job in _read_jobs(connection, (tables.jobs.c.owner == owner) & condition)}
        return rows

    def find_run_or_array(self, owner: str, run_id: str) -> list[JobRow]:
        """Return the job of an owner's run, or all jobs of the owner's array, ended or not."""
        jobs = tables.jobs.c
        condition = (jobs.owner == owner) & ((jobs.run_id == run_id) | (jobs.array == run_id))
        with self._transaction(READ_ONLY) as connection:
            return list(_read_jobs(connection, condition))

    def list_ended_jobs(self, owner: str | None, since: float, limit: int) -> list[tuple[JobRow, LeaseRow]]:
        """Return jobs that ended after `since`, of one owner or all, with their leases: the `limit` youngest, newest
        first.
        """
        jobs = tables.jobs.c
        condition = jobs.ended_at > since if owner is None else (jobs.owner == owner) & (jobs.ended_at > since)
        newest = sa.select(jobs.id).where(condition).order_by(jobs.created_at.desc(), jobs.id).limit(limit)
        with self._transaction(READ_ONLY) as connection:
            rows = _read_jobs(connection, jobs.id.in_(newest.scalar_subquery()))
            ids = [job.lease_id for job in rows]
            leases = {row.id: row for row in _read_leases(connection, tables.leases.c.id.in_(ids))}
        return [(job, leases[job.lease_id]) for job in reversed(rows)]

    def delete_ended_jobs(self, before: float) -> int:
        """Delete some of the jobs that ended before a time, and return their number; 0 when none is left."""
        with self._transaction() as connection:
            return retention.delete_ended_jobs(connection, before)

    def delete_released_leases(self, before: float) -> int:
        """Delete some of the leases that were released before a time and have no job, and return their number; 0 when
        none is left. Their usage stays.
        """
        with self._transaction() as connection:
            return retention.delete_released_leases(connection, before)

    def delete_old_usage(self, before: float) -> None:
        """Delete the usage of deleted leases from before a time."""
        with self._transaction() as connection:
            retention.delete_old_usage(connection, before)

    def find_last_lease_ends(self) -> dict[tuple[str, str], float]:
        """Return when the last lease of each owner on each node ended."""
        lease = tables.leases.c
        # Compare as text: PostgreSQL does not compare JSON.
        nodes = sa.cast(lease.nodes, sa.Text)
        query = sa.select(lease.owner, nodes, sa.func.max(lease.released_at)).group_by(lease.owner, nodes)
        with self._transaction(READ_ONLY) as connection:
            ends = retention.load_lease_ends(connection)
            for owner, on, at in connection.execute(query.where(lease.released_at.is_not(None))):
                for node in json.loads(on):
                    ends[owner, node] = max(at, ends.get((owner, node), at))
        return ends

    def load_usage(self, since: float) -> list[UsageRecord]:
        """Return usage that ended after `since`: of released GPUs and of quarantined leases."""
        lease, gpu = tables.leases.c, tables.lease_gpus.c
        started_at = sa.func.coalesce(lease.held_from, lease.granted_at).label("started_at")
        is_over = (gpu.released_at > since) | (gpu.released_at.is_(None) & (lease.quarantined_at > since))
        query = (
            sa.select(
                lease.owner, lease.groups, started_at, lease.quarantined_at, gpu.model, gpu.memory_mib, gpu.share,
                gpu.released_at,
            )
            .join(tables.leases, lease.id == gpu.lease_id)
            .where(is_over, lease.granted_at.is_not(None))
        )  # fmt: skip
        with self._transaction(READ_ONLY) as connection:
            rows = connection.execute(query).mappings()
            return [*retention.load_usage(connection, since), *(_parse_usage_record(dict(row)) for row in rows)]

    def save(self, changes: Changes) -> None:
        """Write all changes or none.

        Raises:
            Unavailable: The changes cannot be written.
            Conflict: The same request came twice at the same moment.
        """
        try:
            with self._transaction() as connection:
                writer.write_changes(connection, changes)
                for before, after in changes.leases:
                    if before is not None and is_without_gpu(before) and not is_without_gpu(after):
                        retention.keep_suspended_usage(connection, before)
                self.outbox.add(connection, changes.events)
                retention.prune_events(connection, {event.owner for event in changes.events})
        except exc.IntegrityError as error:
            if any(key in _error_text(error) for key in _DUPLICATE_KEYS):
                raise Conflict(
                    "the same request arrived twice at the same moment: send it again to get the result"
                ) from error
            raise

    def load_seen_gpus(self) -> list[SeenGpu]:
        """Return all GPUs that were ever read and not replaced."""
        with self._transaction(READ_ONLY) as connection:
            return gpu_records.load_seen_gpus(connection)

    def save_seen_gpus(self, node: str, seen: Sequence[SeenGpu]) -> None:
        """Replace the GPUs of a node; a GPU that was moved here leaves its old node."""
        with self._transaction() as connection:
            gpu_records.save_seen_gpus(connection, node, seen)

    def load_gpu_records(self) -> dict[str, GpuRecord]:
        """Return the records of all GPUs by UUID."""
        with self._transaction(READ_ONLY) as connection:
            return gpu_records.load_gpu_records(connection)

    def save_gpu_records(self, records: Sequence[GpuRecord]) -> None:
        """Replace the records of these GPUs."""
        with self._transaction() as connection:
            gpu_records.save_gpu_records(connection, records)

    def delete_gpu_records(self, gpus: Sequence[str]) -> None:
        """Delete the records of these GPUs."""
        with self._transaction() as connection:
            gpu_records.delete_gpu_records(connection, gpus)

    # -- cordons and reservations ------------------------------------------------------------------------------------

    def load_cordons(self) -> list[Cordon]:
        with self._transaction(READ_ONLY) as connection:
            return [Cordon(**row) for row in connection.execute(sa.select(tables.cordons)).mappings()]

    def save_cordon(self, node: str, cordon: Cordon | None) -> None:
        """Replace a node's cordon; None deletes it."""
        with self._transaction() as connection:
            connection.execute(sa.delete(tables.cordons).where(tables.cordons.c.node == node))
            writer.insert_rows(
                connection, tables.cordons, [] if cordon is None else [writer.build_cordon_record(cordon)]
            )

    def load_reservations(self) -> list[ReservationRow]:
        """Return all reservations, the earliest first."""
        query = sa.select(tables.reservations).order_by(tables.reservations.c.starts_at, tables.reservations.c.id)
        with self._transaction(READ_ONLY) as connection:
            return [writer.parse_reservation(dict(row)) for row in connection.execute(query).mappings()]

    def save_reservation(self, row: ReservationRow) -> None:
        with self._transaction() as connection:
            writer.insert_rows(connection, tables.reservations, [writer.build_reservation_record(row)])

    def delete_reservations(self, ids: Sequence[str]) -> None:
        with self._transaction() as connection:
            connection.execute(sa.delete(tables.reservations).where(tables.reservations.c.id.in_(ids)))

    # -- events ---------------------------------------------------------------------------------------------------

    def save_events(self, events: Sequence[EventRow]) -> None:
        """Add events with their notifications, and delete the oldest ones of the same owners."""
        with self._transaction() as connection:
            writer.insert_rows(connection, tables.events, [writer.build_event_record(event) for event in events])
            self.outbox.add(connection, events)
            retention.prune_events(connection, {event.owner for event in events})

    def delete_old_events(self, before: float) -> int:
        """Delete some of the events from before a time, and return their number; 0 when none is left."""
        with self._transaction() as connection:
            return retention.delete_old_events(connection, before)

    def list_events(self, *, after: int | None, limit: int, owner: str | None = None) -> list[EventRow]:
        """Return the next `limit` events after a number, or the newest ones; of one owner, or all; oldest first."""
        seq = tables.events.c.seq
        query = sa.select(tables.events).limit(limit)
        query = query.order_by(seq.desc()) if after is None else query.where(seq > after).order_by(seq)
        if owner is not None:
            query = query.where(tables.events.c.owner == owner)
        with self._transaction(READ_ONLY) as connection:
            rows = [EventRow(**row) for row in connection.execute(query).mappings()]
        return sorted(rows, key=lambda event: event.seq)

    @contextmanager
    def _transaction(self, options: Mapping[str, Any] | None = None) -> Iterator[sa.Connection]:
        try:
            if self._advisory_lock is not None and options is None:
                self._advisory_lock.ensure()
            with self._take_turn(is_writing=options is None), self._engine.connect() as connection:
                try:
                    with connection.execution_options(**options or {}).begin():
                        yield connection
                finally:
                    if self._is_closed:
                        # It outlived its pool, so nothing else would close it.
                        connection.detach()
        except SetupError as error:
            raise Unavailable(str(error)) from error
        except exc.OperationalError as error:
            raise Unavailable(f"{_UNUSABLE}: {_error_text(error)}") from error

    @contextmanager
    def _take_turn(self, *, is_writing: bool) -> Iterator[None]:
        """Let one transaction write at a time, where the database allows no more."""
        if self._write_lock is None or not is_writing:
            yield
            return
        if not self._write_lock.acquire(timeout=_TURN_S):
            raise Unavailable(f"{_UNUSABLE}: earlier changes have waited for the disk for {_TURN_S:.0f} s")
        try:
            yield
        finally:
            self._write_lock.release()


def _error_text(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error)


def _read_leases(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[LeaseRow]:
    query = sa.select(tables.leases).where(condition).order_by(tables.leases.c.seq)
    rows = connection.execute(query).mappings().all()
    gpus = _read_children(connection, tables.lease_gpus, "lease_id", [row["id"] for row in rows])
    return [writer.parse_lease(dict(row), gpus.get(row["id"], [])) for row in rows]


def _read_jobs(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[JobRow]:
    query = sa.select(tables.jobs).where(condition).order_by(tables.jobs.c.created_at)
    rows = connection.execute(query).mappings().all()
    workers = _read_children(connection, tables.workers, "job_id", [row["id"] for row in rows])
    return [writer.parse_job(dict(row), workers.get(row["id"], [])) for row in rows]


def _read_children(
    connection: sa.Connection, table: sa.Table, parent: str, ids: Sequence[str]
) -> dict[str, list[Mapping[str, Any]]]:
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for start in range(0, len(ids), _MAX_IN_VALUES):
        query = sa.select(table).where(table.c[parent].in_(ids[start : start + _MAX_IN_VALUES]))
        for row in connection.execute(query).mappings():
            rows.setdefault(row[parent], []).append(dict(row))
    return rows


def _parse_usage_record(row: Mapping[str, Any]) -> UsageRecord:
    ends = [at for at in (row["released_at"], row["quarantined_at"]) if at is not None]
    return UsageRecord(
        owner=row["owner"],
        groups=frozenset(row["groups"]),
        card=GpuSpec(model=row["model"], memory_mib=row["memory_mib"]),
        share=row["share"],
        started_at=row["started_at"],
        ended_at=min(ends),
    )
