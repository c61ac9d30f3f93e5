"""What one transaction of the ledger writes: only what changed, in as few statements as there are kinds of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from gpuhub.broker import convert, model
from gpuhub.broker.rows import EventRow, JobRow, LeasedGpu, LeaseRow

Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one transaction writes: pairs of the value before (None when new) and after, and what is told of it."""

    leases: Sequence[tuple[LeaseRow | None, LeaseRow]] = ()
    jobs: Sequence[tuple[JobRow | None, JobRow]] = ()
    events: Sequence[EventRow] = ()

    def __bool__(self) -> bool:
        return bool(self.leases or self.jobs or self.events)


@dataclass(slots=True)
class _Gpus:
    """GPUs of all changed leases, by what happens to them."""

    new: Records = field(default_factory=list)
    changed: Records = field(default_factory=list)
    held: Records = field(default_factory=list)
    freed: Records = field(default_factory=list)

    def add(self, before: LeaseRow | None, after: LeaseRow) -> None:
        """Compare a lease's GPUs with what was written of them."""
        if before is not None and before.gpus is after.gpus:
            return
        known = {} if before is None else {gpu.uuid: gpu for gpu in before.gpus}
        for gpu in after.gpus:
            self._add_gpu(after.id, known.get(gpu.uuid), gpu)

    def _add_gpu(self, lease_id: str, old: LeasedGpu | None, new: LeasedGpu) -> None:
        if old == new:
            return
        (self.new if old is None else self.changed).append(convert.gpu_record(lease_id, new))
        was_held = old is not None and old.released_at is None
        if was_held and new.released_at is not None:
            self.freed.append(convert.held_record(lease_id, new))
        elif not was_held and new.released_at is None:
            self.held.append(convert.held_record(lease_id, new))


def write(connection: sa.Connection, changes: Changes) -> None:
    """Write it all; the caller's transaction makes it one step."""
    _write_rows(connection, model.leases, [(before, convert.lease_record(row)) for before, row in changes.leases])
    gpus = _Gpus()
    for before, lease in changes.leases:
        gpus.add(before, lease)
    _write_gpus(connection, gpus)
    _write_rows(connection, model.jobs, [(before, convert.job_record(row)) for before, row in changes.jobs])
    _write_workers(connection, changes.jobs)
    insert(connection, model.events, [convert.event_record(event) for event in changes.events])


def insert(connection: sa.Connection, table: sa.Table, records: Records) -> None:
    """Add rows."""
    if records:
        connection.execute(sa.insert(table), records)


def _update(connection: sa.Connection, table: sa.Table, keys: Sequence[str], records: Records) -> None:
    """Replace rows of the same keys."""
    if not records:
        return
    same = sa.and_(*(table.c[key] == sa.bindparam(f"_{key}") for key in keys))
    values: dict[str, Any] = {name: sa.bindparam(f"_{name}") for name in records[0] if name not in keys}
    rows = [{f"_{name}": value for name, value in record.items()} for record in records]
    connection.execute(sa.update(table).where(same).values(values), rows)


def _delete(connection: sa.Connection, table: sa.Table, keys: Sequence[str], records: Records) -> None:
    if records:
        same = sa.and_(*(table.c[key] == sa.bindparam(f"_{key}") for key in keys))
        connection.execute(sa.delete(table).where(same), [{f"_{key}": row[key] for key in keys} for row in records])


def _write_rows(
    connection: sa.Connection, table: sa.Table, rows: Iterable[tuple[object | None, dict[str, Any]]]
) -> None:
    rows = list(rows)
    insert(connection, table, [record for before, record in rows if before is None])
    _update(connection, table, ["id"], [record for before, record in rows if before is not None])


def _write_gpus(connection: sa.Connection, gpus: _Gpus) -> None:
    # GPUs given back first: another lease of the same transaction may get them.
    _update(connection, model.lease_gpus, ["lease_id", "gpu_uuid"], gpus.changed)
    _delete(connection, model.held_gpus, ["gpu_uuid", "part", "lease_id"], gpus.freed)
    if gpus.freed:
        is_held = sa.exists().where(model.held_gpus.c.gpu_uuid == model.gpu_modes.c.gpu_uuid)
        query = sa.delete(model.gpu_modes).where(model.gpu_modes.c.gpu_uuid == sa.bindparam("_gpu_uuid"), ~is_held)
        connection.execute(query, [{"_gpu_uuid": record["gpu_uuid"]} for record in gpus.freed])
    insert(connection, model.lease_gpus, gpus.new)
    if gpus.held:
        connection.execute(_ADD_MODE, [{"uuid": row["gpu_uuid"], "share": row["share"]} for row in gpus.held])
    insert(connection, model.held_gpus, gpus.held)


#: A mode that is there already stays; whoever comes with another one is refused by `held_gpus`.
_ADD_MODE = sa.text(
    "INSERT INTO gpu_modes (gpu_uuid, share) SELECT :uuid, :share "
    "WHERE NOT EXISTS (SELECT 1 FROM gpu_modes WHERE gpu_uuid = :uuid)"
)


def _write_workers(connection: sa.Connection, jobs: Sequence[tuple[JobRow | None, JobRow]]) -> None:
    gone: Records = []
    new: Records = []
    changed: Records = []
    for before, after in jobs:
        known = {} if before is None else {worker.index: worker for worker in before.workers}
        kept = {worker.index for worker in after.workers}
        gone += [{"job_id": after.id, "index": index} for index in known if index not in kept]
        for worker in after.workers:
            if known.get(worker.index) != worker:
                (changed if worker.index in known else new).append(convert.worker_record(after.id, worker))
    _delete(connection, model.workers, ["job_id", "index"], gone)
    insert(connection, model.workers, new)
    _update(connection, model.workers, ["job_id", "index"], changed)
