"""The FGD paper's way to fill a cluster: tasks drawn at random from a trace, placed one by one, and none ever ends.

Weng et al. (USENIX ATC 2023, section 6.1) draw until the GPUs asked for are so many times the cluster's; their published
runs go on to 1.3 times and read the unallocated GPUs at every percent. A task that fits nowhere is dropped. CPU and
memory are counted as the trace gives them, and tasks without a GPU are placed too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuhub.engines.placement import WHOLE, Choice, Demand, NodeState, Policy
from tests.bench.openb.trace import Task, Trace


@dataclass(frozen=True, slots=True)
class Filled:
    """A cluster after inflation."""

    nodes: tuple[NodeState, ...]
    #: GPUs that nobody got, in whole GPUs: when as many were asked for as there are, and at the end.
    unallocated_when_full: float
    unallocated: float


def draw(trace: Trace, seed: int, ratio: float) -> list[Task]:
    """Tasks at random, with replacement, until they ask for `ratio` times the cluster's GPUs."""
    chance = random.Random(seed)
    target, asked = ratio * trace.gpus * WHOLE, 0
    drawn: list[Task] = []
    while asked < target:
        drawn.append(chance.choice(trace.tasks))
        asked += size(drawn[-1].demand)
    return drawn


def size(demand: Demand) -> int:
    """Thousandths of GPUs that a demand takes."""
    return demand.gpus * demand.milli


def place(node: NodeState, demand: Demand, choice: Choice) -> NodeState:
    """The node with the demand on it."""
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


def give_back(node: NodeState, demand: Demand, choice: Choice) -> NodeState:
    """The node without the demand on it."""
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


def fill(nodes: Sequence[NodeState], tasks: Sequence[Task], policy: Policy, *, ties: random.Random | None) -> Filled:
    """Place the tasks in their order, each on the node of least rank; among equals the first, or one by `ties`."""
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
    """Nodes and, for each demand seen, each node's choice: only what changed since is asked of the policy again."""

    def __init__(self, nodes: Sequence[NodeState], policy: Policy) -> None:
        self.nodes = list(nodes)
        self._policy = policy
        #: Nodes in the order in which they changed.
        self._changes: list[int] = []
        #: By demand: choices by node, and how many changes they know of.
        self._choices: dict[Demand, tuple[list[Choice | None], int]] = {}

    def put(self, demand: Demand, ties: random.Random | None) -> bool:
        """Place a demand on the node of least rank; False when it fits nowhere."""
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

    def _up_to_date(self, demand: Demand) -> list[Choice | None]:
        known = self._choices.get(demand)
        if known is None:
            choices = [self._policy.choose(node, demand) for node in self.nodes]
        else:
            choices, since = known
            for at in set(self._changes[since:]):
                choices[at] = self._policy.choose(self.nodes[at], demand)
        self._choices[demand] = (choices, len(self._changes))
        return choices
