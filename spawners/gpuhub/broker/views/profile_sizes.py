"""CPU and memory that notebooks of a profile get, over the nodes that can serve it."""

from __future__ import annotations

from collections.abc import Set

from gpuhub.config.containers.container_size import build_profile_size
from gpuhub.config.settings import ProfileSettings
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.machine_size import add_machine_size

Range = tuple[float, float]


def find_profile_sizes(
    profile: ProfileSettings, inventory: Inventory, serving: Set[str]
) -> tuple[Range | None, tuple[int, int] | None]:
    """Return cores and MiB of the container, each on the node with the least and on that with the most of it.

    None where no node says it.

    Args:
        serving: UUIDs of the GPUs that can serve the profile.
    """
    size = build_profile_size(profile, follows_gpus=inventory.counts_machines)
    cpus = [size.cpu_milli] if not size.cpu_by_gpu else []
    memories = [size.memory_mib] if not size.memory_by_gpu else []
    for name, node in inventory.nodes.items():
        if profile.gpu_count and not any(gpu.uuid in serving for gpu in node.gpus):
            continue
        capacity = add_machine_size(
            inventory.configured_nodes[name], node.machine, inventory.notebook_room, len(node.gpus)
        )
        if size.cpu_by_gpu and capacity.cpu_milli is not None:
            cpus.append(_choose(profile, capacity.cpu_milli, capacity.cpu_per_gpu, capacity.cpu_without_gpu))
        if size.memory_by_gpu and capacity.memory_mib is not None:
            memories.append(_choose(profile, capacity.memory_mib, capacity.memory_per_gpu, capacity.memory_without_gpu))
    return (
        (min(cpus) / 1000, max(cpus) / 1000) if cpus else None,
        (min(memories), max(memories)) if memories else None,
    )


def _choose(profile: ProfileSettings, total: int, per_gpu: int, without_gpu: int) -> int:
    if profile.exclusive:
        return total
    return per_gpu * profile.gpu_count // profile.gpu_share if profile.gpu_count else without_gpu
