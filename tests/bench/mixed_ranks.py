"""One rank of `tests.bench.mixed`: writes its samples per second to `rank-N.json` in the folder that is named."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import gpu_launch
from tests.support.launch.balanced_training import SlowLayer, build_data, build_model

#: Seconds for each sample: speeds of 1 : 0.5 : 0.3.
SLEEPS_S = (0.002, 0.002 / 0.5, 0.002 / 0.3)
BATCH = 36

ComputeLoss = Callable[[torch.nn.Module, Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """What is trained: `compute_loss` takes the model, perhaps wrapped by DDP, and a batch."""

    model: torch.nn.Module
    data: Dataset
    compute_loss: ComputeLoss
    #: Samples of a step of all ranks together.
    batch: int
    warm_up: int
    steps: int


def measure_rates(work: Workload) -> dict[str, float]:
    """Return this rank's samples per second alone, and those of all ranks with plain DDP and with balanced batches.

    Balancing begins with equal shares. All ranks compute alone at the same time, each with the share that it got.
    """
    ranks = dist.get_world_size()
    wrapped = DistributedDataParallel(work.model)
    plain = DataLoader(work.data, batch_size=work.batch // ranks, sampler=DistributedSampler(work.data))
    rates = {"plain": work.batch * _count_steps(work, plain, lambda batch: _train(work, wrapped, batch))}
    balanced = gpu_launch.balance(work.data, batch=work.batch, speeds=[1] * ranks, model=wrapped, rebalance_every=8)

    def step(batch: Sequence[torch.Tensor]) -> None:
        with balanced.step() as share:
            _train(work, wrapped, batch, share.scale)

    rates["balanced"] = work.batch * _count_steps(work, balanced.loader(), step)
    rates["share"] = own = balanced.shares[dist.get_rank()]
    single = DataLoader(Subset(work.data, range(own * (work.warm_up + work.steps))), batch_size=own)
    rates["alone"] = own * _count_steps(work, single, lambda batch: _train(work, work.model, batch))
    return rates


def _count_steps(work: Workload, loader: DataLoader, step: Callable[[Sequence[torch.Tensor]], None]) -> float:
    """Return the steps per second after the first ones."""
    begin = 0.0
    for number, batch in enumerate(loader):
        if number == work.warm_up:
            begin = time.perf_counter()
        step(batch)
    return work.steps / (time.perf_counter() - begin)


def _train(work: Workload, model: torch.nn.Module, batch: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    model.zero_grad()
    (work.compute_loss(model, batch) * scale).backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _compute_error(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    _, inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def main(folder: Path) -> None:
    """Measure on CPUs, with layers that sleep."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(SlowLayer(SLEEPS_S[rank]), build_model())
    warm_up, steps = 20, 30
    work = Workload(model, build_data(BATCH * (warm_up + steps)), _compute_error, BATCH, warm_up, steps)
    (folder / f"rank-{rank}.json").write_text(json.dumps(measure_rates(work)), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
