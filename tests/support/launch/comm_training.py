"""A plain DDP script, as a user writes it, that learns the next character of Python's own documentation.

It knows nothing of `--comm`. Rank N writes to the folder that is named: `rank-N.pt`, with the loss on text that was not
trained on, the parameters at the end and in the step before, and the last gradients. It trains on the CPU, or on
another device that is named after the folder: `cuda`, with NCCL.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, CONTEXT, WIDTH, LETTERS = 204, 32, 8, 64, 96


def build_data() -> torch.Tensor:
    """Return the documentation as numbers of characters: printable ASCII, and 95 for any other."""
    text = "".join(topics[name] for name in sorted(topics))
    return torch.tensor([min(max(ord(letter) - 32, 0), 95) for letter in text])


class Model(torch.nn.Module):
    """Predicts a character from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(LETTERS, 16)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16 * CONTEXT, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, LETTERS)
        )

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.layers(self.letters(context).flatten(1))


def compute_loss(model: torch.nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the characters after these places."""
    context = text[starts[:, None] + torch.arange(CONTEXT, device=text.device)]
    return torch.nn.functional.cross_entropy(model(context), text[starts + CONTEXT])


def main(folder: Path, device: str = "cpu") -> None:
    """Train, and write the results."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    text = build_data().to(device)
    split = len(text) * 9 // 10
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    random = torch.Generator().manual_seed(rank)
    held_out = torch.arange(split, len(text) - CONTEXT - 1, 20, device=device)
    before: list[torch.Tensor] = []
    losses = []
    for step in range(STEPS):
        if step == STEPS - 1:
            before = [parameter.detach().clone() for parameter in model.parameters()]
        if step % 100 == 0:
            with torch.no_grad():
                losses.append(compute_loss(model.module, text, held_out).item())
        optimizer.zero_grad()
        starts = torch.randint(split - CONTEXT, (BATCH,), generator=random)
        compute_loss(model, text, starts.to(device)).backward()
        optimizer.step()
    with torch.no_grad():
        losses.append(compute_loss(model.module, text, held_out).item())
    result = {
        "losses": losses,
        "before": before,
        "parameters": [parameter.detach() for parameter in model.parameters()],
        "gradients": [parameter.grad for parameter in model.parameters()],
    }
    torch.save(result, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
