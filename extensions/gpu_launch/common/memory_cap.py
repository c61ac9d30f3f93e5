"""Limits torch to a GPU share's memory, in each process that imports torch.

The cap only counts torch's allocations in one process, so it does not protect against other programs.
"""

from __future__ import annotations

from typing import Any

from gpu_launch import environment
from gpu_launch.common.import_hook import call_after_import

_MIB = 1024**2


def load_ipython_extension(_shell: Any) -> None:
    """Install the cap in a kernel, see `image_config`."""
    install()


def install() -> None:
    """Limit torch, imported before or later, to GPUHUB_GPU_MEMORY_CAP_MIB, if that is set."""
    cap = environment.read().memory_cap_mib
    if cap is not None:
        call_after_import("torch", lambda torch: limit_process(torch, cap))


def limit_process(torch: Any, cap_mib: int) -> None:
    """Limit this process to `cap_mib` on the container's GPU, from its first use of CUDA on.

    Doing so earlier would start CUDA in every process that imports torch, which costs time and memory and breaks
    processes that fork.
    """

    def apply() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_mib * _MIB / total), 0)

    torch.cuda._lazy_call(apply)
