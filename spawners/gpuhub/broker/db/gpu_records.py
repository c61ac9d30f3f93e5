"""Statements on GPUs: as each was last read, and records of their faults and fastest links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from gpuhub.broker.db import tables, writer
from gpuhub.common.gpu import parse_capability
from gpuhub.nodes.gpu_faults import GpuRecord
from gpuhub.nodes.status import GpuFault, PcieLink

_FAULT_PLAIN = tuple(field.name for field in fields(GpuFault) if field.name != "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """A GPU as it was last read."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    capability: tuple[int, int] | None = None
    is_mig: bool = False
    seen_at: float


def load_seen_gpus(connection: sa.Connection) -> list[SeenGpu]:
    """Return all GPUs that were ever read and not replaced."""
    return [
        SeenGpu(**{**row, "capability": parse_capability(row["capability"]) if row["capability"] else None})
        for row in connection.execute(sa.select(tables.gpus)).mappings()
    ]


def save_seen_gpus(connection: sa.Connection, node: str, seen: Sequence[SeenGpu]) -> None:
    """Replace the GPUs of a node; a GPU that was moved here leaves its old node."""
    uuids = [gpu.uuid for gpu in seen]
    connection.execute(sa.delete(tables.gpus).where((tables.gpus.c.node == node) | tables.gpus.c.uuid.in_(uuids)))
    writer.insert_rows(connection, tables.gpus, [_seen_record(gpu) for gpu in seen])


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


def load_gpu_records(connection: sa.Connection) -> dict[str, GpuRecord]:
    """Return the records of all GPUs by UUID."""
    faults: defaultdict[str, list[GpuFault]] = defaultdict(list)
    for row in connection.execute(sa.select(tables.gpu_faults)).mappings():
        values = {name: row[name] for name in _FAULT_PLAIN}
        faults[row["gpu_uuid"]].append(GpuFault(gpu=row["gpu_uuid"], **values))
    return {
        row["gpu_uuid"]: GpuRecord(
            gpu=row["gpu_uuid"],
            node=row["node"],
            faults=tuple(faults[row["gpu_uuid"]]),
            best_link=None
            if row["link_width"] is None
            else PcieLink(generation=row["link_generation"], width=row["link_width"]),
        )
        for row in connection.execute(sa.select(tables.gpu_records)).mappings()
    }


def save_gpu_records(connection: sa.Connection, records: Sequence[GpuRecord]) -> None:
    """Replace the records of these GPUs."""
    delete_gpu_records(connection, [record.gpu for record in records])
    writer.insert_rows(
        connection,
        tables.gpu_records,
        [
            {
                "gpu_uuid": record.gpu,
                "node": record.node,
                "link_generation": record.best_link and record.best_link.generation,
                "link_width": record.best_link and record.best_link.width,
            }
            for record in records
        ],
    )
    faults = [fault for record in records for fault in record.faults]
    values = [{name: getattr(fault, name) for name in _FAULT_PLAIN} | {"gpu_uuid": fault.gpu} for fault in faults]
    writer.insert_rows(connection, tables.gpu_faults, values)


def delete_gpu_records(connection: sa.Connection, gpus: Sequence[str]) -> None:
    """Delete the records of these GPUs."""
    for table in (tables.gpu_faults, tables.gpu_records):
        connection.execute(sa.delete(table).where(table.c.gpu_uuid.in_(gpus)))
