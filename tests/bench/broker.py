"""The broker as a scheduler: decisions, grants beside Slurm's, placement and queueing on a real trace, and its API."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench import decisions, http_load, slurm_grants
from tests.bench.openb import placement, queueing


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield name, value and unit of each figure."""
    for part in (decisions, slurm_grants, http_load, placement, queueing):
        yield from part.measure()
