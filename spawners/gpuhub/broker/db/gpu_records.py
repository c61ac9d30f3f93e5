"""Statements on the records of GPUs: their faults, and the fastest link of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields

import sqlalchemy as sa

from gpuhub.broker.db import tables, writer
from gpuhub.nodes.gpu_faults import GpuRecord
from gpuhub.nodes.status import GpuFault, PcieLink

_FAULT_PLAIN = tuple(field.name for field in fields(GpuFault) if field.name != "gpu")


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
