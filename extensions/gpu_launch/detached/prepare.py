"""From a detached job's order and its containers to a launch. Pure but for the exchange's files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from gpu_launch import order, wire
from gpu_launch.demand import Demand
from gpu_launch.exchange import Exchange
from gpu_launch.options import Options, parse_words
from gpu_launch.plan import Plan
from gpu_launch.runs import RunFolder


def build_options(job: order.Order, run: RunFolder, nnodes: int) -> Options:
    """The options of a job on so many nodes. Raises UsageError."""
    if job.task is not None:
        # One program a node, see `task`; it sees all GPUs of its container.
        command = ("-m", "gpu_launch.detached.task", str(run.root))
        options = Options(no_python=True, script=sys.executable, arguments=command)
    else:
        options = parse_words(list(job.words), cell=job.cell is not None)
    return replace(options, nnodes=nnodes, detach=True, keep_s=0, timeout_s=None, send=(), returns=())


def build_plan(options: Options, workers: Sequence[wire.Worker]) -> Plan:
    """Worker 0's container is the driver's own, the others are given."""
    least = options.least_nnodes
    return Plan(
        nnodes=len(workers),
        least_nnodes=len(workers) if least is None else min(least, len(workers)),
        nproc_per_node=options.nproc_per_node,
        own=True,
        own_cards=workers[0].gpus,
        exclude_nodes=(),
        demand=Demand(),
    )


def find_exchange(run: RunFolder) -> Exchange | None:
    """What the notebook left for the ranks; None for nothing."""
    if not run.exchange.is_dir():
        return None
    return Exchange(files={path.name: path.read_bytes() for path in run.exchange.iterdir() if path.is_file()})
