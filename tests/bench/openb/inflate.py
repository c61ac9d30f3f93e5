"""The FGD paper's method to fill a cluster: tasks drawn at random from a trace are placed one by one and never end.

Weng et al. (USENIX ATC 2023, section 6.1) draw until the requested GPUs are a multiple of the cluster's; their
published runs end at 1.3 times and read the unallocated GPUs at every percent. A task that fits nowhere is dropped. CPU
and memory are counted as the trace has them, and tasks without a GPU are placed too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuhub.scheduler.demand import WHOLE, NodeDemand
from gpuhub.scheduler.placement import FreeCapacity, PlacementChoice, PlacementPolicy
from tests.bench.openb.trace import Task, Trace


@dataclass(frozen=True, slots=True)
class Filled:
    """A cluster after inflation."""

    nodes: tuple[FreeCapacity, ...]
    #: Unallocated GPUs, in whole GPUs: when the requested GPUs equal the cluster's, and at the end.
    unallocated_when_full: float
    unallocated: float


def draw(trace: Trace, seed: int, ratio: float) -> list[Task]:
    """Draw tasks at random, with replacement, until they request `ratio` times the cluster's GPUs."""
    chance = random.Random(seed)
    target, asked = ratio * trace.gpus * WHOLE, 0
    drawn: list[Task] = []
    while asked < target:
        drawn.append(chance.choice(trace.tasks))
        asked += size(drawn[-1].demand)
    return drawn


def size(demand: NodeDemand) -> int:
    """Return the thousandths of GPUs that a demand takes."""
    return demand.gpus * demand.milli


def place(node: FreeCapacity, demand: NodeDemand, choice: PlacementChoice) -> FreeCapacity:
    """Return the node with the demand placed."""
    free = list(node.free)
    for at in choice.gpus:
        free[at] -= demand.milli
    return replace(
        node,
        free=tuple(free),
        cpu_milli=node.cpu_milli - demand.cpu_milli,
        memory_mib=node.memory_mib - demand.memory_mib,
        load=node.load + 1,
    )


def release(node: FreeCapacity, demand: NodeDemand, choice: PlacementChoice) -> FreeCapacity:
    """Return the node with the demand released."""
    free = list(node.free)
    for at in choice.gpus:
        free[at] += demand.milli
    return replace(
        node,
        free=tuple(free),
        cpu_milli=node.cpu_milli + demand.cpu_milli,
        memory_mib=node.memory_mib + demand.memory_mib,
        load=node.load - 1,
    )


def fill(
    nodes: Sequence[FreeCapacity], tasks: Sequence[Task], policy: PlacementPolicy, *, ties: random.Random | None
) -> Filled:
    """Place the tasks in order, each on the node of least rank; ties go to the first node, or to one drawn by `ties`."""
    cluster = Cluster(nodes, policy)
    capacity = sum(len(node.cards) for node in nodes) * WHOLE
    asked = placed = 0
    when_full: int | None = None
    for task in tasks:
        asked += size(task.demand)
        if cluster.put(task.demand, ties):
            placed += size(task.demand)
        if when_full is None and asked >= capacity:
            when_full = capacity - placed
    unallocated = capacity - placed
    return Filled(
        nodes=tuple(cluster.nodes),
        unallocated_when_full=(unallocated if when_full is None else when_full) / WHOLE,
        unallocated=unallocated / WHOLE,
    )


class Cluster:
    """Nodes, with each node's choice cached by demand, so that the policy only sees nodes that have changed."""

    def __init__(self, nodes: Sequence[FreeCapacity], policy: PlacementPolicy) -> None:
        self.nodes = list(nodes)
        self._policy = policy
        #: Indices of nodes in the order in which they changed.
        self._changes: list[int] = []
        #: By demand: choices by node, and the number of changes that they include.
        self._choices: dict[NodeDemand, tuple[list[PlacementChoice | None], int]] = {}

    def put(self, demand: NodeDemand, ties: random.Random | None) -> bool:
        """Place a demand on the node of least rank; return False when it fits nowhere."""
        choices = self._up_to_date(demand)
        ranks = [(choice.rank, at) for at, choice in enumerate(choices) if choice is not None]
        if not ranks:
            return False
        least, at = min(ranks)
        if ties is not None:
            at = ties.choice([at for rank, at in ranks if rank == least])
        choice = choices[at]
        assert choice is not None
        self.nodes[at] = place(self.nodes[at], demand, choice)
        self._changes.append(at)
        return True

    def _up_to_date(self, demand: NodeDemand) -> list[PlacementChoice | None]:
        known = self._choices.get(demand)
        if known is None:
            choices = [self._policy.choose(node, demand) for node in self.nodes]
        else:
            choices, since = known
            for at in set(self._changes[since:]):
                choices[at] = self._policy.choose(self.nodes[at], demand)
        self._choices[demand] = (choices, len(self._changes))
        return choices
