"""Check torch's collectives over all ranks of a launch, and measure what DDP's steps take on one, two and all of them.

Sums of an all-reduce are compared, and the gradients of a DDP step with those of one process that has the whole batch.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: Elements of the reduced tensor, and samples of each rank.
_ELEMENTS, _SAMPLES, _WIDTH = 1 << 20, 16, 64
#: Sizes of the measured steps: the model has 16.8 million weights, with 67 MB of gradients.
_STEPS, _STEP_SAMPLES, _STEP_WIDTH, _STEP_HIDDEN = 5, 16, 2048, 4096


def main(arguments: list[str]) -> None:
    """Run the checks and the measurement; rank 0 writes what every rank saw."""
    del arguments
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_cuda else "gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    mine = {
        "rank": rank,
        "node": os.environ.get("GPUHUB_NODE", ""),
        "nodes": int(os.environ.get("GROUP_WORLD_SIZE", "0")),
        "sums": reduce_sums(rank, device),
    } | compare_gradients(rank, count, device)
    ranks: list[dict[str, Any]] = [{}] * count
    dist.all_gather_object(ranks, mine)
    scaling = measure_scaling([seen["node"] for seen in ranks], device)
    if rank == 0:
        result = {"backend": dist.get_backend(), "expected_sum": count * (count + 1) / 2, "ranks": ranks} | scaling
        (Path(__file__).parent / "result.json").write_text(json.dumps(result))
    # A model in a cycle of references would keep the group, whose threads torch aborts on when the process ends.
    gc.collect()
    dist.destroy_process_group()


def reduce_sums(rank: int, device: torch.device) -> list[float]:
    """Return the smallest and the largest element of an all-reduced tensor, which should be the same."""
    total = torch.full((_ELEMENTS,), rank + 1.0, device=device)
    dist.all_reduce(total)
    return [float(total.min()), float(total.max())]


def build_model(device: torch.device) -> torch.nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(7)
    layers = (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, 1))
    return torch.nn.Sequential(*layers).to(device)


def compute_gradients(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return all gradients of one step in a row."""
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def compare_gradients(rank: int, count: int, device: torch.device) -> dict[str, float]:
    """Return the largest deviations of this rank's gradients, relative to the largest gradient.

    `from_ranks` is the difference from the other ranks' gradients, `from_single` from those of one process.
    """
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(count * _SAMPLES, _WIDTH, generator=generator).to(device)
    targets = torch.randn(count * _SAMPLES, 1, generator=generator).to(device)
    own = slice(rank * _SAMPLES, (rank + 1) * _SAMPLES)
    shared = compute_gradients(DistributedDataParallel(build_model(device)), inputs[own], targets[own])
    single = compute_gradients(build_model(device), inputs, targets)
    others = [torch.empty_like(shared) for _ in range(count)]
    dist.all_gather(others, shared)
    scale = float(single.abs().max())
    return {
        "from_ranks": max(float((other - shared).abs().max()) for other in others) / scale,
        "from_single": float((shared - single).abs().max()) / scale,
    }


def measure_scaling(nodes: list[str], device: torch.device) -> dict[str, Any]:
    """Return the time of a step on the fastest rank, on the two fastest and on all, and the bytes of its gradients.

    Args:
        nodes: The node of each rank.
    """
    ranks = range(len(nodes))
    alone_s = [measure_ranks([rank], device) for rank in ranks]
    fastest = sorted(ranks, key=alone_s.__getitem__)
    scaling = []
    for size in sorted({1, min(2, len(nodes)), len(nodes)}):
        members = fastest[:size]
        slowest_s = max(alone_s[rank] for rank in members)
        step_s = measure_ranks(members, device) if size > 1 else slowest_s
        scaling.append({"nodes": [nodes[rank] for rank in members], "step_s": step_s, "alone_s": slowest_s})
    return {"gradient_bytes": 2 * 4 * _STEP_WIDTH * _STEP_HIDDEN, "scaling": scaling}


def measure_ranks(members: list[int], device: torch.device) -> float:
    """Return the time of a step on these ranks while the others wait, seconds; the same on every rank."""
    group = dist.new_group(members) if len(members) > 1 else None
    step_s = 0.0
    if dist.get_rank() in members:
        first = torch.nn.Linear(_STEP_WIDTH, _STEP_HIDDEN, bias=False)
        last = torch.nn.Linear(_STEP_HIDDEN, _STEP_WIDTH, bias=False)
        model = torch.nn.Sequential(first, torch.nn.Tanh(), last).to(device)
        step_s = time_steps(DistributedDataParallel(model, process_group=group) if group else model, device)
    times = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, step_s)
    return max(times)


def time_steps(model: torch.nn.Module, device: torch.device) -> float:
    """Return the median time of a step without the optimizer's part, seconds; the first step is not counted."""
    inputs = torch.randn(_STEP_SAMPLES, _STEP_WIDTH, device=device)
    times = []
    for _ in range(_STEPS + 1):
        began = time.perf_counter()
        model.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
