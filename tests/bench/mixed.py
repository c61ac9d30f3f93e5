"""Three ranks with simulated speeds of 1 : 0.5 : 0.3: balanced batches, and plain DDP with equal ones.

The speeds are sleeps for every sample, so the figures show what balancing and the ranks' waits cost, not how fast a GPU
is. All ranks are processes on this machine, with gloo over loopback.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.launch.torchrun import run_ranks

RANKS = 3


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `mixed`; larger is better, and 1 is the most that is possible."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks("tests.bench.mixed_ranks", folder, RANKS)
        rates = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    alone = sum(rate["alone"] for rate in rates)
    yield "closet.mixed_over_sum", rates[0]["balanced"] / alone, "ratio"
    yield "closet.mixed_plain_over_sum", rates[0]["plain"] / alone, "ratio"
