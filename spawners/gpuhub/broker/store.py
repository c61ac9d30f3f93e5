"""The only opener of the broker's database. Sync; every call is one short transaction.

SQLite (WAL, every commit on the disk) by default; PostgreSQL by URL. One broker a store: `Store.open` holds a lock
file for as long as the store is open, and in PostgreSQL an advisory lock as well, since its brokers may be on two
machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import exc

from gpuhub import gpus
from gpuhub.broker import convert, model, opening, writing
from gpuhub.broker.cordons import Cordon
from gpuhub.broker.rows import EventRow, JobRow, LeaseRow, ReservationRow
from gpuhub.broker.schemas import JobState, LeaseState
from gpuhub.broker.writing import Changes
from gpuhub.engines.base import Spent
from gpuhub.errors import Conflict, SetupError, Unavailable
from gpuhub.gpus import Card
from gpuhub.locks import take_lock

#: SQLAlchemy rewrites an IN with many values into many parameters; SQLite takes up to 32766.
_CHUNK = 500
#: Of events, so many are kept.
EVENTS_KEPT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """A GPU as last seen."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    capability: tuple[int, int] | None = None
    is_mig: bool = False
    seen_at: float


#: What the databases say of a second request with the same key: SQLite names the columns, PostgreSQL the constraint.
_SAME_REQUEST = ("leases.owner, leases.key", "jobs.owner, jobs.run_id", "ux_leases_owner_key", "uq_jobs_owner_run_id")


class Store:
    """The open database."""

    def __init__(self, engine: sa.Engine, lock: int, guard: sa.Connection | None = None) -> None:
        self._engine = engine
        self._lock = lock
        self._guard = guard

    @classmethod
    def open(cls, url: str, lock_file: Path) -> Self:
        """Take the lock, connect, and bring the tables to this version.

        Raises:
            SetupError: when another broker holds the store, or it cannot be opened.
        """
        lock = take_lock(lock_file, "another broker runs on this store")
        engine = opening.build_engine(url)
        try:
            guard = opening.take_advisory_lock(engine)
            with engine.begin() as connection:
                opening.migrate(connection)
        except exc.SQLAlchemyError as error:
            engine.dispose()
            os.close(lock)
            raise SetupError(f"the broker's store {engine.url!r} cannot be opened: {_text(error)}") from error
        except SetupError:
            engine.dispose()
            os.close(lock)
            raise
        return cls(engine, lock, guard)

    @classmethod
    def open_file(cls, path: Path) -> Self:
        """The SQLite file at `path`, made when it is missing, readable by its owner only."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        return cls.open(f"sqlite:///{path}", path.with_suffix(".lock"))

    def close(self) -> None:
        """Let another broker open the store."""
        if self._guard is not None:
            self._guard.close()
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

    def lease_of_key(self, owner: str, key: str) -> LeaseRow | None:
        """The lease that an owner asked for with this key, ended or not."""
        with self._transaction() as connection:
            found = _read_leases(connection, (model.leases.c.owner == owner) & (model.leases.c.key == key))
        return found[0] if found else None

    def jobs_of_runs(self, owner: str, run_ids: Sequence[str]) -> dict[str, JobRow]:
        """The jobs of an owner's runs by run id, ended or not."""
        found: dict[str, JobRow] = {}
        with self._transaction() as connection:
            for start in range(0, len(run_ids), _CHUNK):
                some = model.jobs.c.run_id.in_(run_ids[start : start + _CHUNK])
                found |= {job.run_id: job for job in _read_jobs(connection, (model.jobs.c.owner == owner) & some)}
        return found

    def ended_jobs(self, owner: str | None, since: float, limit: int) -> list[tuple[JobRow, LeaseRow]]:
        """Jobs of one owner, or all, that ended since then, with their leases; the `limit` that were asked for last,
        newest first.
        """
        jobs = model.jobs.c
        condition = jobs.ended_at > since if owner is None else (jobs.owner == owner) & (jobs.ended_at > since)
        newest = sa.select(jobs.id).where(condition).order_by(jobs.created_at.desc(), jobs.id).limit(limit)
        with self._transaction() as connection:
            found = _read_jobs(connection, jobs.id.in_(newest.scalar_subquery()))
            ids = [job.lease_id for job in found]
            leases = {row.id: row for row in _read_leases(connection, model.leases.c.id.in_(ids))}
        return [(job, leases[job.lease_id]) for job in reversed(found)]

    def forget_jobs(self, before: float) -> int:
        """Remove jobs that ended before then; their leases stay, from which usage is counted. How many there were."""
        old = sa.select(model.jobs.c.id).where(model.jobs.c.ended_at < before)
        with self._transaction() as connection:
            connection.execute(sa.delete(model.workers).where(model.workers.c.job_id.in_(old.scalar_subquery())))
            return connection.execute(sa.delete(model.jobs).where(model.jobs.c.ended_at < before)).rowcount

    def lease_ends(self) -> dict[tuple[str, str], float]:
        """When the last lease of each owner on each node ended, where one did."""
        lease = model.leases.c
        # As text: PostgreSQL does not compare JSON.
        nodes = sa.cast(lease.nodes, sa.Text)
        query = sa.select(lease.owner, nodes, sa.func.max(lease.released_at)).group_by(lease.owner, nodes)
        ends: dict[tuple[str, str], float] = {}
        with self._transaction() as connection:
            for owner, on, at in connection.execute(query.where(lease.released_at.is_not(None))):
                for node in json.loads(on):
                    ends[owner, node] = max(at, ends.get((owner, node), at))
        return ends

    def spent(self, since: float) -> list[Spent]:
        """The GPU-time that ended after `since`: of what was given back, and of what is quarantined."""
        lease, gpu = model.leases.c, model.lease_gpus.c
        is_over = (gpu.released_at > since) | (gpu.released_at.is_(None) & (lease.quarantined_at > since))
        query = (
            sa.select(
                lease.owner, lease.groups, lease.granted_at, lease.quarantined_at, gpu.model, gpu.memory_mib, gpu.share,
                gpu.released_at,
            )
            .join(model.leases, lease.id == gpu.lease_id)
            .where(is_over, lease.granted_at.is_not(None))
        )  # fmt: skip
        with self._transaction() as connection:
            return [_spent(dict(row)) for row in connection.execute(query).mappings()]

    def save(self, changes: Changes) -> None:
        """Write everything or nothing.

        Raises:
            Unavailable: when it cannot be written; nothing was.
            Conflict: the same was asked for at the same moment; nothing was written.
        """
        try:
            with self._transaction() as connection:
                writing.write(connection, changes)
                if changes.events:
                    _prune_events(connection)
        except exc.IntegrityError as error:
            if any(key in _text(error) for key in _SAME_REQUEST):
                raise Conflict("the same was asked for at this very moment: ask again, and you get it") from error
            raise

    def seen_gpus(self) -> list[SeenGpu]:
        """All GPUs that were ever seen and not replaced."""
        with self._transaction() as connection:
            rows = connection.execute(sa.select(model.gpus)).mappings().all()
        return [
            SeenGpu(**{**row, "capability": gpus.parse_capability(row["capability"]) if row["capability"] else None})
            for row in rows
        ]

    def save_seen(self, node: str, seen: Sequence[SeenGpu]) -> None:
        """Replace what was seen on a node; a GPU that moved here is taken from its old node."""
        with self._transaction() as connection:
            uuids = [gpu.uuid for gpu in seen]
            connection.execute(sa.delete(model.gpus).where((model.gpus.c.node == node) | model.gpus.c.uuid.in_(uuids)))
            writing.insert(connection, model.gpus, [_seen_record(gpu) for gpu in seen])

    # -- what administrators say ----------------------------------------------------------------------------------

    def cordons(self) -> list[Cordon]:
        """All cordons."""
        with self._transaction() as connection:
            return [Cordon(**row) for row in connection.execute(sa.select(model.cordons)).mappings()]

    def save_cordon(self, node: str, cordon: Cordon | None) -> None:
        """Replace a node's cordon; None takes it away."""
        with self._transaction() as connection:
            connection.execute(sa.delete(model.cordons).where(model.cordons.c.node == node))
            writing.insert(connection, model.cordons, [] if cordon is None else [convert.cordon_record(cordon)])

    def reservations(self) -> list[ReservationRow]:
        """All reservations, the earliest first."""
        query = sa.select(model.reservations).order_by(model.reservations.c.starts_at, model.reservations.c.id)
        with self._transaction() as connection:
            return [convert.parse_reservation(dict(row)) for row in connection.execute(query).mappings()]

    def save_reservation(self, row: ReservationRow) -> None:
        """Add a reservation."""
        with self._transaction() as connection:
            writing.insert(connection, model.reservations, [convert.reservation_record(row)])

    def drop_reservations(self, ids: Sequence[str]) -> None:
        """Remove reservations."""
        with self._transaction() as connection:
            connection.execute(sa.delete(model.reservations).where(model.reservations.c.id.in_(ids)))

    # -- events ---------------------------------------------------------------------------------------------------

    def save_events(self, events: Sequence[EventRow]) -> None:
        """Add events; the oldest are forgotten."""
        with self._transaction() as connection:
            writing.insert(connection, model.events, [convert.event_record(event) for event in events])
            _prune_events(connection)

    def events(self, *, after: int | None, limit: int, owner: str | None = None) -> list[EventRow]:
        """The next `limit` events after that number, or the newest ones; of one owner, or all; oldest first."""
        seq = model.events.c.seq
        query = sa.select(model.events).limit(limit)
        query = query.order_by(seq.desc()) if after is None else query.where(seq > after).order_by(seq)
        if owner is not None:
            query = query.where(model.events.c.owner == owner)
        with self._transaction() as connection:
            found = [EventRow(**row) for row in connection.execute(query).mappings()]
        return sorted(found, key=lambda event: event.seq)

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except exc.OperationalError as error:
            raise Unavailable(f"the broker's store does not work at present: {_text(error)}") from error


def _text(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error)


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


def _spent(row: Mapping[str, Any]) -> Spent:
    ends = [at for at in (row["released_at"], row["quarantined_at"]) if at is not None]
    return Spent(
        owner=row["owner"],
        groups=frozenset(row["groups"]),
        card=Card(model=row["model"], memory_mib=row["memory_mib"]),
        share=row["share"],
        began_at=row["granted_at"],
        ended_at=min(ends),
    )


def _seen_record(gpu: SeenGpu) -> dict[str, Any]:
    capability = None if gpu.capability is None else ".".join(map(str, gpu.capability))
    return {
        "uuid": gpu.uuid,
        "node": gpu.node,
        "index": gpu.index,
        "model": gpu.model,
        "memory_mib": gpu.memory_mib,
        "capability": capability,
        "is_mig": gpu.is_mig,
        "seen_at": gpu.seen_at,
    }


def _prune_events(connection: sa.Connection) -> None:
    newest = sa.select(sa.func.max(model.events.c.seq)).scalar_subquery()
    connection.execute(sa.delete(model.events).where(model.events.c.seq <= newest - EVENTS_KEPT))
