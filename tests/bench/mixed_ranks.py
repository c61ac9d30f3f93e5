"""One rank of `tests.bench.mixed`: writes its samples per second to `rank-N.json` in the folder that is named."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import gpu_launch
from tests.support.launch.balanced_training import SlowLayer, build_data, build_model

#: Seconds for each sample: speeds of 1 : 0.5 : 0.3.
SLEEPS_S = (0.002, 0.002 / 0.5, 0.002 / 0.3)
BATCH = 36
WARM_UP, STEPS = 20, 30
_DATA = build_data(BATCH * (WARM_UP + STEPS))


def _measure(loader: DataLoader, step: Callable[[list[torch.Tensor]], None]) -> float:
    """Return the steps per second after the first ones."""
    begin = 0.0
    for number, batch in enumerate(loader):
        if number == WARM_UP:
            begin = time.perf_counter()
        step(batch)
    return STEPS / (time.perf_counter() - begin)


def _train(model: torch.nn.Module, batch: list[torch.Tensor], scale: float = 1.0) -> None:
    _, inputs, targets = batch
    model.zero_grad()
    (torch.nn.functional.mse_loss(model(inputs), targets) * scale).backward()


def main(folder: Path) -> None:
    """Measure plain DDP, balanced DDP that begins with equal shares, and this rank without others."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Sequential(SlowLayer(SLEEPS_S[rank]), build_model())
    wrapped = DistributedDataParallel(model)
    plain = DataLoader(_DATA, batch_size=BATCH // ranks, sampler=DistributedSampler(_DATA))
    rates = {"plain": BATCH * _measure(plain, lambda batch: _train(wrapped, batch))}

    balanced = gpu_launch.balance(_DATA, batch=BATCH, speeds=[1] * ranks, model=wrapped, rebalance_every=8)

    def step(batch: list[torch.Tensor]) -> None:
        with balanced.step() as share:
            _train(wrapped, batch, share.scale)

    rates["balanced"] = BATCH * _measure(balanced.loader(), step)
    # All ranks at the same time, each with the share that it got.
    own = balanced.shares[rank]
    single = DataLoader(torch.utils.data.Subset(_DATA, range(own * (WARM_UP + STEPS))), batch_size=own)
    rates["alone"] = own * _measure(single, lambda batch: _train(model, batch))
    (folder / f"rank-{rank}.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
