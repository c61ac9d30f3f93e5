"""Properties of the GPUs that a launch requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from gpu_launch.broker.models import Gpu
from gpu_launch.units import format_memory

#: Part of the requested memory that a GPU must report, as in the broker: a GPU sold as 32 GB reports some 2 % less.
_MEMORY_TOLERANCE = 0.95


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """Fields have the names of the broker's job request."""

    #: Any of these models, in order of preference; empty for any model.
    models: tuple[str, ...] = ()
    #: Least memory of each GPU.
    least_memory_mib: int = 0
    same_model: bool = False
    #: Nothing else may run on the nodes.
    exclusive: bool = False
    #: The GPUs may be preempted when others need them.
    scavenge: bool = False
    priority: int = 0
    #: None for the default of the settings.
    time_limit_s: int | None = None

    @property
    def needs_gpu_data(self) -> bool:
        """Return whether the request restricts the GPUs, so that their properties must be known."""
        return bool(self.models or self.least_memory_mib or self.same_model)

    def accepts(self, gpu: Gpu, *, memory_mib: int | None = None) -> bool:
        """Return whether a GPU meets the request; `memory_mib` overrides the GPU's own memory."""
        available_mib = gpu.memory_mib if memory_mib is None else memory_mib
        return (
            not self.models or gpu.model in self.models
        ) and available_mib >= self.least_memory_mib * _MEMORY_TOLERANCE

    def count_usable(self, gpus: Iterable[Gpu]) -> int:
        """Return how many of a node's GPUs can be used together."""
        models = [gpu.model for gpu in gpus if self.accepts(gpu)]
        return max(map(models.count, models), default=0) if self.same_model else len(models)

    def build_body(self) -> dict[str, Any]:
        """Return the fields of the broker's job request that differ from its defaults."""
        values = {field_info.name: getattr(self, field_info.name) for field_info in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != getattr(_DEFAULTS, name)
        }

    def describe(self, count: int) -> str:
        """Format as `2 GPUs`, `1 RTX 5090 or RTX 5070 of at least 24 GiB`."""
        noun = " or ".join(self.models) or "GPU"
        plural = "s" if count > 1 and len(self.models) < 2 else ""
        memory = f" of at least {format_memory(self.least_memory_mib)}" if self.least_memory_mib else ""
        return f"{count} {noun}{plural}{memory}"


_DEFAULTS = GpuRequest()
