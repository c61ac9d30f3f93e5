"""A standing rank's process group: made at its start, and tried after something went wrong."""

from __future__ import annotations

import time
from typing import Any

_POLL_S = 0.002


def join(local_rank: int) -> Any:
    """Make the default group, NCCL on GPUs and gloo without; this rank's device."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def find_problem(number: int, device: Any, *, limit_s: float) -> str:
    """Why the group is not usable; empty when its ranks, all called with the same `number`, have added it up.

    A rank that is ahead of the others by a collective would meet theirs with this one, and see another sum.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return "its default process group is gone"
    try:
        value = torch.full((1,), float(number), dtype=torch.float64, device=device)
        work = dist.all_reduce(value, async_op=True)
        deadline = time.monotonic() + limit_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                return f"a small all_reduce has not come back within {limit_s:g} s"
            time.sleep(_POLL_S)
        work.wait()
        total, expected = value.item(), float(number * dist.get_world_size())
    except Exception as error:  # noqa: BLE001 - whatever a broken group raises is the answer
        return f"a small all_reduce failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "" if total == expected else "the ranks are not at the same collective"


def leave() -> None:
    """Take the group apart, where it still is."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
