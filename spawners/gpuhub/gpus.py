"""GPU models and what a request asks of them: pure values and comparisons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_VENDOR = re.compile(r"^(nvidia\s+)?(geforce\s+|tesla\s+)?", re.IGNORECASE)


def short_model(nvml_name: str) -> str:
    """`NVIDIA GeForce RTX 5070 Ti` as people say it: `RTX 5070 Ti`."""
    return " ".join(_VENDOR.sub("", nvml_name.strip(), count=1).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as far as placement cares; `memory_mib` as NVML reports it, a little below what the box says."""

    model: str
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What one GPU must be. `model` is compared whole, so that `RTX 5070` is not `RTX 5070 Ti`."""

    model: str | None = None
    least_memory_mib: int = 0

    def accepts(self, card: Card) -> bool:
        """Whether the card is good enough.

        A card sold as 32 GB reports some 2 % less, so 5 % below the least memory still counts.
        """
        if self.model is not None and short_model(self.model).casefold() != card.model.casefold():
            return False
        return card.memory_mib >= self.least_memory_mib * 0.95


def describe(count: int, requirement: Requirement) -> str:
    """For a person: `1 × RTX 5090`, `2 × any GPU of at least 12 GiB`."""
    what = requirement.model or "any GPU"
    if requirement.least_memory_mib:
        what += f" of at least {requirement.least_memory_mib / 1024:.3g} GiB"
    return f"{count} × {what}"


def describe_nodes(cards: Mapping[str, Sequence[Card]]) -> str:
    """For a person: `rig1 with 1 × RTX 5090 (31.8 GiB)`."""
    parts = []
    for node, on_node in cards.items():
        counted = Counter((card.model, card.memory_mib) for card in on_node)
        has = ", ".join(f"{n} × {model} ({mib / 1024:.3g} GiB)" for (model, mib), n in counted.items())
        parts.append(f"{node} with {has or 'no GPU'}")
    return "; ".join(parts) or "no nodes"
