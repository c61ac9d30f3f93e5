"""Readings of GPUs, as the agents send them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: As the broker shortens names.
_VENDOR = re.compile(r"^(nvidia\s+)?(geforce\s+|tesla\s+)?", re.IGNORECASE)
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-zA-Z/-]+")


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """State of a GPU; None means unknown."""

    node: str
    uuid: str = ""
    model: str = ""
    use_percent: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


def parse_gpu_reading(node: str, reading: Mapping[str, Any]) -> GpuSample:
    """Parse a reading of an agent's `gpus` message; values that are not numbers count as unknown."""

    def number(name: str) -> float | None:
        value = reading.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number else None  # type: ignore[arg-type]

    return GpuSample(
        node=node,
        uuid=str(reading.get("uuid") or ""),
        model=shorten_model(str(reading.get("model") or "")),
        use_percent=number("use_percent"),
        memory_mib=number("memory_mib"),
        memory_total_mib=number("memory_total_mib"),
        power_w=number("power_w"),
        power_limit_w=number("power_limit_w"),
    )


def shorten_model(model: str) -> str:
    """Shorten `NVIDIA GeForce RTX 5090` to `RTX 5090`, and `Tesla T4` to `T4`."""
    return " ".join(_VENDOR.sub("", model.strip(), count=1).split())


def shorten_uuid(uuid: str) -> str:
    """Shorten to `GPU-1a2b…`."""
    kind, _, rest = uuid.partition("-")
    return f"{kind}-{rest[:4]}…" if len(rest) > 4 else uuid


def format_gpu_name(text: str) -> str:
    """Format a rank's GPU, given as model and UUID in one text, as `RTX 5090 (GPU-1a2b…)`."""
    match = _UUID.search(text)
    uuid = shorten_uuid(match[0]) if match else ""
    model = shorten_model(_UUID.sub("", text).strip(" ,;:()"))
    return f"{model} ({uuid})" if model and uuid else model or uuid
