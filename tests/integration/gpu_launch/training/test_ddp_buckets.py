"""Sizes of DDP's buckets in ranks as a launch starts them, each on a node of its own, and the gradients that they give."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from gpu_launch.training.ddp_buckets import FIRST_BYTES, MOST_BYTES, choose_bucket_bytes
from tests.support.launch.launched_ranks import run_launched

pytestmark = pytest.mark.torch

#: Eight layers of 1 MiB each.
LAYERS, WIDTH = 8, 512
SCRIPT = """
    import json, os, sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    layers, width = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    inputs = torch.randn(4, width) * (dist.get_rank() + 1)
    found = {}
    for name, arguments in {"none": {}, "named": {"bucket_cap_mb": 25}}.items():
        model.zero_grad()
        wrapped = DistributedDataParallel(model, **arguments)
        for _ in range(3):  # the sizes that count are known after two
            wrapped(inputs).square().sum().backward()
        sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        found[name] = {"sizes": [int(size) for size in sizes.split(",")], "gradient": model[0].weight.grad[0].tolist()}
        del wrapped
    if dist.get_rank() == 0:
        Path("found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
"""


def test_few_gradients_have_several_buckets(tmp_path: Path) -> None:
    """They are sent in eight parts, unless the script names a size; the gradients are the same."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ranks = run_launched([str(script), str(LAYERS), str(WIDTH)], 2, {"HOME": str(tmp_path)}, cwd=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr
    found = json.loads((tmp_path / "found.json").read_text())
    layer = 4 * WIDTH * WIDTH
    assert found["none"]["sizes"] == [layer] * LAYERS
    assert found["named"]["sizes"] == [layer * LAYERS]
    assert found["none"]["gradient"] == pytest.approx(found["named"]["gradient"], rel=1e-5)


@pytest.mark.parametrize(
    ("gradient_bytes", "size"),
    [
        (0, FIRST_BYTES),
        (14 << 20, (14 << 20) // 8),
        (110 << 20, (110 << 20) // 8),
        (8 * MOST_BYTES, None),
        (1 << 40, None),
    ],
)
def test_size_follows_the_gradients(gradient_bytes: int, size: int | None) -> None:
    """An eighth, at least 1 MiB; with enough gradients DDP's own size."""
    assert choose_bucket_bytes(gradient_bytes) == size
