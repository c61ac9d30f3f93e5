"""A cluster's trace: its nodes, and the tasks that came. Reads the two CSV files of OpenB's format.

OpenB was published by Alibaba with "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation
Gradient Descent" (Weng et al., USENIX ATC 2023; github.com/alibaba/clusterdata, cluster-trace-gpu-v2023). It names GPU
models and says nothing of their memory, so no card counts as more capable than another here.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuhub.engines.placement import WHOLE, Demand, NodeState
from gpuhub.gpus import Card
from tests.bench.openb import generated

#: `shared/` lies beside the checkout.
_SHARED = Path(__file__).parents[4] / "shared" / "traces" / "openb"
_NODES = "*node_list_gpu_node.csv"
_PODS = "*pod_list_default.csv"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the trace."""

    demand: Demand
    #: When it came, and how long it ran, seconds.
    created_at: float
    runs_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A cluster with nothing running, and what came."""

    name: str
    nodes: tuple[NodeState, ...]
    #: In the order in which they came.
    tasks: tuple[Task, ...]

    @property
    def gpus(self) -> int:
        """How many GPUs the cluster has."""
        return sum(len(node.cards) for node in self.nodes)


def load() -> Trace:
    """The trace in the folder `$TRACE`; without it OpenB where it is at hand, otherwise the generated one."""
    asked = os.environ.get("TRACE")
    if asked:
        return read(Path(asked))
    if _SHARED.is_dir():
        return read(_SHARED)
    return parse("generated", generated.node_rows(), generated.pod_rows())


def read(folder: Path) -> Trace:
    """The trace in a folder with one file of nodes and one of pods."""
    with _only(folder, _NODES).open(newline="") as nodes, _only(folder, _PODS).open(newline="") as pods:
        return parse(str(folder), csv.DictReader(nodes), csv.DictReader(pods))


def parse(name: str, nodes: Iterable[Mapping[str, str]], pods: Iterable[Mapping[str, str]]) -> Trace:
    """A trace from rows by column name."""
    states = tuple(_node(row) for row in nodes)
    models = sorted({card.model for state in states for card in state.cards})
    tasks = sorted((_task(row, models) for row in pods), key=lambda task: task.created_at)
    return Trace(name=name, nodes=states, tasks=tuple(tasks))


def typical(tasks: Iterable[Task], share: float = 0.95) -> tuple[tuple[Demand, float], ...]:
    """The most frequent demands that together make up `share` of all, as FGD's authors count them, by frequency."""
    counts = Counter(task.demand for task in tasks)
    chosen: list[tuple[Demand, float]] = []
    so_far = 0
    for demand, count in counts.most_common():
        if so_far >= share * counts.total():
            break
        chosen.append((demand, float(count)))
        so_far += count
    return tuple(chosen)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} has {len(found)} files like {pattern}: a trace has one")
    return found[0]


def _node(row: Mapping[str, str]) -> NodeState:
    gpus = int(row["gpu"])
    return NodeState(
        cards=(_card(row["model"]),) * gpus,
        free=(WHOLE,) * gpus,
        cpu_milli=int(row["cpu_milli"]),
        memory_mib=int(row["memory_mib"]),
    )


def _card(model: str) -> Card:
    return Card(model=model, memory_mib=0)


def _task(row: Mapping[str, str], models: Iterable[str]) -> Task:
    gpus = int(row["num_gpu"])
    wanted = [model for model in row["gpu_spec"].split("|") if model in set(models)] if row["gpu_spec"] else None
    created_at = float(row["creation_time"])
    return Task(
        demand=Demand(
            gpus=gpus,
            cards=None if wanted is None else tuple(_card(model) for model in wanted),
            milli=int(row["gpu_milli"]) if gpus == 1 else WHOLE,
            cpu_milli=int(row["cpu_milli"]),
            memory_mib=int(row["memory_mib"]),
        ),
        created_at=created_at,
        runs_s=float(row["deletion_time"]) - float(row["scheduled_time"] or created_at),
    )
