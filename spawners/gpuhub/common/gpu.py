"""GPUs by model, memory and capability, and requirements that they must meet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_VENDOR = re.compile(r"^(nvidia\s+)?(geforce\s+|tesla\s+)?", re.IGNORECASE)


def shorten_model(nvml_name: str) -> str:
    """Return a model without its vendor: `RTX 5070 Ti` for `NVIDIA GeForce RTX 5070 Ti`."""
    return " ".join(_VENDOR.sub("", nvml_name.strip(), count=1).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """The properties of a GPU that requirements compare; NVML reports a little less memory than the vendor."""

    model: str
    memory_mib: int
    #: CUDA compute capability such as (12, 0); None where NVML does not report it.
    capability: tuple[int, int] | None = None
    #: Whether it is a MIG device, a part of a GPU with its own memory and processors.
    is_mig: bool = False
    #: Its UUID where a suspended notebook can only continue with this very GPU; None for all others.
    awaited_as: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequirement:
    """Requirements for one GPU. Models are compared as a whole, so that `RTX 5070` does not match `RTX 5070 Ti`."""

    #: Accepted models in order of preference; empty for any.
    models: tuple[str, ...] = ()
    least_memory_mib: int = 0
    #: Minimum version of NVIDIA's driver on its node, such as `570` or `570.86.15`; None for any.
    least_driver: str | None = None
    #: Minimum CUDA compute capability, such as (8, 9); None for any. A GPU that does not report it is not accepted.
    least_capability: tuple[int, int] | None = None
    #: UUID of the only accepted GPU, which is `GpuSpec.awaited_as`; None for any.
    uuid: str | None = None

    def accepts(self, card: GpuSpec) -> bool:
        """Return whether the GPU meets the requirement, except for the driver.

        A GPU sold as 32 GB reports some 2 % less, so 5 % below the minimum memory is still accepted.
        """
        if self.uuid is not None:
            return card.awaited_as == self.uuid
        if self.models and self.preference_rank(card) is None:
            return False
        if self.least_capability is not None and (card.capability or (0, 0)) < self.least_capability:
            return False
        return card.memory_mib >= self.least_memory_mib * 0.95

    def accepts_driver(self, driver: str | None) -> bool:
        """Return whether a node's driver is new enough; an unknown driver is not."""
        if self.least_driver is None:
            return True
        return driver is not None and parse_driver_version(driver) >= parse_driver_version(self.least_driver)

    def preference_rank(self, card: GpuSpec) -> int | None:
        """Return the index of the GPU's model in `models`, 0 for the preferred one; None if it is not accepted."""
        for rank, model in enumerate(self.models):
            if shorten_model(model).casefold() == card.model.casefold():
                return rank
        return None


def parse_capability(text: str) -> tuple[int, int]:
    """Return `8.9` as numbers, for comparisons."""
    major, minor = text.split(".")
    return int(major), int(minor)


def parse_driver_version(text: str) -> tuple[int, ...]:
    """Return `570.86.15` as numbers, for comparisons; (0,) for text that is not a version."""
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (0,)


def describe_gpus(count: int, requirement: GpuRequirement) -> str:
    """Return a text for users, such as `1 × RTX 5090` or `2 × any GPU of at least 12 GiB`."""
    text = " or ".join(requirement.models) or ("any GPU" if requirement.uuid is None else "the GPU it was suspended on")
    if requirement.least_memory_mib:
        text += f" of at least {requirement.least_memory_mib / 1024:.3g} GiB"
    if requirement.least_capability is not None:
        text += f" of compute capability {'.'.join(map(str, requirement.least_capability))} or newer"
    if requirement.least_driver is not None:
        text += f" with driver {requirement.least_driver} or newer"
    return f"{count} × {text}"


def describe_nodes(cards: Mapping[str, Sequence[GpuSpec]]) -> str:
    """Return a text for users, such as `rig1 with 1 × RTX 5090 (31.8 GiB)`."""
    parts = []
    for node, on_node in cards.items():
        counted = Counter((card.model, card.memory_mib) for card in on_node)
        has = ", ".join(f"{n} × {model} ({mib / 1024:.3g} GiB)" for (model, mib), n in counted.items())
        parts.append(f"{node} with {has or 'no GPU'}")
    return "; ".join(parts) or "no nodes"
