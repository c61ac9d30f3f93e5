"""Balanced batches in the loops of other libraries train as one process with whole batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.launch import balanced_frameworks
from tests.support.launch.launched_ranks import run_launched

pytestmark = pytest.mark.torch


def train(library: str, folder: Path, ranks: int) -> list[list[torch.Tensor]]:
    """Return each rank's parameters after training."""
    folder.mkdir()
    script = str(Path(balanced_frameworks.__file__))
    # Lightning takes the variables of torchrun for true only where there is this one.
    launched = {"TORCHELASTIC_RUN_ID": "run"}
    done = run_launched([script, library, str(folder)], ranks, launched, cwd=folder)
    assert [rank.code for rank in done] == [0] * ranks, "\n".join(rank.stdout + rank.stderr for rank in done)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("library", balanced_frameworks.TRAININGS)
def test_shares_of_different_size_train_as_whole_batches(tmp_path, library):
    """With samples that count differently, and last batches that are smaller."""
    (expected,) = train(library, tmp_path / "whole", 1)
    ranks = len(balanced_frameworks.SPEEDS)
    for parameters in train(library, tmp_path / "balanced", ranks):
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
