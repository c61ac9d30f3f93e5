"""Interface between the broker and a scheduler: values in, decisions out.

A scheduler keeps a copy of what the broker has stored. The broker reports every change (`put_node`, `put_request`,
`put_allocation`, `remove`, …) and asks for a decision (`decide`). The scheduler keeps indexes so that a decision is
cheap at any size, but nothing that `rebuild` could not build again from the broker's store after a failed write. Times
are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.config.containers.container_size import LEAST_CPU_MILLI, LEAST_MEMORY_MIB
from gpuhub.config.settings import SchedulingSettings


def build_parameters(scheduling: SchedulingSettings) -> SchedulingParameters:
    """Return the rules that `[scheduling]` of cluster.toml sets."""
    return SchedulingParameters(
        half_life_s=scheduling.half_life,
        fair_share_s=scheduling.fair_share,
        priority_s=scheduling.priority_step,
        interactive_s=scheduling.interactive_first,
        backfill=scheduling.backfill,
        preemption=scheduling.preemption,
        card_values=scheduling.card_values,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBudget:
    """An enforced circuit: GPUs in use on its nodes may draw no more together than its machines leave."""

    name: str
    #: The most for the GPUs of all its nodes together, watts.
    gpu_watts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlot:
    """One GPU of the cluster, or one MIG device."""

    uuid: str
    node: str
    index: int
    card: GpuSpec
    #: True while its node takes work and the GPU is healthy, recently read and not used outside gpuhub; leases do not
    #: count.
    available: bool = True
    #: The reason, for people, such as `in use outside gpuhub: 2 processes, 5.1 GiB`.
    unavailable_reason: str | None = None
    #: The most that the GPU may draw, watts; None if not known. A MIG device has the power limit of its GPU.
    watts: int | None = None
    #: UUID of a MIG device's GPU.
    parent: str | None = None

    @property
    def whole_uuid(self) -> str:
        """Return the UUID of the GPU, also for one of its MIG devices."""
        return self.parent or self.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """The GPUs and limits of one node, and whether it takes work."""

    name: str
    slots: tuple[GpuSlot, ...] = ()
    #: True while the node is up, clear of unknown containers, and not cordoned.
    takes_work: bool = True
    #: The reason for people; None while it takes work.
    unavailable_reason: str | None = None
    #: It was woken and will take work soon; and how long that usually takes, seconds, None if not known.
    is_waking: bool = False
    usual_wake_s: float | None = None
    #: Version of NVIDIA's driver, such as `570.86.15`; None if not known.
    driver: str | None = None
    #: Gangs are placed on one switch, else in one rack, if possible; None if not set.
    switch: str | None = None
    rack: str | None = None
    #: Limit of the sum of the containers' limits; None if not known.
    cpu_milli: int | None = None
    memory_mib: int | None = None
    #: The share of it that goes with a whole GPU, and what a container without GPU gets that requests no number.
    cpu_per_gpu: int = 0
    memory_per_gpu: int = 0
    cpu_without_gpu: int = 0
    memory_without_gpu: int = 0
    #: Only requests of owners in one of these groups are placed there; empty for all requests.
    groups: frozenset[str] = frozenset()
    #: The enforced circuit that supplies it, the same on all of its nodes; None for no limit.
    circuit: CircuitBudget | None = None

    def admits(self, groups: frozenset[str]) -> bool:
        """Return whether requests of an owner with these groups may be placed on the node."""
        return not self.groups or not self.groups.isdisjoint(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRequest:
    """A waiting request; all of it is granted at once, or nothing."""

    id: str
    owner: str
    #: The owner's groups, for quotas, reservations and nodes.
    groups: frozenset[str] = frozenset()
    #: Time of the request, and its number among requests of the same time.
    created_at: float = 0.0
    seq: int = 0
    #: Number of different nodes, at most and at least; `least_nodes` is below `nodes` for an elastic job.
    nodes: int = 1
    least_nodes: int = 1
    #: GPUs on each node; 0 for a notebook without GPU. Ignored if `spread` is set.
    gpus_per_node: int = 1
    #: GPUs in total, on any number of nodes with any number on each; None for `nodes` and `gpus_per_node`.
    spread: int | None = None
    requirement: GpuRequirement = field(default_factory=GpuRequirement)
    #: Number of equal shares of the GPU, of which the request gets one; 1 for whole GPUs.
    share: int = 1
    exclude: frozenset[str] = frozenset()
    #: Nothing else may run on its nodes.
    exclusive: bool = False
    #: All GPUs must be of one model.
    same_model: bool = False
    #: Made by a script; interactive requests come earlier in the queue.
    batch: bool = False
    #: May be preempted.
    scavenge: bool = False
    #: Larger numbers come earlier in the queue.
    priority: int = 0
    time_limit_s: float | None = None
    #: Limits of its container on each node.
    cpu_milli: int = 0
    memory_mib: int = 0
    #: The container gets its GPUs' share of the node, as far as that is free, and at least the limits above.
    cpu_by_gpu: bool = False
    memory_by_gpu: bool = False
    #: Id of the Slurm job of the lease; None without Slurm, and until it is submitted.
    slurm_job: int | None = None
    #: Requests of one bundle are granted at the same moment, or none of them is; None for a request by itself.
    bundle: str | None = None

    @property
    def names_cpu(self) -> bool:
        """Return whether it needs more CPU than every container with its GPUs' share does."""
        return self.cpu_milli > (LEAST_CPU_MILLI if self.cpu_by_gpu else 0)

    @property
    def names_memory(self) -> bool:
        """Return whether it needs more memory than every container with its GPUs' share does."""
        return self.memory_mib > (LEAST_MEMORY_MIB if self.memory_by_gpu else 0)

    @property
    def size(self) -> int:
        """Return the largest number of GPUs; a GPU share counts as one."""
        return self.spread if self.spread is not None else self.nodes * self.gpus_per_node

    @property
    def least_size(self) -> int:
        """Return the smallest number of GPUs that the request accepts."""
        return self.spread if self.spread is not None else self.least_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAllocation:
    """The GPUs of a granted request on one node."""

    node: str
    slots: tuple[GpuSlot, ...]
    #: CPU and memory of its container there; None: what the request says.
    cpu_milli: int | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A granted request with what it holds until its GPUs are proven free; released parts are not in it any more."""

    request: SchedulingRequest
    node_allocations: tuple[NodeAllocation, ...]
    granted_at: float
    #: End of its time limit; None without one.
    ends_at: float | None = None
    #: Asked to end: not preempted again, and expected to be free soon.
    is_ending: bool = False
    #: Its GPUs lack proof that they are free: they are blocked and not charged to the owner.
    is_quarantined: bool = False
    #: Nodes that it was asked to release and still has: expected to be free soon.
    shrinking: frozenset[str] = frozenset()
    #: The node without which the others cannot continue; None if there is none.
    leader: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """Limits for one user, or for all users of a group together; None for no limit."""

    max_gpus: int | None = None
    #: Real (not weighted) GPU-hours in any seven days; checked before a grant.
    gpu_hours_per_week: float | None = None
    max_waiting: int | None = None
    max_jobs: int | None = None
    longest_lease_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """An owner's limits and weight."""

    #: Limits of this owner alone.
    per_user: QuotaLimits = field(default_factory=QuotaLimits)
    #: Limits of all members together, for each group of the owner.
    per_group: Mapping[str, QuotaLimits] = field(default_factory=dict)
    #: The owner's share of the cluster relative to other owners.
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs kept for some users in a window of time."""

    id: str
    name: str
    uuids: frozenset[str]
    users: frozenset[str]
    groups: frozenset[str]
    starts_at: float
    ends_at: float

    def admits(self, owner: str, groups: frozenset[str]) -> bool:
        """Return whether the owner may use the reserved GPUs."""
        return owner in self.users or bool(groups & self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """GPU time of ended leases; fair share and weekly limits are computed from these."""

    owner: str
    groups: frozenset[str]
    card: GpuSpec
    #: Number of shares of the GPU, of which the lease had one; 1 for whole GPUs.
    share: int
    started_at: float
    ended_at: float
    #: Number of such GPUs; a fraction for an average over the time.
    gpus: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParameters:
    """The `[scheduling]` numbers of cluster.toml. Everything about order is in seconds of waiting time."""

    #: Half of the counted usage is forgotten after this time.
    half_life_s: float = 7 * 86400.0
    #: Largest penalty: the owner of all usage waits as if the request came this much later; 0 for no fair share. The
    #: penalty is bounded and age is not, so no request starves.
    fair_share_s: float = 86400.0
    #: One point of priority counts as this much waiting time.
    priority_s: float = 600.0
    #: An interactive request counts as made this much earlier than a batch request.
    interactive_s: float = 4 * 3600.0
    #: Later requests may use GPUs that an earlier one waits for, if they end in time.
    backfill: bool = True
    #: Number of requests, in their order, that backfill may not delay; the first of the queue is always among them.
    protected: int = 4
    #: Scavenging and elastic allocations release GPUs when other requests need them.
    preemption: bool = False
    #: Weight of a card's usage, by short model name; other cards count by memory, with 24 GiB as 1.
    card_values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """Everything that a scheduler is built from."""

    nodes: Sequence[NodeCapacity] = ()
    requests: Sequence[SchedulingRequest] = ()
    allocations: Sequence[Allocation] = ()
    reservations: Sequence[Reservation] = ()
    usage_records: Sequence[UsageRecord] = ()
    #: Quotas by owner; an owner without an entry has no limits and weight 1.
    quotas: Mapping[str, Quota] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The GPUs that a request gets."""

    node_allocations: tuple[NodeAllocation, ...]
    #: For the owner, such as `mixed cards: 1 × RTX 5090, 1 × RTX 5070`; None for no remark.
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """The order to an allocation to release GPUs."""

    allocation_id: str
    #: Nodes to release; all nodes of the allocation if it ends as a whole.
    nodes: frozenset[str]
    #: The whole allocation ends, and its request will wait again.
    is_whole: bool
    #: Id of the request that needs the GPUs.
    for_request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingDecision:
    """Grants and preemptions at one moment."""

    grants: Mapping[str, Grant] = field(default_factory=dict)
    preemptions: tuple[Preemption, ...] = ()
    #: When to decide again even if nothing changes (a reservation begins or ends, a quota frees); None for never.
    decide_again_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One requirement of a request, and when the request would start without it."""

    #: For people, such as `model RTX 5090`, `3 nodes`, `2 GPUs on one node`, `same model`, `exclusive node`.
    requirement: str
    #: None if it is not known even then, or too much waits before it to compute it.
    would_start_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReason:
    """The reason why a request waits."""

    #: Queue position, from 1, over all waiting requests in the order in which they are served.
    position: int
    #: One line for people: what the request waits for, and which owners hold it.
    text: str
    #: Computed from time limits; None if what it needs has no known end, or too much waits before it to compute it.
    expected_start: float | None


class Scheduler(Protocol):
    """Decides which request gets which GPUs."""

    # -- changes ------------------------------------------------------------------------------------------------

    def rebuild(self, snapshot: SchedulerSnapshot) -> None:
        """Replace everything by the snapshot."""
        ...

    def put_node(self, node: NodeCapacity) -> None:
        """Add or replace a node."""
        ...

    def put_request(self, request: SchedulingRequest) -> None:
        """Add or replace a waiting request."""
        ...

    def put_allocation(self, allocation: Allocation) -> None:
        """Add or replace an allocation; a waiting request of the same id no longer waits."""
        ...

    def remove(self, request_id: str, now: float) -> None:
        """Remove a request or an allocation; its GPUs are free from `now`, and its usage is counted until then."""
        ...

    def put_quota(self, owner: str, quota: Quota) -> None:
        """Add or replace an owner's limits and weight."""
        ...

    def record_usage(self, record: UsageRecord) -> None:
        """Add usage that `remove` does not count: of GPUs released early, or until a lease was quarantined."""
        ...

    def set_reservations(self, reservations: Iterable[Reservation]) -> None:
        """Replace all reservations."""
        ...

    # -- decisions and reports --------------------------------------------------------------------------------

    def decide(self, now: float) -> SchedulingDecision:
        """Return what to grant and what to preempt now.

        The scheduler counts its own grants as held at once, until `put_allocation` replaces them (same id) or
        `rebuild`. Called again without a change at the same moment, it decides nothing new.
        """
        ...

    def order_requests(self, now: float) -> list[str]:
        """Return all waiting requests in the order in which they are served."""
        ...

    def explain_pending(self, request_id: str, now: float) -> PendingReason:
        """Return why a request waits.

        Raises:
            KeyError: The request does not wait.
        """
        ...

    def find_constraints(self, request_id: str, now: float) -> Iterator[Constraint]:
        """Yield the request's own requirements, each computed when it is asked for.

        The scheduler may change in between; nothing more follows when the request has changed or no longer waits.
        """
        ...

    def can_start_now(self, request: SchedulingRequest, now: float) -> bool:
        """Return whether this request, made now, would be granted at once."""
        ...

    def find_startable(self, nodes: Iterable[NodeCapacity], now: float) -> frozenset[str]:
        """Return the waiting requests that would be granted now if these nodes were so; nothing is granted."""
        ...

    def find_candidates(self, request: SchedulingRequest) -> frozenset[str]:
        """Return every GPU that the request could ever use, free or not."""
        ...

    def find_grantable(self, request: SchedulingRequest, now: float) -> frozenset[str]:
        """Return those of the request's candidates that it would be granted if they were free: none while a quota keeps
        more from its owner, and none that are reserved for others now.
        """
        ...

    def report_circuits(self) -> Mapping[str, CircuitUsage]:
        """Return how much of each enforced circuit is taken, by its name."""
        ...

    def has_room(self, node: str, cpu_milli: int, memory_mib: int) -> bool:
        """Return whether a node has this CPU (thousandths of a core) and memory besides what is held there."""
        ...

    def explain_infeasible(
        self, request: SchedulingRequest, cards: Mapping[str, Sequence[GpuSpec] | None]
    ) -> str | None:
        """Return why the request can never be granted, for people; None if it can.

        Args:
            cards: The GPUs of every node of the cluster, reachable or not; None for a node whose GPUs are not known
                yet.
        """
        ...

    def explain_infeasible_bundle(
        self, requests: Sequence[SchedulingRequest], cards: Mapping[str, Sequence[GpuSpec] | None]
    ) -> str | None:
        """Return why these requests, each of which can be granted, never all can at the same time; None if they can.

        Args:
            cards: As for `explain_infeasible`.
        """
        ...

    def report_usage(self, now: float) -> Mapping[str, OwnerUsage]:
        """Return the GPUs and usage of each known owner."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitUsage:
    """What the GPUs in use on an enforced circuit may draw, and the most that they may, watts."""

    taken_watts: int
    gpu_watts: int
    #: UUIDs of all GPUs and MIG devices on its nodes.
    uuids: frozenset[str] = frozenset()
    #: Unused GPUs that the circuit could not power now in addition to those in use.
    unsupplied: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUsage:
    """An owner's GPUs and GPU time at one moment."""

    gpus: int = 0
    #: Real GPU-hours of the last seven days.
    gpu_hours_week: float = 0.0
    #: Decayed usage, weighted by card, in GPU-hours of a 24 GiB card.
    decayed_gpu_hours: float = 0.0
    #: Seconds by which the owner's requests currently count as younger.
    penalty_s: float = 0.0
