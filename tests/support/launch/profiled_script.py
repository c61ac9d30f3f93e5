"""A training as a user writes it, for profiles: it sleeps where a GPU would compute, without using a CPU.

`profiled_script.py FOLDER STEPS WIDTH SECONDS [EXACT]`: each of two layers of WIDTH × WIDTH weights takes a quarter of SECONDS
forward, and a quarter backward. Rank 0 writes the time of each step, in seconds, to `FOLDER/steps.json`. With
EXACT, that many exact steps come before those of `--comm powersgd` and `local`, fewer than usual.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpu_launch.training import ddp_communication


class Sleep(torch.autograd.Function):
    """Passes its input on, and sleeps in both directions."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.seconds = seconds / 4

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        middle = Sleep.apply(self.first(inputs), self.seconds)
        return Sleep.apply(self.second(middle), self.seconds)


def main(folder: Path, steps: int, width: int, seconds: float) -> None:
    """Train on noise, and write the times of the steps."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model(width, seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.randn(1, width)).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        (folder / "steps.json").write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 5:
        ddp_communication.WARM_UP_STEPS = int(sys.argv[5])
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
