"""The broker's benchmarks: scheduling cycles, explanations, grants compared with Slurm's, the HTTP API, placement and queueing."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench import explanations, http_load, scheduling, slurm_grants
from tests.bench.openb import placement, queueing


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield name, value and unit of each figure."""
    for part in (scheduling, explanations, slurm_grants, http_load, placement, queueing):
        yield from part.measure()
