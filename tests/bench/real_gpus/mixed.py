"""How much of the speeds of mixed GPUs `gpu_launch.balance` gets, on GPUs of this machine over a slow network.

`python3 -m tests.bench.real_gpus.mixed [MBIT …]`, as root, with two GPUs or more, a Python with a CUDA build of torch,
transformers and peft, and the commands `ip` and `tc`. LoRA trains a language model with random weights. The GPUs are
equal: on the slower ones each layer computes more than once in both passes, for speeds of about 1 : 1 : 0.5 : 0.33.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from tests.bench.mixed_ranks import Workload, measure_rates
from tests.bench.real_gpus.finetuning import name_link, print_figure, print_note
from tests.bench.real_gpus.finetuning_rank import SHAPES, build_model
from tests.gpus.shaped_nodes import run_on_nodes, shaped_nodes

RATES_MBIT = (2500, 10_000)
#: How often each layer computes besides its own passes, by GPU; of two GPUs, the second one has the third value.
MORE_PASSES = (0, 0, 1, 2)
#: Shares have been adapted three times, every eight steps, when the counted steps begin.
BATCH, WARM_UP, STEPS = 96, 26, 12


class SlowLayer:
    """Lets a layer compute more often in both passes; a backward pass takes as long as two forward ones."""

    def __init__(self, layer: torch.nn.Module, more_passes: int) -> None:
        self._layer, self._more_passes = layer, more_passes
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        layer.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        layer.register_full_backward_pre_hook(lambda *_: self._compute(2))

    def _before_forward(self, _: torch.nn.Module, words: tuple[Any, ...], names: dict[str, Any]) -> None:
        self._arguments = words, names
        self._compute(1)

    def _compute(self, passes: int) -> None:
        words, names = self._arguments
        with torch.no_grad():
            for _ in range(passes * self._more_passes):
                self._layer.forward(*words, **names)


def train(folder: Path) -> None:
    """Measure in this rank."""
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape, device = SHAPES["small"], torch.device("cuda")
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(shape.vocabulary, (BATCH * (WARM_UP + STEPS), shape.sequence)))
    model = build_model(shape, "lora", device)
    for layer in model.get_base_model().model.layers:
        SlowLayer(layer, MORE_PASSES[:: len(MORE_PASSES) // ranks][rank])

    def compute_loss(wrapped: torch.nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        tokens = batch[0].to(device)
        loss: torch.Tensor = wrapped(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    rates = measure_rates(Workload(model, data, compute_loss, BATCH, WARM_UP, STEPS))
    (folder / f"rank-{rank}.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Measure with networks of each speed."""
    ranks = torch.cuda.device_count()
    for rate_mbit in map(int, sys.argv[1:] or RATES_MBIT):
        with tempfile.TemporaryDirectory() as name, shaped_nodes(ranks, rate_mbit):
            run_on_nodes(["-m", __spec__.name, "--rank", name], ranks, {"HOME": name})
            rates = [json.loads(Path(name, f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        alone, name = sum(rate["alone"] for rate in rates), name_link(rate_mbit / 1000)
        print_note(f"samples/s alone, and shares: {[(rate['alone'], rate['share']) for rate in rates]}")
        print_figure(f"gpu_{name}.mixed_over_sum_{ranks}", rates[0]["balanced"] / alone, "ratio")
        print_figure(f"gpu_{name}.mixed_plain_over_sum_{ranks}", rates[0]["plain"] / alone, "ratio")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(Path(sys.argv[2]))
    else:
        main()
