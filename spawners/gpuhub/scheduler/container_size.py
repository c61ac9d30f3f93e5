"""CPU and memory of a container: what its request says, or its GPUs' share of the node."""

from __future__ import annotations

from dataclasses import dataclass

from gpuhub.scheduler.demand import WHOLE, DemandVariant
from gpuhub.scheduler.indexes.capacity_index import CapacityClass, IndexedNode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resource:
    """CPU or memory of a node: what goes with a GPU, what a container without GPU gets, and what is free."""

    per_gpu: int
    without_gpu: int
    free: int


def size_container(
    variant: DemandVariant, node: IndexedNode, free: CapacityClass, gpus: int
) -> tuple[int | None, int | None]:
    """Return CPU (thousandths of a core) and memory (MiB) of a container; None for what the node does not count.

    The share of a GPU is the same whoever comes first, unless containers of other sizes took more than theirs: then
    the GPUs that are not held yet divide what is left. It is at least what the request needs, for which the node has
    room, since it was chosen.
    """
    capacity, milli = node.capacity, gpus * variant.milli
    unheld = max(node.count_unheld_milli(), milli)
    cpu = memory = None
    if capacity.cpu_milli is not None:
        resource = _Resource(per_gpu=capacity.cpu_per_gpu, without_gpu=capacity.cpu_without_gpu, free=free.cpu_milli)
        cpu = _size(variant, resource, milli, unheld) if variant.cpu_by_gpu else variant.cpu_milli
        cpu = max(cpu, variant.cpu_milli)
    if capacity.memory_mib is not None:
        resource = _Resource(
            per_gpu=capacity.memory_per_gpu, without_gpu=capacity.memory_without_gpu, free=free.memory_mib
        )
        memory = _size(variant, resource, milli, unheld) if variant.memory_by_gpu else variant.memory_mib
        memory = max(memory, variant.memory_mib)
    return cpu, memory


def _size(variant: DemandVariant, resource: _Resource, milli: int, unheld: int) -> int:
    if variant.is_exclusive:
        return resource.free
    if not milli:
        return min(resource.without_gpu, resource.free)
    return min(resource.per_gpu * milli // WHOLE, resource.free * milli // unheld)
