"""Wire models of nodes, GPUs, the queue and events, and of administrators' requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, FailFast, Field, StringConstraints

from gpuhub.broker_api.schemas.bench import NodeBenchView
from gpuhub.broker_api.schemas.leases import GroupName, ModelName, Purpose, Text, UserName, WireModel


class GpuState(StrEnum):
    """State of a GPU: only a free one can be granted."""

    FREE = "free"
    HELD = "held"
    #: Its lease has ended, without proof that the container is gone.
    QUARANTINED = "quarantined"
    #: Processes from outside gpuhub use it, or, with Slurm, a job from outside gpuhub has it.
    OUTSIDE = "outside"
    #: It is lost, has uncorrectable memory errors, or NVML fails for it.
    FAILED = "failed"
    #: Its node takes no work: it is unreachable, cordoned or draining, or its GPUs cannot be read. Or its enforced
    #: circuit cannot supply it next to the GPUs that are in use.
    UNAVAILABLE = "unavailable"


class OutsideProcess(WireModel):
    """A process on a GPU that gpuhub did not start, as NVML reports it."""

    pid: int
    #: Used memory, MiB; None where NVML does not report it.
    memory_mib: int | None


class HolderView(WireModel):
    """The holder of a GPU."""

    owner: str
    purpose: Purpose
    since: datetime
    until: datetime | None
    #: Name of the job; empty for none.
    name: str = ""
    #: Number of the Slurm job that holds it; None without Slurm.
    slurm_job: int | None = None
    #: That Slurm job is from outside gpuhub.
    is_outside: bool = False
    #: Since when the holder does not use it, shown while others wait for GPUs; None if it is used, or not known.
    idle_since: datetime | None = None


class GpuView(WireModel):
    """A GPU, as shown to all users."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    state: GpuState
    #: Holder of the GPU; the first one where it is shared.
    holder: HolderView | None
    #: All holders of the GPU or of shares of it.
    holders: tuple[HolderView, ...] = ()
    #: Number of shares that it is divided into now; 1 for a whole GPU.
    share: int = 1
    is_mig: bool = False
    #: CUDA compute capability, such as `8.9`; None where NVML does not report it.
    capability: str | None = None
    #: Why it cannot be granted, for users; None if it can.
    message: str | None = None
    outside: tuple[OutsideProcess, ...] = ()
    #: Name of the reservation that it is reserved by now.
    reservation: str | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    #: Time busy, percent, by NVML's last reading; None if unknown.
    utilisation_percent: int | None
    #: Memory in use, MiB, by NVML's last reading; None if unknown.
    memory_used_mib: int | None


class NodeState(StrEnum):
    """State of a node: only one that is up takes work."""

    UP = "up"
    #: Its Docker daemon does not answer.
    UNREACHABLE = "unreachable"
    #: An administrator has cordoned it: it takes no new work.
    CORDONED = "cordoned"
    #: Cordoned, and what runs there ends.
    DRAINING = "draining"
    #: Unreachable for longer than `down_after`, or woken without an answer.
    DOWN = "down"
    #: Put to sleep, or being so: the queue wakes it when it needs it.
    ASLEEP = "asleep"
    #: Woken, and without an answer yet.
    WAKING = "waking"


class PowerView(WireModel):
    """The power of a node that may sleep."""

    #: `on`, `stopping`, `asleep`, `waking` or `failed`.
    state: str
    since: datetime
    #: How long it usually takes to wake, seconds; None before the first time.
    usual_wake_s: float | None = None
    #: When the queue may wake it again after a failure.
    retry_at: datetime | None = None
    #: Why it was not woken, or not put to sleep.
    error: str | None = None


class CircuitView(WireModel):
    """An enforced circuit: what its GPUs in use may draw, and the most that they may, watts."""

    name: str
    taken_watts: int
    gpu_watts: int

    def describe(self) -> str:
        """Return a text such as `circuit left: 850 W of 1,140 W for GPUs taken`."""
        return f"circuit {self.name}: {self.taken_watts:,} W of {self.gpu_watts:,} W for GPUs taken"


class PowerRequest(WireModel):
    """Request to wake a node, or to put it to sleep."""

    on: bool


class NodeView(WireModel):
    """A node, as shown to all users."""

    name: str
    state: NodeState
    message: str | None
    gpus: tuple[GpuView, ...]
    driver: str | None = None
    switch: str | None = None
    rack: str | None = None
    #: Number of leases with containers there, with or without GPUs.
    leases: int = 0
    #: Groups whose members alone get work placed there; empty for all users.
    groups: tuple[GroupName, ...] = ()
    #: Whether the caller is one of those users.
    is_open: bool = True
    #: Whether scavenging jobs of the caller may be placed there.
    takes_scavenging: bool = True
    #: User whose machine it is.
    owner: str | None = None
    #: Whether it is a guest, a machine that somebody lends over the internet.
    guest: bool = False
    #: Whether jobs of the caller with `guests` may be placed there.
    takes_guests: bool = False
    #: Whether it is on, asleep or on its way; None for a node that stays on.
    power: PowerView | None = None
    #: The enforced circuit that supplies it, with all of the circuit's nodes counted; None for no limit.
    circuit: CircuitView | None = None
    #: What `gpuhub bench` last measured there; None before.
    bench: NodeBenchView | None = None
    #: Owners of waiting requests that could be granted there, at most two: enough for each owner to see whether others
    #: wait as well. None if unknown.
    wanted_by: tuple[str, ...] | None = None


class QueueEntry(WireModel):
    """A waiting request, as shown to all users."""

    lease: str
    position: int
    owner: str
    purpose: Purpose
    #: Such as `profile rtx5090`, `3 nodes × 1 GPU` or `train.py: 1 node × 2 GPUs`.
    wants: str
    since: datetime
    #: Expected time of the grant; None if unknown.
    expected_start: datetime | None = None


class ProfileView(WireModel):
    """A profile, with the GPUs that are free for it now."""

    name: str
    title: str
    description: str
    #: GPUs of a notebook with this profile; 0 for CPU only.
    gpu_count: int
    #: GPUs in the cluster that can serve it; GPU shares, if the profile grants a share.
    total: int
    #: Number of these GPUs or shares that are free, and not claimed by an earlier request.
    free: int
    #: Whether a request would be granted at once.
    starts_now: bool
    #: Number of requests before a new one; 0 if it starts at once.
    ahead: int
    #: Holders of GPUs that can serve it, those whose time ends first; a few at most.
    holders: tuple[HolderView, ...]
    #: Number of shares of a GPU, of which the profile grants one; 1 for whole GPUs.
    share: int = 1
    #: GPU models that it admits, in order of preference; empty for any.
    models: tuple[str, ...] = ()
    #: Image of its notebooks, and all those that users may choose, this one first.
    image: str = ""
    images: tuple[str, ...] = ()
    #: CPU cores and memory (MiB) of its container: on the node with the least, and on that with the most of it. None
    #: where no node is known.
    cpus: tuple[float, float] | None = None
    memory_mib: tuple[int, int] | None = None


class GpuModelView(WireModel):
    """Number of GPUs of one model."""

    model: str
    free: int
    total: int


class PartitionView(WireModel):
    """A Slurm partition that has nodes of gpuhub; None for no limit."""

    name: str
    #: Whether it is the default of jobs without a partition.
    is_default: bool
    #: Whether Slurm starts its jobs.
    is_up: bool
    #: Maximum time limit of a job, seconds.
    longest_s: int | None
    #: Time limit of a job that requests none, seconds.
    usual_s: int | None
    #: Maximum number of nodes of one job.
    most_nodes: int | None
    #: Number of gpuhub's nodes in it.
    nodes: int
    #: GPUs of these nodes, by model.
    gpus: tuple[GpuModelView, ...]
    #: Names of the profiles whose notebooks run there.
    profiles: tuple[str, ...]


class ReservationRequest(WireModel):
    """Request to reserve GPUs for some users in a period."""

    name: Text
    #: Nodes of which all GPUs are reserved.
    nodes: Annotated[tuple[ModelName, ...], Field(max_length=1024), FailFast()] = ()
    #: UUIDs of further GPUs.
    gpus: Annotated[
        tuple[Annotated[str, StringConstraints(max_length=80)], ...], Field(max_length=8192), FailFast()
    ] = ()
    users: Annotated[tuple[UserName, ...], Field(max_length=1024), FailFast()] = ()
    groups: Annotated[tuple[GroupName, ...], Field(max_length=64), FailFast()] = ()
    #: Begin and end, with a time zone.
    starts_at: AwareDatetime
    ends_at: AwareDatetime


class ReservationView(ReservationRequest):
    """A reservation, as shown to all users."""

    id: str
    created_by: str


class CordonRequest(WireModel):
    """Request to cordon or drain a node."""

    reason: Annotated[str, StringConstraints(max_length=300)] = ""
    #: Time until leases there end, seconds; for a drain only.
    grace_s: Annotated[int, Field(ge=0, le=30 * 86400)] = 0
    #: Detached jobs get SIGTERM at once, end within the grace and wait for GPUs again, instead of ending for good; for
    #: a drain only.
    requeue: bool = False


class EventView(WireModel):
    """One action or observation of the broker."""

    #: Number that grows from event to event; a client requests those after the last one it has.
    seq: int = 0
    at: datetime
    #: Such as `lease.granted`, `lease.quarantined`, `container.removed`, `node.unreachable`, `gpu.failed`.
    kind: str
    text: str
    owner: str | None = None
    lease: str | None = None
    job: str | None = None
    node: str | None = None


class Capabilities(WireModel):
    """What the scheduling backend offers. The broker, pages and clients ask these and never the backend's name."""

    #: Another scheduler that grants leases, such as `Slurm`; empty where gpuhub itself does.
    scheduler: str = ""
    #: What is free is granted at once; otherwise also such a request waits a moment in the other scheduler's queue.
    immediate_grants: bool = True
    #: Leases are jobs of the other scheduler, which it starts and ends. Jobs of others may have GPUs of the same nodes.
    external_jobs: bool = False
    #: Notebooks and workers are containers on the nodes; otherwise the other scheduler's jobs are what runs.
    containers: bool = True
    #: A lease may be for a part of a GPU.
    gpu_shares: bool = True
    #: gpuhub itself can keep new work from a node, and keep GPUs for some users.
    cordons: bool = True
    reservations: bool = True
    #: gpuhub itself puts requests back of users who used much.
    fair_share: bool = True
    #: A notebook can ask again for its GPUs when its container was lost.
    persistent_notebooks: bool = True
    #: Jobs may have a priority, and may offer to be preempted.
    priorities: bool = True
    preemption: bool = True


class ClusterView(WireModel):
    """The state of the whole cluster at one moment."""

    nodes: tuple[NodeView, ...]
    #: Profiles that the caller may use.
    profiles: tuple[ProfileView, ...]
    #: The beginning of the queue, and all requests of the caller.
    queue: tuple[QueueEntry, ...]
    #: Number of all waiting requests.
    waiting: int = 0
    #: Number of Slurm jobs from outside gpuhub that wait for GPUs in the same queue.
    waiting_outside: int = 0
    reservations: tuple[ReservationView, ...] = ()
    #: Scheduling backend: `builtin` is gpuhub's own.
    engine: str = "builtin"
    capabilities: Capabilities = Capabilities()
    #: With Slurm as the backend.
    partitions: tuple[PartitionView, ...] = ()
    #: Current time of the cluster, for clients whose clocks differ.
    now: datetime


class Problem(WireModel):
    """An error as defined by RFC 9457; `detail` is the text for the user."""

    type: str
    title: str
    status: int
    detail: str
    code: str


def count_models(gpus: Iterable[GpuView]) -> tuple[GpuModelView, ...]:
    """Return the number of GPUs of each model, and of those the free ones, in alphabetical order."""
    total: Counter[str] = Counter()
    free: Counter[str] = Counter()
    for gpu in gpus:
        total[gpu.model] += 1
        free[gpu.model] += gpu.state is GpuState.FREE
    return tuple(GpuModelView(model=model, free=free[model], total=count) for model, count in sorted(total.items()))
