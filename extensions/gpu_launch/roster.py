"""Who takes part in one start of the ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The nodes of one start, by node rank: the notebook's own container first, where it takes part, then workers."""

    own: bool
    #: Workers' indexes in the broker's job, and their nodes' names.
    workers: tuple[int, ...]
    nodes: tuple[str, ...]
    nproc_per_node: int
    #: How often the job had been preempted when it was granted.
    preemptions: int = 0

    @property
    def members(self) -> tuple[int | None, ...]:
        """Workers' indexes by node rank; None is the notebook's own container."""
        return (None, *self.workers) if self.own else self.workers

    @property
    def nnodes(self) -> int:
        """Nodes."""
        return len(self.members)

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nnodes * self.nproc_per_node

    def node_rank(self, worker: int | None) -> int:
        """The node rank of a worker's index; None is the notebook's own container."""
        return self.members.index(worker)

    def node_of(self, worker: int) -> str:
        """The name of a worker's node."""
        return self.nodes[self.workers.index(worker)]

    def first(self, nnodes: int) -> Roster:
        """The first so many nodes of it."""
        kept = max(0, nnodes - int(self.own))
        return replace(self, workers=self.workers[:kept], nodes=self.nodes[:kept])

    def without(self, workers: frozenset[int]) -> Roster:
        """What is left when these workers go."""
        left = [pair for pair in zip(self.workers, self.nodes, strict=True) if pair[0] not in workers]
        return replace(self, workers=tuple(pair[0] for pair in left), nodes=tuple(pair[1] for pair in left))
