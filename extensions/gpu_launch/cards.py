"""Readings of GPUs, as the agents tell them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-zA-Z/-]+")


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU and how busy it is; None for what is not known."""

    node: str
    uuid: str = ""
    model: str = ""
    use_percent: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


def parse_card(node: str, reading: Mapping[str, Any]) -> Card:
    """A reading of an agent's `gpus` message; what is no number is not known."""

    def number(name: str) -> float | None:
        value = reading.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number else None  # type: ignore[arg-type]

    return Card(
        node=node,
        uuid=str(reading.get("uuid") or ""),
        model=short_model(str(reading.get("model") or "")),
        use_percent=number("use_percent"),
        memory_mib=number("memory_mib"),
        memory_total_mib=number("memory_total_mib"),
        power_w=number("power_w"),
        power_limit_w=number("power_limit_w"),
    )


def short_model(model: str) -> str:
    """`NVIDIA GeForce RTX 5090` is an RTX 5090."""
    return model.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()


def short_uuid(uuid: str) -> str:
    """`GPU-1a2b…`."""
    kind, _, rest = uuid.partition("-")
    return f"{kind}-{rest[:4]}…" if len(rest) > 4 else uuid


def name_text(text: str) -> str:
    """A model and a UUID in one text, as agents tell them of a rank's GPU, for a headline: `RTX 5090 (GPU-1a2b…)`."""
    found = _UUID.search(text)
    uuid = short_uuid(found[0]) if found else ""
    model = short_model(_UUID.sub("", text).strip(" ,;:()"))
    return f"{model} ({uuid})" if model and uuid else model or uuid
