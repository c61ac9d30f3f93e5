"""The records of all GPUs: faults that are not over, and each one's fastest link. They are stored before they count."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from gpuhub.broker.db.store import Store
from gpuhub.nodes import gpu_faults
from gpuhub.nodes.gpu_faults import GpuRecord
from gpuhub.nodes.status import GpuFault, GpuReading, NodeStatus


class GpuRecords:
    """The records by the UUID of the whole GPU."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: Mapping[str, GpuRecord] = store.load_gpu_records()
        # A reading and an administrator may change the same record.
        self._lock = asyncio.Lock()

    def find_faults(self, node: NodeStatus) -> Mapping[str, tuple[GpuFault, ...]]:
        """Return the open faults of a node's GPUs."""
        records = (self._records.get(gpu.whole_uuid) for gpu in node.gpus)
        open_faults = {record.gpu: gpu_faults.list_open(record.faults) for record in records if record is not None}
        return {gpu: faults for gpu, faults in open_faults.items() if faults}

    async def update(self, node: NodeStatus, duplicates: Collection[str], now: float) -> Sequence[GpuFault]:
        """Process the last reading of a node; return the faults that it shows for the first time.

        Args:
            node: The node as last read.
            duplicates: UUIDs that several nodes report: nobody knows whose faults those are.
            now: Seconds since 1970.

        Raises:
            Unavailable: The store cannot be written; nothing has changed then.
        """
        node = node.evolve(gpus=tuple(gpu for gpu in node.gpus if gpu.uuid not in duplicates))
        async with self._lock:
            changes = gpu_faults.find_changes(node, self._records, now)
            await self._save(changes.records)
            return changes.began

    async def accept(self, gpu: GpuReading, by: str) -> bool:
        """Grant a GPU again, which an administrator has accepted; return whether it had open faults."""
        async with self._lock:
            record = self._records.get(gpu.whole_uuid)
            if record is None or not gpu_faults.list_open(record.faults):
                return False
            await self._save([gpu_faults.accept(record, gpu, by)])
            return True

    async def remove_other_nodes(self, known: Collection[str]) -> None:
        """Delete the records of GPUs whose nodes are no longer in the settings."""
        gone = [record.gpu for record in self._records.values() if record.node not in known]
        if gone:
            await asyncio.to_thread(self._store.delete_gpu_records, gone)
            self._records = {uuid: record for uuid, record in self._records.items() if uuid not in gone}

    async def _save(self, records: Sequence[GpuRecord]) -> None:
        if records:
            await asyncio.to_thread(self._store.save_gpu_records, records)
            self._records = {**self._records, **{record.gpu: record for record in records}}
