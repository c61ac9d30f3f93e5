"""CPU and memory that containers request: numbers of their own, or the share of the node that goes with their GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from gpuhub.config.containers.jobs import JobSettings
from gpuhub.config.containers.profiles import ProfileSettings

#: What a container gets where the size of its node is not known, and at most without a GPU: cores and bytes.
DEFAULT_CPUS = 4.0
DEFAULT_MEMORY = 16 * 1024**3
#: The least that a container with a share of its node starts with, thousandths of a core and MiB; a share of a GPU has
#: that part of it.
LEAST_CPU_MILLI = 500
LEAST_MEMORY_MIB = 1024
_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRequest:
    """CPU and memory that a request needs on each node."""

    #: Exactly that, or at least that where the share of the GPUs counts.
    cpu_milli: int
    memory_mib: int
    #: The container gets its GPUs' share of the node, and at least the number above.
    cpu_by_gpu: bool = False
    memory_by_gpu: bool = False


def build_size_request(
    *,
    cpus: float | None,
    memory: int | None,
    share: int = 1,
    cpus_or_more: bool = False,
    memory_or_more: bool = False,
    follows_gpus: bool,
) -> SizeRequest:
    """Return the request of a container.

    Args:
        cpus: Cores, None for the share of its GPUs.
        memory: Bytes, None for the share of its GPUs.
        share: Number of parts of the GPU of which it gets one.
        cpus_or_more: The share of its GPUs, if that is more than `cpus`.
        memory_or_more: The share of its GPUs, if that is more than `memory`.
        follows_gpus: False with Slurm, which decides before a node's share is known: the defaults count there.
    """
    if not follows_gpus:
        return SizeRequest(
            cpu_milli=round((DEFAULT_CPUS if cpus is None else cpus) * 1000),
            memory_mib=(DEFAULT_MEMORY if memory is None else memory) // _MIB,
        )
    return SizeRequest(
        cpu_milli=LEAST_CPU_MILLI // share if cpus is None else round(cpus * 1000),
        memory_mib=LEAST_MEMORY_MIB // share if memory is None else memory // _MIB,
        cpu_by_gpu=cpus is None or cpus_or_more,
        memory_by_gpu=memory is None or memory_or_more,
    )


def build_profile_size(profile: ProfileSettings, *, follows_gpus: bool) -> SizeRequest:
    """Return the request of a notebook with this profile."""
    return build_size_request(
        cpus=profile.cpus, memory=profile.memory, share=profile.gpu_share, follows_gpus=follows_gpus
    )


def build_worker_size(jobs: JobSettings, *, follows_gpus: bool) -> SizeRequest:
    """Return the request of a worker that says nothing else."""
    return build_size_request(cpus=jobs.cpus, memory=jobs.memory, follows_gpus=follows_gpus)
