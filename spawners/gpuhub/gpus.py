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
    #: CUDA compute capability such as (12, 0); None where NVML could not tell.
    capability: tuple[int, int] | None = None
    #: A MIG device: a part of a GPU with memory and processors of its own.
    is_mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What one GPU must be. Models are compared whole, so that `RTX 5070` is not `RTX 5070 Ti`."""

    #: Any of these, best liked first; empty for any model.
    models: tuple[str, ...] = ()
    least_memory_mib: int = 0
    #: NVIDIA's driver on its node, such as `570` or `570.86.15`; None for any.
    least_driver: str | None = None
    #: CUDA compute capability, such as (8, 9); None for any. A card that does not tell is not good enough.
    least_capability: tuple[int, int] | None = None

    def accepts(self, card: Card) -> bool:
        """Whether the card is good enough, its node's driver aside.

        A card sold as 32 GB reports some 2 % less, so 5 % below the least memory still counts.
        """
        if self.models and self.liking(card) is None:
            return False
        if self.least_capability is not None and (card.capability or (0, 0)) < self.least_capability:
            return False
        return card.memory_mib >= self.least_memory_mib * 0.95

    def accepts_driver(self, driver: str | None) -> bool:
        """Whether a node's driver is new enough; one that is not known is not."""
        if self.least_driver is None:
            return True
        return driver is not None and driver_version(driver) >= driver_version(self.least_driver)

    def liking(self, card: Card) -> int | None:
        """The place of the card's model among the wanted ones, 0 for the best liked; None when it is not wanted."""
        for place, model in enumerate(self.models):
            if short_model(model).casefold() == card.model.casefold():
                return place
        return None


def parse_capability(text: str) -> tuple[int, int]:
    """`8.9` as numbers that compare."""
    major, minor = text.split(".")
    return int(major), int(minor)


def driver_version(text: str) -> tuple[int, ...]:
    """`570.86.15` as numbers that compare; (0,) for what is no version."""
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (0,)


def describe(count: int, requirement: Requirement) -> str:
    """For a person: `1 × RTX 5090`, `2 × any GPU of at least 12 GiB`."""
    what = " or ".join(requirement.models) or "any GPU"
    if requirement.least_memory_mib:
        what += f" of at least {requirement.least_memory_mib / 1024:.3g} GiB"
    if requirement.least_capability is not None:
        what += f" of compute capability {'.'.join(map(str, requirement.least_capability))} or newer"
    if requirement.least_driver is not None:
        what += f" with driver {requirement.least_driver} or newer"
    return f"{count} × {what}"


def describe_nodes(cards: Mapping[str, Sequence[Card]]) -> str:
    """For a person: `rig1 with 1 × RTX 5090 (31.8 GiB)`."""
    parts = []
    for node, on_node in cards.items():
        counted = Counter((card.model, card.memory_mib) for card in on_node)
        has = ", ".join(f"{n} × {model} ({mib / 1024:.3g} GiB)" for (model, mib), n in counted.items())
        parts.append(f"{node} with {has or 'no GPU'}")
    return "; ".join(parts) or "no nodes"
