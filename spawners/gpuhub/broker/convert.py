"""Rows of the tables ↔ frozen values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gpuhub.broker.cordons import Cordon
from gpuhub.broker.rows import Ask, EventRow, JobRow, LeasedGpu, LeaseRow, ReservationRow, WorkerRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose, WorkerState

Record = Mapping[str, Any]

_LEASE_PLAIN = (
    "id", "seq", "key", "owner", "subject", "profile", "since", "epoch", "time_limit_s", "created_at", "granted_at",
    "expires_at", "released_at", "reason", "note", "quarantined_at", "container_id", "slurm_job", "version",
)  # fmt: skip
_GPU_PLAIN = ("node", "index", "model", "memory_mib", "worker", "share", "part", "shed_at", "released_at")
_JOB_PLAIN = (
    "id", "run_id", "owner", "server", "notebook_lease", "lease_id", "image", "nnodes", "min_nnodes",
    "nproc_per_node", "gpus", "array", "preemptions", "checkpoint_until", "detached", "name", "joins",
    "first_worker", "since", "created_at", "started_at", "ended_at", "exit_code", "reason", "version",
)  # fmt: skip
_WORKER_PLAIN = ("index", "node", "container_id", "exit_code", "message")
_EVENT_PLAIN = ("at", "kind", "text", "owner", "lease", "job", "node")
_TUPLES = ("nodes", "gpus", "users", "groups")
_PLAIN_ASK = Ask()


def lease_record(lease: LeaseRow) -> dict[str, Any]:
    """The lease's own row, without its GPUs."""
    return {name: getattr(lease, name) for name in _LEASE_PLAIN} | {
        "purpose": lease.purpose.value,
        "state": lease.state.value,
        "groups": list(lease.groups),
        "nodes": list(lease.nodes),
        "identities": {node: list(identity) for node, identity in lease.identities.items()},
        "ask": ask_record(lease.ask),
    }


def parse_lease(record: Record, gpu_records: Sequence[Record]) -> LeaseRow:
    """The lease of a row and the rows of its GPUs."""
    return LeaseRow(
        **{name: record[name] for name in _LEASE_PLAIN},
        purpose=Purpose(record["purpose"]),
        state=LeaseState(record["state"]),
        groups=tuple(record["groups"]),
        nodes=tuple(record["nodes"]),
        identities={node: (daemon, boot) for node, (daemon, boot) in record["identities"].items()},
        ask=parse_ask(record["ask"]),
        gpus=tuple(parse_gpu(gpu) for gpu in sorted(gpu_records, key=lambda g: (g["worker"], g["index"]))),
    )


def ask_record(ask: Ask) -> dict[str, Any]:
    """What differs from the plainest ask of all."""
    given = {field.name: getattr(ask, field.name) for field in fields(Ask)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value != getattr(_PLAIN_ASK, name)
    }


def parse_ask(record: Record) -> Ask:
    """The ask of `ask_record`, or as the first version wrote it, with one `model`."""
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name != "model"
    }
    if record.get("model"):
        given["models"] = (record["model"],)
    return Ask(**given)


def gpu_record(lease_id: str, gpu: LeasedGpu) -> dict[str, Any]:
    """The row of one GPU of a lease."""
    return {"lease_id": lease_id, "gpu_uuid": gpu.uuid} | {name: getattr(gpu, name) for name in _GPU_PLAIN}


def held_record(lease_id: str, gpu: LeasedGpu) -> dict[str, Any]:
    """The row that keeps a GPU, or a part of it, from being given twice."""
    return {"gpu_uuid": gpu.uuid, "part": gpu.part, "share": gpu.share, "lease_id": lease_id}


def parse_gpu(record: Record) -> LeasedGpu:
    """One GPU of a lease."""
    return LeasedGpu(uuid=record["gpu_uuid"], **{name: record[name] for name in _GPU_PLAIN})


def job_record(job: JobRow) -> dict[str, Any]:
    """The job's own row, without its workers."""
    return {name: getattr(job, name) for name in _JOB_PLAIN} | {"state": job.state.value}


def parse_job(record: Record, worker_records: Sequence[Record]) -> JobRow:
    """The job of a row and the rows of its workers."""
    return JobRow(
        **{name: record[name] for name in _JOB_PLAIN},
        state=JobState(record["state"]),
        workers=tuple(parse_worker(row) for row in sorted(worker_records, key=lambda w: w["index"])),
    )


def worker_record(job_id: str, worker: WorkerRow) -> dict[str, Any]:
    """The row of one worker."""
    plain = {name: getattr(worker, name) for name in _WORKER_PLAIN}
    return {"job_id": job_id, "state": worker.state.value} | plain


def parse_worker(record: Record) -> WorkerRow:
    """One worker of a job."""
    return WorkerRow(state=WorkerState(record["state"]), **{name: record[name] for name in _WORKER_PLAIN})


def cordon_record(cordon: Cordon) -> dict[str, Any]:
    """The row of a cordon."""
    return {field.name: getattr(cordon, field.name) for field in fields(Cordon)}


def reservation_record(row: ReservationRow) -> dict[str, Any]:
    """The row of a reservation."""
    given = {field.name: getattr(row, field.name) for field in fields(ReservationRow)}
    return {name: list(value) if name in _TUPLES else value for name, value in given.items()}


def parse_reservation(record: Record) -> ReservationRow:
    """The reservation of a row."""
    given: dict[str, Any] = {name: tuple(value) if name in _TUPLES else value for name, value in record.items()}
    return ReservationRow(**given)


def event_record(event: EventRow) -> dict[str, Any]:
    """The row of an event; the store gives its number."""
    return {name: getattr(event, name) for name in _EVENT_PLAIN}
