"""A program for each rank: DDP trainings with `gpu_launch.balance`, whose steps are saved to the folder that is named.

`rank-N.pt` has, by the training's name: the samples of each step that count, the gradients after DDP's average, the
parameters at the end, and the shares before each step.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpu_launch

SAMPLES = 50
RATE = 0.1


def build_model() -> torch.nn.Module:
    """Return the same small network in every process."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def build_data(samples: int = SAMPLES) -> torch.utils.data.TensorDataset:
    """Return samples with a number each, inputs and targets."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(torch.arange(samples), inputs, inputs.sin().sum(dim=1, keepdim=True))


class SlowLayer(torch.nn.Module):
    """Passes its inputs on, and sleeps for every sample, as a slower GPU would compute for longer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(inputs))
        return inputs


def train(
    *, samples=SAMPLES, epochs=2, workers=0, sleep_s=0.0, layer=None, is_watched=True, device="cpu", **arguments
) -> dict[str, list]:
    """Train with SGD, and return what each step did; `layer` comes before the others, in place of one that sleeps."""
    data = build_data(samples)
    model = DistributedDataParallel(torch.nn.Sequential(layer or SlowLayer(sleep_s), build_model()).to(device))
    balanced = gpu_launch.balance(data, model=model if is_watched else None, **arguments)
    loader = balanced.loader(num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    result: dict[str, list] = {"samples": [], "gradients": [], "shares": [], "changed": []}
    for epoch in range(epochs):
        balanced.set_epoch(epoch)
        for numbers, inputs, targets in loader:
            with balanced.step() as step:
                loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            (loss * step.scale).backward()
            optimizer.step()
            result["shares"].append(balanced.shares)
            result["samples"].append(numbers[: step.samples].tolist())
            result["gradients"].append([parameter.grad.clone().cpu() for parameter in model.parameters()])
        result["changed"].append(balanced.rebalance())
    result["parameters"] = [parameter.detach().cpu() for parameter in model.parameters()]
    return result


def check_against_one_process(ranks: Sequence[dict[str, list]], rtol: float = 1e-9) -> None:
    """Assert that the ranks' gradients of every step, and their parameters, are those of whole batches."""
    batches = [list(itertools.chain(*parts)) for parts in zip(*(rank["samples"] for rank in ranks), strict=True)]
    _, inputs, targets = build_data(max(map(max, batches)) + 1).tensors
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, numbers in enumerate(batches):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[numbers]), targets[numbers]).backward()
        expected = [parameter.grad for parameter in model.parameters()]
        for rank in ranks:
            torch.testing.assert_close(rank["gradients"][step], expected, rtol=rtol, atol=1e-12)
        optimizer.step()
    expected = [parameter.detach() for parameter in model.parameters()]
    for rank in ranks:
        torch.testing.assert_close(rank["parameters"], expected, rtol=rtol, atol=1e-12)


def read_refusal(**arguments) -> str:
    """Return the text of the error that `balance` raises with these arguments, or its loader for trainers."""
    try:
        gpu_launch.balance(build_data(), **arguments).trainer_loader()
    except gpu_launch.UsageError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """Run all trainings, one after the other, with the same process group."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Rank 0 sleeps four times as long for a sample as the others.
    slow = {"batch": 18, "speeds": (1, 1, 1), "sleep_s": 0.008 if rank == 0 else 0.002}
    results = {
        "uneven": train(batch=18, speeds=(10, 5, 3)),
        "empty shares": train(batch=2, speeds=(2, 2, 1), samples=7),
        "bounded": train(batch=18, speeds=(10, 5, 3), most=(8, 6, 4)[rank]),
        "measured": train(batch=18, epochs=1),
        "slow": train(**slow, samples=18 * 8),
        "slow, not watched": train(**slow, samples=18 * 8, epochs=1, is_watched=False),
        "slow, every 8 steps": train(**slow, samples=18 * 24 + 5, epochs=1, workers=1, rebalance_every=8),
        "refused": {
            "batch": read_refusal(batch=18 + rank, speeds=(1, 1, 1)),
            "most": read_refusal(batch=18, speeds=(1, 1, 1), most=5),
            "items": read_refusal(batch=2, speeds=(2, 2, 1)),
        },
    }
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
