"""Room on a node for a container beside one that is suspended there."""

from __future__ import annotations

from gpuhub.domain.models import LeaseRow
from gpuhub.domain.scheduler_input import find_suspended_cpu_milli
from gpuhub.scheduler.interface import Scheduler


def has_room_beside(scheduler: Scheduler, lease: LeaseRow, request: LeaseRow, moved_mib: int) -> bool:
    """Return whether a request would fit on the node of a lease while that is suspended.

    Args:
        scheduler: Knows what is held on the node, by this lease as well.
        lease: It would be suspended; it has one GPU.
        request: It needs the GPU; a suspended one has its container already.
        moved_mib: The GPU memory that would be moved into host memory.
    """
    node = lease.gpus[0].node
    freed_milli = lease.find_size(node).cpu_milli - find_suspended_cpu_milli(lease)
    is_there = request.suspension is not None
    cpu_milli = 0 if is_there else request.resources.cpu_milli
    memory_mib = 0 if is_there else request.resources.memory_mib
    return scheduler.has_room(node, cpu_milli - freed_milli, memory_mib + moved_mib)
