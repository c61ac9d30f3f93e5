"""Want of memory, in words: what torch says of a GPU's, and what the kernel does about a container's. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_GIB = {"bytes": 1024.0**-3, "KiB": 1024.0**-2, "MiB": 1024.0**-1, "GiB": 1.0, "TiB": 1024.0}
_GPU = re.compile(rf"CUDA out of memory\. Tried to allocate {_SIZE}")
#: `GPU 0 has a total capacity of 31.36 GiB of which 419.06 MiB is free.`
_CAPACITY = re.compile(rf"GPU (\d+) has a total capacity of {_SIZE} of which {_SIZE} is free")
#: As torch wrote before 2.1: `(GPU 0; 31.36 GiB total capacity; 30.00 GiB already allocated; 419.06 MiB free; …`.
_OLD_CAPACITY = re.compile(rf"\(GPU (\d+); {_SIZE} total capacity;.*?{_SIZE} free")
#: `8.00 GiB allowed;`: of a GPU that is shared.
_ALLOWED = re.compile(rf"{_SIZE} allowed;")


@dataclass(frozen=True, kw_only=True)
class GpuShortage:
    """What torch told when a GPU had not enough memory; sizes in GiB, None where it did not tell."""

    #: As torch writes it, such as `2.00 GiB`.
    asked: str
    free: float | None = None
    total: float | None = None
    #: The most that this process may have, where that is less than all.
    allowed: float | None = None
    #: As the process counts its GPUs.
    index: int | None = None


def find_gpu_shortage(error: str) -> GpuShortage | None:
    """From the last line of an error that is torch's own; None for any other error."""
    found = list(_GPU.finditer(error))
    if not found:
        return None
    said = error[found[-1].start() :]
    capacity = _CAPACITY.search(said) or _OLD_CAPACITY.search(said)
    allowed = _ALLOWED.search(said)
    return GpuShortage(
        asked=f"{found[-1][1]} {found[-1][2]}",
        index=int(capacity[1]) if capacity else None,
        total=_gib(capacity[2], capacity[3]) if capacity else None,
        free=_gib(capacity[4], capacity[5]) if capacity else None,
        allowed=_gib(allowed[1], allowed[2]) if allowed else None,
    )


def shortage_text(shortage: GpuShortage, card: str) -> str:
    """`asked for 2.00 GiB, 0.41 GiB of 31.4 GiB free on RTX 5090 (GPU-1a2b…)`. `card` is empty where not known."""
    name = card or (f"GPU {shortage.index}" if shortage.index is not None else "its GPU")
    text = f"asked for {shortage.asked}"
    if shortage.free is None or shortage.total is None:
        return f"{text} on {name}"
    text = f"{text}, {gib_text(shortage.free)} of {gib_text(shortage.total)} free on {name}"
    return text if shortage.allowed is None else f"{text}, of which it may use {gib_text(shortage.allowed)}"


def gib_text(size: float) -> str:
    """`0.41 GiB`, `31.4 GiB`."""
    return f"{size:.1f} GiB" if size >= 10 else f"{size:.2f} GiB"


def _gib(number: str, unit: str) -> float:
    try:
        return float(number) * _GIB[unit]
    except ValueError:
        return 0.0
