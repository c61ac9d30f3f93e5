"""The GPUs that a launch requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from gpu_launch.broker.models import Gpu, Node
from gpu_launch.units import format_memory

#: Part of the requested memory that a GPU must report, as in the broker: a GPU sold as 32 GB reports some 2 % less.
_MEMORY_TOLERANCE = 0.95


@dataclass(frozen=True)
class Amount:
    """Cores or MiB for each container; with `or_more`, its GPUs' share of the node if that is more."""

    value: float
    or_more: bool = False


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """Properties of the requested GPUs; fields have the names of the broker's job request."""

    #: Any of these models, in order of preference; empty for any model.
    models: tuple[str, ...] = ()
    #: Minimum memory of each GPU.
    least_memory_mib: int = 0
    #: CPU cores, memory (MiB) and /dev/shm (MiB) of each container; None for its GPUs' share of the node.
    cpus: Amount | None = None
    ram_mib: Amount | None = None
    shm_mib: int | None = None
    same_model: bool = False
    #: Nothing else may run on the nodes.
    exclusive: bool = False
    #: Datasets of which each node gets a copy on its own disk first.
    stage: tuple[str, ...] = ()
    #: The GPUs may be preempted when others need them.
    scavenge: bool = False
    #: The job runs on guests, and only there.
    guests: bool = False
    priority: int = 0
    #: None for the default of the settings.
    time_limit_s: int | None = None

    @property
    def needs_gpu_data(self) -> bool:
        """Return whether the request restricts the GPUs, so that their properties must be known."""
        return bool(self.models or self.least_memory_mib or self.same_model)

    @property
    def sets_size(self) -> bool:
        """Return whether the containers have a size of their own, which a running notebook does not."""
        return (self.cpus, self.ram_mib, self.shm_mib) != (None, None, None)

    def accepts(self, gpu: Gpu, *, memory_mib: int | None = None) -> bool:
        """Return whether a GPU meets the request; `memory_mib` overrides the GPU's own memory."""
        available_mib = gpu.memory_mib if memory_mib is None else memory_mib
        return (
            not self.models or gpu.model in self.models
        ) and available_mib >= self.least_memory_mib * _MEMORY_TOLERANCE

    def may_use(self, node: Node) -> bool:
        """Return whether work of the user may be placed on a node."""
        if self.guests:
            return node.takes_guests
        return node.is_open or (self.scavenge and node.takes_scavenging)

    def count_usable(self, gpus: Iterable[Gpu]) -> int:
        """Return how many of a node's GPUs can be used together."""
        models = [gpu.model for gpu in gpus if self.accepts(gpu)]
        return max(map(models.count, models), default=0) if self.same_model else len(models)

    def build_body(self) -> dict[str, Any]:
        """Return the fields of the broker's job request that differ from its defaults."""
        body: dict[str, Any] = {}
        for name in (field_info.name for field_info in fields(self)):
            value = getattr(self, name)
            if value == getattr(_DEFAULT_REQUEST, name):
                continue
            if isinstance(value, Amount):
                body |= {name: value.value} | ({f"{name}_or_more": True} if value.or_more else {})
            else:
                body[name] = list(value) if isinstance(value, tuple) else value
        return body

    def describe(self, count: int) -> str:
        """Format as `2 GPUs`, `1 RTX 5090 or RTX 5070 of at least 24 GiB`."""
        noun = " or ".join(self.models) or "GPU"
        plural = "s" if count > 1 and len(self.models) < 2 else ""
        memory = f" of at least {format_memory(self.least_memory_mib)}" if self.least_memory_mib else ""
        return f"{count} {noun}{plural}{memory}{self._describe_size()}"

    def _describe_size(self) -> str:
        parts = []
        if self.cpus is not None:
            parts.append(f"{self.cpus.value:g} CPU cores{_describe_more(self.cpus)}")
        if self.ram_mib is not None:
            parts.append(f"{format_memory(round(self.ram_mib.value))} of memory{_describe_more(self.ram_mib)}")
        if self.shm_mib is not None:
            parts.append(f"{format_memory(self.shm_mib)} of shared memory")
        return f" with {', '.join(parts)}" if parts else ""


def _describe_more(amount: Amount) -> str:
    return " or more" if amount.or_more else ""


_DEFAULT_REQUEST = GpuRequest()
