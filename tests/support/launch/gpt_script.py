"""A small language model on random tokens, as a user trains it on a GPU with DDP.

`gpt_script.py FILE STEPS BATCH`: rank 0 writes the time of each step, in seconds, to FILE.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, WORDS, LENGTH = 512, 6, 8, 8192, 512


class Block(nn.Module):
    """Attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        parts = self.heads(self.norms[0](values)).view(*values.shape[:2], 3, HEADS, WIDTH // HEADS)
        attended = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        values = values + self.out(attended.transpose(1, 2).reshape(values.shape))
        return values + self.layers(self.norms[1](values))


class Model(nn.Module):
    """A decoder with 27.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places.weight[: tokens.shape[1]]))


def main(file: Path, steps: int, batch: int) -> None:
    """Train, and write the times of the steps."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        tokens = torch.randint(WORDS, (batch, LENGTH)).cuda()
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
