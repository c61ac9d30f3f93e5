"""Records of the tables and their values, and the statements that write a transaction's changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import sqlalchemy as sa

from gpuhub.broker.db import tables
from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose, SuspensionState, WorkerState
from gpuhub.domain.models import (
    ContainerSize,
    EventRow,
    JobRow,
    LeasedGpu,
    LeaseRow,
    ReservationRow,
    ResourceRequest,
    Suspension,
    WorkerRow,
)
from gpuhub.nodes.status import Cordon

Record = Mapping[str, Any]

_LEASE_PLAIN = (
    "id", "seq", "key", "owner", "subject", "profile", "since", "epoch", "time_limit_s", "created_at", "granted_at",
    "expires_at", "kept_from", "kept_until", "released_at", "reason", "note", "quarantined_at", "container_id",
    "slurm_job", "held_from", "is_held", "is_persistent", "image", "version",
)  # fmt: skip
_GPU_PLAIN = ("node", "index", "model", "memory_mib", "worker", "share", "part", "released_at")
_JOB_PLAIN = (
    "id", "run_id", "owner", "server", "notebook_lease", "lease_id", "image", "nnodes", "min_nnodes",
    "nproc_per_node", "gpus", "array", "array_limit", "after", "max_retries", "retries", "sleeps",
    "times_asleep", "has_failed", "preemptions", "checkpoint_until", "detached", "name", "port", "joins",
    "first_worker", "since", "created_at", "started_at", "ended_at", "exit_code", "reason", "version",
)  # fmt: skip
_WORKER_PLAIN = ("index", "node", "container_id", "exit_code", "message")
_EVENT_PLAIN = ("at", "kind", "text", "owner", "lease", "job", "node")
_TUPLES = ("nodes", "gpus", "users", "groups")
_DEFAULT_RESOURCES = ResourceRequest()


def build_lease_record(lease: LeaseRow) -> dict[str, Any]:
    """Return the record of a lease without its GPUs."""
    return {name: getattr(lease, name) for name in _LEASE_PLAIN} | {
        "purpose": lease.purpose.value,
        "state": lease.state.value,
        "groups": list(lease.groups),
        "losses": list(lease.losses),
        "nodes": list(lease.nodes),
        "identities": {node: list(identity) for node, identity in lease.identities.items()},
        "sizes": {node: [size.cpu_milli, size.memory_mib] for node, size in lease.sizes.items()},
        "ask": build_resources_record(lease.resources),
        "suspension": None if lease.suspension is None else asdict(lease.suspension),
    }


def parse_lease(record: Record, gpu_records: Sequence[Record]) -> LeaseRow:
    """Return the lease of a record and the records of its GPUs."""
    return LeaseRow(
        **{name: record[name] for name in _LEASE_PLAIN},
        purpose=Purpose(record["purpose"]),
        state=LeaseState(record["state"]),
        groups=tuple(record["groups"]),
        losses=tuple(record["losses"]),
        nodes=tuple(record["nodes"]),
        identities={node: (daemon, boot) for node, (daemon, boot) in record["identities"].items()},
        sizes={
            node: ContainerSize(cpu_milli=cpu, memory_mib=memory) for node, (cpu, memory) in record["sizes"].items()
        },
        resources=parse_resources(record["ask"]),
        suspension=None if record["suspension"] is None else parse_suspension(record["suspension"]),
        gpus=tuple(parse_gpu(gpu) for gpu in sorted(gpu_records, key=lambda g: (g["worker"], g["index"]))),
    )


def parse_suspension(record: Record) -> Suspension:
    return Suspension(**{**record, "state": SuspensionState(record["state"])})


def build_resources_record(resources: ResourceRequest) -> dict[str, Any]:
    """Return the fields of a resource request that differ from the defaults."""
    values = {field.name: getattr(resources, field.name) for field in fields(ResourceRequest)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != getattr(_DEFAULT_RESOURCES, name)
    }


def parse_resources(record: Record) -> ResourceRequest:
    """Parse `build_resources_record`'s result, or that of the first version, with one `model`."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name != "model"
    }
    if record.get("model"):
        values["models"] = (record["model"],)
    return ResourceRequest(**values)


def build_gpu_record(lease_id: str, gpu: LeasedGpu) -> dict[str, Any]:
    plain = {name: getattr(gpu, name) for name in _GPU_PLAIN}
    return {"lease_id": lease_id, "gpu_uuid": gpu.uuid, "shed_at": gpu.shrink_requested_at} | plain


def build_held_record(lease_id: str, gpu: LeasedGpu) -> dict[str, Any]:
    """Return the record that prevents a second grant of a GPU or GPU share."""
    return {"gpu_uuid": gpu.uuid, "part": gpu.part, "share": gpu.share, "lease_id": lease_id}


def parse_gpu(record: Record) -> LeasedGpu:
    plain = {name: record[name] for name in _GPU_PLAIN}
    return LeasedGpu(uuid=record["gpu_uuid"], shrink_requested_at=record["shed_at"], **plain)


def build_job_record(job: JobRow) -> dict[str, Any]:
    """Return the record of a job without its workers."""
    return {name: getattr(job, name) for name in _JOB_PLAIN} | {
        "state": job.state.value,
        "port_users": list(job.port_users),
    }


def parse_job(record: Record, worker_records: Sequence[Record]) -> JobRow:
    """Return the job of a record and the records of its workers."""
    return JobRow(
        **{name: record[name] for name in _JOB_PLAIN},
        state=JobState(record["state"]),
        port_users=tuple(record["port_users"]),
        workers=tuple(parse_worker(row) for row in sorted(worker_records, key=lambda w: w["index"])),
    )


def build_worker_record(job_id: str, worker: WorkerRow) -> dict[str, Any]:
    plain = {name: getattr(worker, name) for name in _WORKER_PLAIN}
    return {"job_id": job_id, "state": worker.state.value} | plain


def parse_worker(record: Record) -> WorkerRow:
    return WorkerRow(state=WorkerState(record["state"]), **{name: record[name] for name in _WORKER_PLAIN})


def build_cordon_record(cordon: Cordon) -> dict[str, Any]:
    return {field.name: getattr(cordon, field.name) for field in fields(Cordon)}


def build_reservation_record(row: ReservationRow) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in fields(ReservationRow)}
    return {name: list(value) if name in _TUPLES else value for name, value in values.items()}


def parse_reservation(record: Record) -> ReservationRow:
    values: dict[str, Any] = {name: tuple(value) if name in _TUPLES else value for name, value in record.items()}
    return ReservationRow(**values)


def build_event_record(event: EventRow) -> dict[str, Any]:
    """Return the record of an event; the store sets its number."""
    return {name: getattr(event, name) for name in _EVENT_PLAIN}


Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes of one transaction: pairs of the row before (None if new) and after, and events."""

    leases: Sequence[tuple[LeaseRow | None, LeaseRow]] = ()
    jobs: Sequence[tuple[JobRow | None, JobRow]] = ()
    events: Sequence[EventRow] = ()

    def __bool__(self) -> bool:
        return bool(self.leases or self.jobs or self.events)


@dataclass(slots=True)
class _GpuChanges:
    """GPU records of all changed leases, by kind of change."""

    new: Records = field(default_factory=list)
    changed: Records = field(default_factory=list)
    held: Records = field(default_factory=list)
    freed: Records = field(default_factory=list)

    def add(self, before: LeaseRow | None, after: LeaseRow) -> None:
        """Compare a lease's GPUs with those that are stored."""
        if before is not None and before.gpus is after.gpus:
            return
        known = {} if before is None else {gpu.uuid: gpu for gpu in before.gpus}
        for gpu in after.gpus:
            self._add_gpu(after.id, known.get(gpu.uuid), gpu)

    def _add_gpu(self, lease_id: str, old: LeasedGpu | None, new: LeasedGpu) -> None:
        if old == new:
            return
        (self.new if old is None else self.changed).append(build_gpu_record(lease_id, new))
        was_held = old is not None and old.released_at is None
        if was_held and new.released_at is not None:
            self.freed.append(build_held_record(lease_id, new))
        elif not was_held and new.released_at is None:
            self.held.append(build_held_record(lease_id, new))


def write_changes(connection: sa.Connection, changes: Changes) -> None:
    """Write all changes, within the caller's transaction."""
    _write_rows(connection, tables.leases, [(before, build_lease_record(row)) for before, row in changes.leases])
    gpus = _GpuChanges()
    for before, lease in changes.leases:
        gpus.add(before, lease)
    _write_gpus(connection, gpus)
    _write_rows(connection, tables.jobs, [(before, build_job_record(row)) for before, row in changes.jobs])
    _write_workers(connection, changes.jobs)
    insert_rows(connection, tables.events, [build_event_record(event) for event in changes.events])


def insert_rows(connection: sa.Connection, table: sa.Table, records: Records) -> None:
    if records:
        connection.execute(sa.insert(table), records)


def _update_rows(connection: sa.Connection, table: sa.Table, keys: Sequence[str], records: Records) -> None:
    """Replace rows with the same keys."""
    if not records:
        return
    same = sa.and_(*(table.c[key] == sa.bindparam(f"_{key}") for key in keys))
    values: dict[str, Any] = {name: sa.bindparam(f"_{name}") for name in records[0] if name not in keys}
    rows = [{f"_{name}": value for name, value in record.items()} for record in records]
    connection.execute(sa.update(table).where(same).values(values), rows)


def _delete_rows(connection: sa.Connection, table: sa.Table, keys: Sequence[str], records: Records) -> None:
    if records:
        same = sa.and_(*(table.c[key] == sa.bindparam(f"_{key}") for key in keys))
        connection.execute(sa.delete(table).where(same), [{f"_{key}": row[key] for key in keys} for row in records])


def _write_rows(
    connection: sa.Connection, table: sa.Table, rows: Iterable[tuple[object | None, dict[str, Any]]]
) -> None:
    rows = list(rows)
    insert_rows(connection, table, [record for before, record in rows if before is None])
    _update_rows(connection, table, ["id"], [record for before, record in rows if before is not None])


def _write_gpus(connection: sa.Connection, gpus: _GpuChanges) -> None:
    # Released GPUs first: another lease of the same transaction may get them.
    _update_rows(connection, tables.lease_gpus, ["lease_id", "gpu_uuid"], gpus.changed)
    _delete_rows(connection, tables.held_gpus, ["gpu_uuid", "part", "lease_id"], gpus.freed)
    if gpus.freed:
        is_held = sa.exists().where(tables.held_gpus.c.gpu_uuid == tables.gpu_modes.c.gpu_uuid)
        query = sa.delete(tables.gpu_modes).where(tables.gpu_modes.c.gpu_uuid == sa.bindparam("_gpu_uuid"), ~is_held)
        connection.execute(query, [{"_gpu_uuid": record["gpu_uuid"]} for record in gpus.freed])
    insert_rows(connection, tables.lease_gpus, gpus.new)
    if gpus.held:
        connection.execute(_ADD_MODE, [{"uuid": row["gpu_uuid"], "share": row["share"]} for row in gpus.held])
    insert_rows(connection, tables.held_gpus, gpus.held)


def _build_mode_insert() -> sa.Insert:
    """Return the statement that adds the mode of a GPU; an existing one stays, and `held_gpus` refuses another."""
    modes = tables.gpu_modes
    uuid, share = sa.bindparam("uuid", type_=sa.String(80)), sa.bindparam("share", type_=sa.Integer)
    is_new = ~sa.exists().where(modes.c.gpu_uuid == uuid)
    # PostgreSQL needs the types of values that no column gives.
    values = sa.select(sa.cast(uuid, sa.String(80)), sa.cast(share, sa.Integer)).where(is_new)
    return sa.insert(modes).from_select(["gpu_uuid", "share"], values)


_ADD_MODE = _build_mode_insert()


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
                (changed if worker.index in known else new).append(build_worker_record(after.id, worker))
    _delete_rows(connection, tables.workers, ["job_id", "index"], gone)
    insert_rows(connection, tables.workers, new)
    _update_rows(connection, tables.workers, ["job_id", "index"], changed)
