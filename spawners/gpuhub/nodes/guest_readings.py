"""What a guest may claim about itself: its administrator can change what its GPU agent reports."""

from __future__ import annotations

import re
from collections.abc import Collection

from gpuhub.nodes.status import GpuReading, NodeStatus

#: Maximum number of GPUs, MIG devices included, that a guest may report.
MAX_GPUS = 64
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{4,100}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._()/+-]{0,79}")
_DRIVER = re.compile(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}")
_MAX_TEXT = 300
_MAX_MEMORY_MIB = 1 << 20
#: Fields that the pages and the scheduler read as numbers, with the largest value.
_NUMBERS = {
    "index": 1024,
    "memory_mib": _MAX_MEMORY_MIB,
    "utilisation_percent": 100,
    "memory_utilisation_percent": 100,
    "memory_used_mib": _MAX_MEMORY_MIB,
    "energy_mj": 1 << 60,
    "clocks_event_reasons": 1 << 63,
    "power_w": 10_000,
    "temperature_c": 200,
    "ecc_uncorrected": 1 << 60,
}
REFUSED = "its GPU agent reports what no GPU agent does"


def check_guest(record: NodeStatus, foreign: Collection[str]) -> NodeStatus:
    """Return a guest's status without GPUs of other nodes, and without any where the report makes no sense.

    Args:
        foreign: UUIDs that other nodes report.
    """
    listed = [gpu for gpu in record.gpus if gpu.is_listed]
    is_odd = (
        len(record.gpus) > MAX_GPUS
        or not _is_text(record.driver, _DRIVER)
        or not _is_text(record.gpu_error)
        or not _is_text(record.boot_id)
        or not all(map(_is_plausible, listed))
    )
    if is_odd:
        return record.evolve(gpus=(), xids={}, driver=None, boot_id=None, gpu_error=REFUSED)
    # The texts of errors of its driver would be shown to all.
    return record.evolve(xids={}, gpus=tuple(gpu for gpu in record.gpus if gpu.uuid not in foreign))


def _is_plausible(gpu: GpuReading) -> bool:
    return (
        isinstance(gpu.uuid, str)
        and _UUID.fullmatch(gpu.uuid) is not None
        and _is_text(gpu.model, _MODEL)
        and _is_text(gpu.error)
        and (gpu.parent is None or (isinstance(gpu.parent, str) and _UUID.fullmatch(gpu.parent) is not None))
        and all(_is_number(getattr(gpu, name), most) for name, most in _NUMBERS.items())
    )


def _is_text(value: object, pattern: re.Pattern[str] | None = None) -> bool:
    if value is None:
        return True
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        return False
    return value.isprintable() if pattern is None else pattern.fullmatch(value) is not None


def _is_number(value: object, most: int) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value <= most)
