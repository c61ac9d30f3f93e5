"""Placement on a cluster filled by the FGD paper's method: unallocated GPUs under the product's policy and others.

Every policy places the same drawn tasks and knows the same about the workload as in the paper: the most frequent
demands that make up 95 % of the trace. None knows the order.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache

from gpuhub.scheduler.placement import PlacementPolicy, make_least_waste
from tests.bench.openb import baselines, inflate, shapes, trace
from tests.bench.openb.inflate import Filled
from tests.bench.openb.trace import Trace

#: Requested GPUs over the cluster's at the end, as in the published runs.
RATIO = 1.3
SEEDS = 10
#: Seeds for each of the trace's variations.
SHAPE_SEEDS = 3

MAKERS: dict[str, Callable[[Trace], PlacementPolicy]] = {
    "ours": lambda of: make_least_waste(trace.typical(of.tasks), of.supply),
    "fgd": lambda of: baselines.FragmentationGradientDescent(trace.typical(of.tasks)),
    "best_fit": lambda of: baselines.best_fit(of.nodes),
    "first_fit": lambda of: baselines.FirstFit(),
    "random": lambda of: baselines.Random(),
}
#: The policies that fill the variations.
_COMPARED = ("ours", "fgd", "first_fit")


def measure(seeds: int = SEEDS) -> Iterator[tuple[str, float, str]]:
    """Yield figures as name, value and unit; means over the seeds."""
    loaded = trace.load()
    for name, value, unit in _measure(loaded, seeds):
        yield name + loaded.suffix, value, unit


def _measure(loaded: Trace, seeds: int) -> Iterator[tuple[str, float, str]]:
    print(
        f"placement: trace {loaded.name}: {len(loaded.nodes)} nodes, {loaded.gpus} GPUs, {len(loaded.tasks)} tasks",
        file=sys.stderr,
    )
    filled = fill_all(tuple(MAKERS), seeds)
    when_full = {name: [run.unallocated_when_full for run in runs] for name, runs in filled.items()}
    means = {name: statistics.fmean(values) for name, values in when_full.items()}
    finals = {name: statistics.fmean(run.unallocated for run in runs) for name, runs in filled.items()}
    for name, values in when_full.items():
        spread = statistics.stdev(values) if seeds > 1 else 0.0
        print(
            f"placement: {name}: {means[name]:.1f} GPUs unallocated when as many were asked for as there are, "
            f"standard deviation {spread:.1f}; {finals[name]:.1f} after {RATIO} times as many",
            file=sys.stderr,
        )
    yield "broker.unallocated_over_fgd", means["ours"] / means["fgd"], "ratio"
    yield "broker.unallocated_over_fgd_late", finals["ours"] / finals["fgd"], "ratio"
    for name, mean in means.items():
        yield f"broker.unallocated_gpus_{name}", mean, "GPUs"
    for shape in shapes.SHAPES:
        varied = fill_all(_COMPARED, min(seeds, SHAPE_SEEDS), shape)
        means = {name: statistics.fmean(run.unallocated_when_full for run in runs) for name, runs in varied.items()}
        print(f"placement: {shape}: {', '.join(f'{name} {mean:.1f}' for name, mean in means.items())}", file=sys.stderr)
        yield f"broker.unallocated_over_fgd_{shape}", means["ours"] / means["fgd"], "ratio"


def fill_all(names: tuple[str, ...], seeds: int, shape: str | None = None) -> dict[str, list[Filled]]:
    """Fill the trace's cluster, or a variation, with each policy and seed, with one process for each processor."""
    jobs = [(name, seed, shape) for name in names for seed in range(seeds)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        filled = list(pool.map(_fill, jobs, chunksize=max(1, seeds // 2)))
    return {name: [run for (of, _, _), run in zip(jobs, filled, strict=True) if of == name] for name in names}


def fill_one(of: Trace, policy: PlacementPolicy, seed: int, *, ties_at_random: bool = False) -> Filled:
    """Fill the trace's cluster with one seed."""
    tasks = inflate.draw(of, seed, RATIO)
    return inflate.fill(of.nodes, tasks, policy, ties=random.Random(seed) if ties_at_random else None)


def _fill(job: tuple[str, int, str | None]) -> Filled:
    name, seed, shape = job
    return fill_one(_trace(shape), _policy(name, shape), seed, ties_at_random=name == "random")


@cache
def _trace(shape: str | None) -> Trace:
    loaded = trace.load()
    return loaded if shape is None else shapes.vary(loaded, shape)


@cache
def _policy(name: str, shape: str | None) -> PlacementPolicy:
    return MAKERS[name](_trace(shape))
