"""Rows of the tables ↔ frozen values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuhub.broker.rows import Ask, JobRow, LeasedGpu, LeaseRow, WorkerRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose, WorkerState

Record = Mapping[str, Any]

_LEASE_PLAIN = (
    "id", "seq", "key", "owner", "subject", "profile", "since", "epoch", "time_limit_s", "created_at", "granted_at",
    "expires_at", "released_at", "reason", "container_id", "version",
)  # fmt: skip
_JOB_PLAIN = (
    "id", "run_id", "owner", "server", "notebook_lease", "lease_id", "image", "nnodes", "nproc_per_node", "since",
    "created_at", "ended_at", "reason", "version",
)  # fmt: skip


def lease_record(lease: LeaseRow) -> dict[str, Any]:
    """The lease's own row, without its GPUs."""
    ask = lease.ask
    return {name: getattr(lease, name) for name in _LEASE_PLAIN} | {
        "purpose": lease.purpose.value,
        "state": lease.state.value,
        "nodes": list(lease.nodes),
        "ask": {
            "nodes": ask.nodes,
            "gpus_per_node": ask.gpus_per_node,
            "model": ask.model,
            "least_memory_mib": ask.least_memory_mib,
            "exclude": list(ask.exclude),
        },
    }


def parse_lease(record: Record, gpu_records: Sequence[Record]) -> LeaseRow:
    """The lease of a row and the rows of its GPUs."""
    ask = record["ask"]
    return LeaseRow(
        **{name: record[name] for name in _LEASE_PLAIN},
        purpose=Purpose(record["purpose"]),
        state=LeaseState(record["state"]),
        nodes=tuple(record["nodes"]),
        ask=Ask(**{**ask, "exclude": tuple(ask["exclude"])}),
        gpus=tuple(parse_gpu(gpu) for gpu in sorted(gpu_records, key=lambda g: (g["worker"], g["index"]))),
    )


def gpu_record(lease_id: str, gpu: LeasedGpu) -> dict[str, Any]:
    """The row of one GPU of a lease."""
    return {
        "lease_id": lease_id,
        "gpu_uuid": gpu.uuid,
        "node": gpu.node,
        "index": gpu.index,
        "model": gpu.model,
        "memory_mib": gpu.memory_mib,
        "worker": gpu.worker,
        "released_at": gpu.released_at,
    }


def parse_gpu(record: Record) -> LeasedGpu:
    """One GPU of a lease."""
    return LeasedGpu(
        uuid=record["gpu_uuid"],
        node=record["node"],
        index=record["index"],
        model=record["model"],
        memory_mib=record["memory_mib"],
        worker=record["worker"],
        released_at=record["released_at"],
    )


def job_record(job: JobRow) -> dict[str, Any]:
    """The job's own row, without its workers."""
    return {name: getattr(job, name) for name in _JOB_PLAIN} | {"state": job.state.value}


def parse_job(record: Record, worker_records: Sequence[Record]) -> JobRow:
    """The job of a row and the rows of its workers."""
    return JobRow(
        **{name: record[name] for name in _JOB_PLAIN},
        state=JobState(record["state"]),
        workers=tuple(
            WorkerRow(
                index=row["index"],
                node=row["node"],
                state=WorkerState(row["state"]),
                container_id=row["container_id"],
                exit_code=row["exit_code"],
                message=row["message"],
            )
            for row in sorted(worker_records, key=lambda w: w["index"])
        ),
    )


def worker_record(job_id: str, worker: WorkerRow) -> dict[str, Any]:
    """The row of one worker."""
    return {
        "job_id": job_id,
        "index": worker.index,
        "node": worker.node,
        "state": worker.state.value,
        "container_id": worker.container_id,
        "exit_code": worker.exit_code,
        "message": worker.message,
    }
