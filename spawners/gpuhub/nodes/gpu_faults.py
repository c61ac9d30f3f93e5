"""Faults of GPUs that do not end by themselves: critical Xid errors, and a PCIe link that has become slower.

```
               ┌──────────── it occurs again ────────────┐
               ▼                                         │
 none ──▶ open: the GPU is not granted ──accept──▶ accepted: it is granted
               │                                         │
               └───────── rebooted, and read without an error ──▶ none
```

A later reading without an error proves nothing, since the driver reports an Xid error once, and an idle GPU does not
show its link. The proof is a reading after a reboot of the machine, which resets its GPUs; or an administrator's
confirmation that the GPU was reset, checked or should be used as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpuhub.nodes.agent import CRITICAL_XIDS
from gpuhub.nodes.status import GpuFault, GpuReading, NodeStatus, PcieLink

#: Kind and code of a fault.
_FaultKey = tuple[Literal["xid", "link"], int]
_REMEDY = "reset the GPU or restart the node"
#: What NVIDIA's list of Xid errors says of those after which the GPU must be reset.
_XID_TEXTS = {
    48: "uncorrectable memory error",
    62: "its microcontroller has stopped",
    64: "a failing memory row could not be recorded for replacement",
    74: "NVLink error",
    79: "it has fallen off the bus",
    95: "uncontained memory error",
    119: "its GSP firmware does not answer",
    120: "its GSP firmware has failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """What is stored of one GPU."""

    #: UUID of the whole GPU.
    gpu: str
    node: str
    #: Faults, with those that were accepted: the GPU agent reports their errors until it is started again.
    faults: tuple[GpuFault, ...] = ()
    #: The fastest link that it had under load in this node; None before the first load.
    best_link: PcieLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChanges:
    """How a reading changes the records of a node's GPUs."""

    records: tuple[GpuRecord, ...] = ()
    #: Faults that were not open before.
    began: tuple[GpuFault, ...] = ()


def list_open(faults: Iterable[GpuFault]) -> tuple[GpuFault, ...]:
    """Return the faults because of which a GPU is not granted."""
    return tuple(fault for fault in faults if fault.accepted_by is None)


def describe_faults(faults: Sequence[GpuFault]) -> str | None:
    """Return the open faults of a GPU as one text for users; None for none."""
    return "; ".join(fault.text for fault in list_open(faults)) or None


def find_changes(node: NodeStatus, records: Mapping[str, GpuRecord], now: float) -> RecordChanges:
    """Compare the last reading of a node with the records of its GPUs.

    Args:
        node: The node as last read.
        records: Known records by the UUID of the whole GPU; of this node's GPUs, whatever node they were in before.
        now: Seconds since 1970.
    """
    changed: list[GpuRecord] = []
    began: list[GpuFault] = []
    for gpu in {gpu.whole_uuid: gpu for gpu in node.gpus}.values():
        before = records.get(gpu.whole_uuid, GpuRecord(gpu=gpu.whole_uuid, node=node.name))
        after = _update_record(before, node, gpu, now)
        if after != before:
            changed.append(after)
        known = set(list_open(before.faults))
        began += [fault for fault in list_open(after.faults) if fault not in known]
    return RecordChanges(records=tuple(changed), began=tuple(began))


def accept(record: GpuRecord, gpu: GpuReading, by: str) -> GpuRecord:
    """Return the record of a GPU that is granted again, as an administrator has accepted; its link counts as right."""
    faults = tuple(replace(fault, accepted_by=fault.accepted_by or by) for fault in record.faults)
    return replace(record, faults=faults, best_link=gpu.loaded_link)


def _update_record(record: GpuRecord, node: NodeStatus, gpu: GpuReading, now: float) -> GpuRecord:
    if record.node != node.name and gpu.error is None:
        # The card was moved, so that its slot is another one.
        record = replace(record, node=node.name, best_link=None)
    faults: dict[_FaultKey, GpuFault] = {
        (fault.kind, fault.code): fault for fault in record.faults if not _is_over(fault, node.boot_id, gpu)
    }
    for error in node.xids.get(gpu.whole_uuid, ()):
        key: _FaultKey = ("xid", error.code)
        if error.code in CRITICAL_XIDS and (key not in faults or faults[key].occurred_at != error.last_at):
            faults[key] = GpuFault(
                gpu=gpu.whole_uuid,
                node=node.name,
                kind="xid",
                code=error.code,
                occurred_at=error.last_at,
                noticed_at=now,
                boot_id=node.boot_id,
                text=f"Xid {error.code}, {_XID_TEXTS[error.code]}: {_REMEDY}",
            )
    link, best = gpu.loaded_link, record.best_link
    if link is None:
        return replace(record, faults=tuple(faults.values()))
    known = faults.get(("link", 0))
    if best is not None and link.is_below(best) and (known is None or known.accepted_by is not None):
        faults["link", 0] = GpuFault(
            gpu=gpu.whole_uuid,
            node=node.name,
            kind="link",
            code=0,
            occurred_at=now,
            noticed_at=now,
            boot_id=node.boot_id,
            text=f"its PCIe link under load is {link}, and was {best}: check its seat, riser and slot",
        )
    best = (
        link
        if best is None
        else PcieLink(generation=max(link.generation, best.generation), width=max(link.width, best.width))
    )
    return replace(record, faults=tuple(faults.values()), best_link=best)


def _is_over(fault: GpuFault, boot_id: str | None, gpu: GpuReading) -> bool:
    """Return whether the machine has been rebooted since, or the card moved to another one, and the GPU can be read."""
    return fault.boot_id is not None and boot_id is not None and fault.boot_id != boot_id and gpu.error is None
