"""Where a request goes on a cluster with room for it: what a placement policy sees, and what it answers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gpuhub.gpus import Card

#: A whole GPU in thousandths; a shared profile asks for less.
WHOLE = 1000
#: Stands for CPU or memory that nobody counts on a node.
UNCOUNTED = 1 << 60


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is free on one node. Nodes with equal states are interchangeable, so answers can be remembered by state."""

    #: The card of each GPU, in a fixed order.
    cards: tuple[Card, ...]
    #: Thousandths of each GPU that may be given; 0 for one that is held, failed or withheld.
    free: tuple[int, ...]
    #: Free CPU in thousandths of a core, and free memory in MiB; `UNCOUNTED` where nobody counts.
    cpu_milli: int = UNCOUNTED
    memory_mib: int = UNCOUNTED
    #: Containers of notebooks and workers that run there.
    load: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes of one node."""

    #: Whole GPUs when `milli` is `WHOLE`; otherwise 1, and `milli` of that one. 0: no GPU.
    gpus: int
    #: The cards that will do, best liked first; None for any.
    cards: tuple[Card, ...] | None = None
    milli: int = WHOLE
    cpu_milli: int = 0
    memory_mib: int = 0
    #: Nothing else may run on the node.
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Which GPUs of a node a demand would get, and how well that suits: the smallest rank of all nodes wins."""

    rank: tuple[float, ...]
    #: Positions in `NodeState.free`.
    gpus: tuple[int, ...]


class Policy(Protocol):
    """Chooses GPUs within a node and ranks the node. A pure function of its arguments and of how it was made."""

    def choose(self, node: NodeState, demand: Demand) -> Choice | None:
        """The best choice on this node; None when the demand does not fit there now."""
        ...


#: Makes a policy for a typical workload: pairs of a demand and how often it comes (any positive scale).
MakePolicy = Callable[[tuple[tuple[Demand, float], ...]], Policy]
