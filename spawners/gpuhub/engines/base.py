"""The seam between the broker and what grants GPUs: plain values in, decisions out, the clock passed in.

An engine mirrors what the broker has stored. It is told of every change (`put_node`, `put_request`, `put_holding`,
`drop`, …) and asked what follows (`decide`). It keeps indexes so that a decision costs little at any size, but nothing
that could not be built anew from the broker's store: after a failed write the broker calls `rebuild`.
Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpuhub.gpus import Card, Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One GPU of the cluster, or one MIG device."""

    uuid: str
    node: str
    index: int
    card: Card
    #: Its node takes work and the GPU is healthy, read lately, and used by nobody outside, whoever holds it.
    available: bool = True
    #: Why it is not available, for a person, such as `in use outside gpuhub: 2 processes, 5.1 GiB`.
    trouble: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSupply:
    """One node: what it has, and whether it takes work."""

    name: str
    slots: tuple[Slot, ...] = ()
    #: It is up, settled, and not cordoned.
    takes_work: bool = True
    #: Why it takes none, for a person.
    trouble: str | None = None
    #: NVIDIA's driver there, such as `570.86.15`; None where not known.
    driver: str | None = None
    #: Gangs prefer to stay on one of each; None where nobody said.
    switch: str | None = None
    rack: str | None = None
    #: What containers' limits may add up to; None where nobody counts.
    cpu_milli: int | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A waiting request. All of it is granted at once, or nothing."""

    id: str
    owner: str
    #: Groups of the owner, for limits and reservations.
    groups: frozenset[str] = frozenset()
    #: When it was made, and its place among requests made at the same moment.
    created_at: float = 0.0
    seq: int = 0
    #: Different nodes, at most and at least; `least_nodes` < `nodes` for an elastic job.
    nodes: int = 1
    least_nodes: int = 1
    #: GPUs on each node; 0 for a notebook without a GPU. Not used when `spread` is given.
    gpus_per_node: int = 1
    #: So many GPUs in all, on any number of nodes, any number on each; None for the shape above.
    spread: int | None = None
    requirement: Requirement = field(default_factory=Requirement)
    #: One of so many parts of one GPU; 1 for whole GPUs.
    share: int = 1
    exclude: frozenset[str] = frozenset()
    #: Nothing else may run on its nodes.
    exclusive: bool = False
    #: All GPUs of one model.
    same_model: bool = False
    #: Made by a script that nobody watches; interactive requests go before by policy.
    batch: bool = False
    #: May be preempted.
    scavenge: bool = False
    #: Higher goes first.
    priority: int = 0
    time_limit_s: float | None = None
    #: What its container on each node may use.
    cpu_milli: int = 0
    memory_mib: int = 0
    #: The Slurm job that stands for it; None without Slurm, and until it is submitted.
    slurm_job: int | None = None

    @property
    def size(self) -> int:
        """GPUs in all, at most; a part of one counts as one."""
        return self.spread if self.spread is not None else self.nodes * self.gpus_per_node

    @property
    def least_size(self) -> int:
        """GPUs in all, at least."""
        return self.spread if self.spread is not None else self.least_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a granted request gets on one node."""

    node: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A granted request: what it holds until its GPUs are proven free. Parts given back are no longer in `shares`."""

    request: Request
    shares: tuple[Share, ...]
    granted_at: float
    #: When its time limit ends it; None without one.
    ends_at: float | None = None
    #: Asked to end: not preempted again, and expected to be free soon.
    is_ending: bool = False
    #: Proof is lacking that its GPUs are free: they are blocked, and not charged to its owner.
    is_quarantined: bool = False
    #: Nodes that it was asked to give up and still has: expected to be free soon.
    giving_up: frozenset[str] = frozenset()
    #: The node that leads the others, which cannot go on without it; None where they can.
    leader: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one user, or all users of a group together, may have; None for no limit."""

    max_gpus: int | None = None
    #: Real (not weighted) GPU-hours in any seven days; checked before a grant.
    gpu_hours_per_week: float | None = None
    max_waiting: int | None = None
    max_jobs: int | None = None
    longest_lease_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """An owner as far as scheduling goes."""

    #: For this owner alone.
    each: Limits = field(default_factory=Limits)
    #: For all members of each of the owner's groups together, by group.
    together: Mapping[str, Limits] = field(default_factory=dict)
    #: How much of the cluster is this owner's due, compared with others.
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs kept for some users in a window."""

    id: str
    name: str
    uuids: frozenset[str]
    users: frozenset[str]
    groups: frozenset[str]
    starts_at: float
    ends_at: float

    def admits(self, owner: str, groups: frozenset[str]) -> bool:
        """Whether the owner may use what is reserved."""
        return owner in self.users or bool(groups & self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """GPU-time that an ended lease used: what fair share and weekly limits are made of."""

    owner: str
    groups: frozenset[str]
    card: Card
    #: 1 for whole GPUs.
    share: int
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The policy's numbers, from cluster.toml. Everything about order is told in seconds of waiting time."""

    #: Used GPU-time counts half after so long.
    half_life_s: float = 7 * 86400.0
    #: The owner who used all of the GPU-time waits as if having asked so much later; 0 for no fair share. Since it is
    #: bounded and age is not, nobody starves.
    fair_share_s: float = 86400.0
    #: One point of priority counts as so much waiting time.
    priority_s: float = 600.0
    #: An interactive request counts as made so much earlier than a batch request.
    interactive_s: float = 4 * 3600.0
    #: Later requests may use what an earlier one waits for, if they end in time.
    backfill: bool = True
    #: Requests, in their order, that no backfill may delay; the first in line is always among them.
    protected: int = 4
    #: Scavenging and elastic holdings give GPUs back when others need them.
    preemption: bool = False
    #: Weight of a card in used GPU-time, by short model; others count by memory, 24 GiB as 1.
    card_values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything an engine is built from."""

    nodes: Sequence[NodeSupply] = ()
    requests: Sequence[Request] = ()
    holdings: Sequence[Holding] = ()
    reservations: Sequence[Reservation] = ()
    spent: Sequence[Spent] = ()
    #: By owner; others have no limits and weight 1.
    rights: Mapping[str, Rights] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A request gets its GPUs."""

    shares: tuple[Share, ...]
    #: For the person who asked: `mixed cards: 1 × RTX 5090, 1 × RTX 5070`; None when there is nothing to say.
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A holding is to give GPUs back."""

    holding: str
    #: Nodes to give up; all of the holding's when it ends as a whole.
    nodes: frozenset[str]
    #: Nothing of it stays: it is to be asked for again.
    is_whole: bool
    #: The request that needs them.
    for_request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows at one moment."""

    grants: Mapping[str, Grant] = field(default_factory=dict)
    preemptions: tuple[Preemption, ...] = ()
    #: Look again at this moment even when nothing changes (a reservation begins or ends, a limit frees); None: no need.
    look_again_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One of a request's own demands, and when it would start without it."""

    #: For a person, such as `model RTX 5090`, `3 nodes`, `2 GPUs on one node`, `same model`, `exclusive node`.
    demand: str
    #: None when that is not known even so.
    would_start_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Why a request waits."""

    #: From 1, over all waiting requests in the order in which they are served.
    position: int
    #: One line for a person: what it waits for, and who holds it.
    text: str
    #: From time limits; None when what it needs has no known end.
    expected_start: float | None
    #: Its own demands, the one that makes it wait most first; empty unless asked for in full.
    obstacles: tuple[Obstacle, ...] = ()


class Engine(Protocol):
    """What decides who gets which GPU."""

    # -- told of changes ------------------------------------------------------------------------------------------

    def rebuild(self, world: World) -> None:
        """Forget everything and begin from this."""
        ...

    def put_node(self, node: NodeSupply) -> None:
        """Add or replace a node."""
        ...

    def put_request(self, request: Request) -> None:
        """Add or replace a waiting request."""
        ...

    def put_holding(self, holding: Holding) -> None:
        """Add or replace what is held; a waiting request of the same id no longer waits."""
        ...

    def drop(self, request_id: str, now: float) -> None:
        """A request or a holding is over; what was held is free from now on, its time is spent until now."""
        ...

    def put_rights(self, owner: str, rights: Rights) -> None:
        """Add or replace an owner's limits and weight."""
        ...

    def put_spent(self, spent: Spent) -> None:
        """Add GPU-time that `drop` does not see: of parts given back early, or until a holding was quarantined."""
        ...

    def put_reservations(self, reservations: Iterable[Reservation]) -> None:
        """Replace all reservations."""
        ...

    # -- asked ----------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        """What to grant and what to preempt now.

        The engine counts its own grants as held at once, until `put_holding` says it in full (same id) or `rebuild`.
        Called again without a change at the same moment, it decides nothing new.
        """
        ...

    def order(self, now: float) -> list[str]:
        """All waiting requests in the order in which they are served."""
        ...

    def why(self, request_id: str, now: float, *, in_full: bool = False) -> Why:
        """Why a request waits; KeyError when it does not wait. `in_full` looks for obstacles as well."""
        ...

    def starts_now(self, request: Request, now: float) -> bool:
        """Whether this request, made now, would be granted at once."""
        ...

    def candidates(self, request: Request) -> frozenset[str]:
        """Every GPU that the request could ever use, free or not."""
        ...

    def infeasible(self, request: Request, cards: Mapping[str, Sequence[Card] | None]) -> str | None:
        """Why the request can never be granted, for a person; None when it can.

        `cards` has every node of the cluster, reachable or not; None for one whose GPUs are not known yet.
        """
        ...

    def usage(self, now: float) -> Mapping[str, Usage]:
        """What each known owner has and had."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """An owner's GPUs and GPU-time at one moment."""

    gpus: int = 0
    #: Real GPU-hours in the last seven days.
    gpu_hours_week: float = 0.0
    #: Decayed, weighted by card, in GPU-hours of a 24 GiB card.
    decayed_gpu_hours: float = 0.0
    #: By how much its requests are put back at present, seconds.
    penalty_s: float = 0.0
