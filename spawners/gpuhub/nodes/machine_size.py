"""CPU and memory of a machine that its containers may have, and the share that goes with each GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuhub.config.containers.container_size import DEFAULT_CPUS, DEFAULT_MEMORY
from gpuhub.config.settings import ClusterSettings
from gpuhub.nodes.status import MachineSize
from gpuhub.scheduler.interface import NodeCapacity

_MIB = 1024**2
#: What the machine keeps for itself: one core, and 2 GiB or 5 % of its memory, but never more than an eighth.
_KEPT_CPU_MILLI = 1000
_KEPT_MEMORY_MIB = 2048
_KEPT_MEMORY_PART = 20
_MOST_KEPT_PART = 8
#: A node with GPUs keeps room for one notebook without GPU, at most this part of it.
_MOST_ROOM_PART = 4
#: Maximum CPU and memory of a container without GPU whose profile has no numbers.
_MOST_CPU_MILLI = round(DEFAULT_CPUS * 1000)
_MOST_MEMORY_MIB = DEFAULT_MEMORY // _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookRoom:
    """Room that each node with GPUs keeps for one notebook without GPU; None in a value: that of the default."""

    cpu_milli: int | None
    memory_mib: int | None


def find_notebook_room(cluster: ClusterSettings) -> NotebookRoom | None:
    """Return the room for the largest profile without GPU; None if there is none."""
    profiles = [profile for profile in cluster.profiles if not profile.gpu_count]
    if not profiles:
        return None
    return NotebookRoom(
        cpu_milli=_find_largest(None if profile.cpus is None else round(profile.cpus * 1000) for profile in profiles),
        memory_mib=_find_largest(None if profile.memory is None else profile.memory // _MIB for profile in profiles),
    )


def _find_largest(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else max(value for value in known if value is not None)


def add_machine_size(
    capacity: NodeCapacity, machine: MachineSize | None, room: NotebookRoom | None, gpus: int
) -> NodeCapacity:
    """Return the capacity with the limits that the settings do not give, and with the shares of its GPUs.

    Args:
        capacity: The node, with the limits of the settings.
        machine: What its Docker daemon reports; None if it has not answered.
        gpus: The number of its GPUs; each MIG device counts.
    """
    cpu, memory = capacity.cpu_milli, capacity.memory_mib
    if cpu is None and machine is not None:
        cpu = machine.cpu_milli - min(_KEPT_CPU_MILLI, machine.cpu_milli // _MOST_KEPT_PART)
    if memory is None and machine is not None:
        kept = max(_KEPT_MEMORY_MIB, machine.memory_mib // _KEPT_MEMORY_PART)
        memory = machine.memory_mib - min(kept, machine.memory_mib // _MOST_KEPT_PART)
    cpu_share, cpu_without_gpu = _divide(cpu, gpus, _MOST_CPU_MILLI, room, None if room is None else room.cpu_milli)
    memory_share, memory_without_gpu = _divide(
        memory, gpus, _MOST_MEMORY_MIB, room, None if room is None else room.memory_mib
    )
    return replace(
        capacity,
        cpu_milli=cpu,
        memory_mib=memory,
        cpu_per_gpu=cpu_share,
        memory_per_gpu=memory_share,
        cpu_without_gpu=cpu_without_gpu,
        memory_without_gpu=memory_without_gpu,
    )


def _divide(total: int | None, gpus: int, most: int, room: NotebookRoom | None, largest: int | None) -> tuple[int, int]:
    """Return what goes with each GPU, and what a container without GPU gets."""
    if total is None:
        return 0, 0
    if not gpus:
        return 0, min(most, total)
    quarter = total // _MOST_ROOM_PART
    without_gpu = min(most, quarter)
    kept = 0 if room is None else min(without_gpu if largest is None else largest, quarter)
    return (total - kept) // gpus, without_gpu
