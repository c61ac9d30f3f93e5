"""A cluster's trace in the two CSV files of OpenB's format: its nodes and its tasks.

OpenB was published by Alibaba with "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation
Gradient Descent" (Weng et al., USENIX ATC 2023; github.com/alibaba/clusterdata, cluster-trace-gpu-v2023). It names GPU
models without their memory, so every card counts as equally capable here.
"""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler.demand import WHOLE, NodeDemand
from gpuhub.scheduler.placement import FreeCapacity
from tests.bench.openb import generated

#: Read when `$TRACE` names no other folder.
DEFAULT_FOLDER = Path(__file__).parents[3] / ".cache" / "traces" / "openb"
PUBLISHED = "OpenB is published at https://github.com/alibaba/clusterdata in the folder cluster-trace-gpu-v2023"
_NODES = "*node_list_gpu_node.csv"
_PODS = "*pod_list_default.csv"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the trace."""

    demand: NodeDemand
    #: Arrival and run time, seconds.
    created_at: float
    runs_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """An idle cluster and the tasks that arrive."""

    name: str
    nodes: tuple[FreeCapacity, ...]
    #: What the names of its figures end with, so that those of different traces cannot be confused.
    suffix: str
    #: By arrival.
    tasks: tuple[Task, ...]

    @property
    def gpus(self) -> int:
        """The number of GPUs of the cluster."""
        return self.supply.total()

    @property
    def supply(self) -> Counter[GpuSpec]:
        """The number of GPUs of each card."""
        return Counter(card for node in self.nodes for card in node.cards)


def load() -> Trace:
    """Return the trace of `$TRACE`, a folder or a file of pods, else the one in `.cache/traces/openb`, else the generated one."""
    folder = os.environ.get("TRACE")
    if folder:
        return read(Path(folder))
    if DEFAULT_FOLDER.is_dir():
        return read(DEFAULT_FOLDER)
    print(
        f"No trace: $TRACE is not set and {DEFAULT_FOLDER} does not exist. Measuring on a small generated trace. "
        f"{PUBLISHED}: put its files *node_list_gpu_node.csv and *pod_list_default.csv into one folder.",
        file=sys.stderr,
    )
    return parse("generated", generated.node_rows(), generated.pod_rows(), suffix="_generated")


def read(path: Path) -> Trace:
    """Read the trace in a folder with one file of nodes and one of pods, or another file of pods in such a folder.

    Raises:
        FileNotFoundError: The folder lacks one of the two files, or has several.
    """
    pod_list = path if path.is_file() else _find_only_file(path, _PODS)
    with _find_only_file(pod_list.parent, _NODES).open(newline="") as nodes, pod_list.open(newline="") as pods:
        return parse(str(path), csv.DictReader(nodes), csv.DictReader(pods))


def parse(
    name: str, nodes: Iterable[Mapping[str, str]], pods: Iterable[Mapping[str, str]], *, suffix: str = ""
) -> Trace:
    """Build a trace from rows by column name."""
    states = tuple(_node(row) for row in nodes)
    models = sorted({card.model for state in states for card in state.cards})
    tasks = sorted((_task(row, models) for row in pods), key=lambda task: task.created_at)
    return Trace(name=name, nodes=states, suffix=suffix, tasks=tuple(tasks))


def typical(tasks: Iterable[Task], share: float = 0.95) -> tuple[tuple[NodeDemand, float], ...]:
    """Return the most frequent demands that together make up `share` of all, most frequent first, as FGD counts them."""
    counts = Counter(task.demand for task in tasks)
    chosen: list[tuple[NodeDemand, float]] = []
    so_far = 0
    for demand, count in counts.most_common():
        if so_far >= share * counts.total():
            break
        chosen.append((demand, float(count)))
        so_far += count
    return tuple(chosen)


def _find_only_file(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise FileNotFoundError(
            f"{folder} has {len(files)} files named {pattern}; a trace has exactly one. {PUBLISHED}. "
            "Name the folder that has its files, or its file of pods, with TRACE=PATH."
        )
    return files[0]


def _node(row: Mapping[str, str]) -> FreeCapacity:
    gpus = int(row["gpu"])
    return FreeCapacity(
        cards=(_gpu_spec(row["model"]),) * gpus,
        free=(WHOLE,) * gpus,
        cpu_milli=int(row["cpu_milli"]),
        memory_mib=int(row["memory_mib"]),
    )


def _gpu_spec(model: str) -> GpuSpec:
    return GpuSpec(model=model, memory_mib=0)


def _task(row: Mapping[str, str], models: Iterable[str]) -> Task:
    gpus = int(row["num_gpu"])
    spec = row.get("gpu_spec") or ""
    wanted = [model for model in spec.split("|") if model in set(models)] if spec else None
    created_at = float(row["creation_time"])
    return Task(
        demand=NodeDemand(
            gpus=gpus,
            cards=None if wanted is None else tuple(_gpu_spec(model) for model in wanted),
            milli=int(row["gpu_milli"]) if gpus == 1 else WHOLE,
            cpu_milli=int(row["cpu_milli"]),
            memory_mib=int(row["memory_mib"]),
        ),
        created_at=created_at,
        runs_s=float(row["deletion_time"]) - float(row["scheduled_time"] or created_at),
    )
