"""The seam between the broker and what grants GPUs: values in, a decision out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpuhub.gpus import Card, Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One GPU of the cluster."""

    uuid: str
    node: str
    index: int
    card: Card
    #: Its node takes work and the GPU answers. Whether somebody holds it is said by `Supply.held`.
    available: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A waiting request: `nodes` different nodes with `gpus_per_node` GPUs each, all or none."""

    id: str
    owner: str
    nodes: int = 1
    #: 0 for a notebook without a GPU.
    gpus_per_node: int = 1
    requirement: Requirement = field(default_factory=Requirement)
    exclude: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What there is at one moment."""

    slots: Sequence[Slot]
    #: Owner by UUID of every held GPU.
    held: Mapping[str, str]
    #: Nodes that take work, in the order of the settings, with the number of notebooks on each.
    notebooks: Mapping[str, int]
    #: GPUs one owner may hold at once; None for no limit.
    max_gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a granted request gets on one node."""

    node: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a request waits, for a person, and the GPUs that no later request may take meanwhile."""

    text: str
    claims: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Every request of the queue stands in exactly one of both."""

    grants: Mapping[str, tuple[Share, ...]]
    waits: Mapping[str, Wait]


class Engine(Protocol):
    """What decides who gets which GPU."""

    def decide(self, queue: Sequence[Request], supply: Supply) -> Decision:
        """Grant what can be granted of a queue given in its order."""
        ...

    def candidates(self, request: Request, slots: Sequence[Slot]) -> frozenset[str]:
        """Every GPU that the request could ever use, free or not."""
        ...

    def infeasible(self, request: Request, cards: Mapping[str, Sequence[Card] | None]) -> str | None:
        """Why the request can never be granted, for a person; None when it can.

        `cards` has every node of the cluster, reachable or not; None for one whose GPUs are not known yet.
        """
        ...
