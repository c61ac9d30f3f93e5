"""Nodes, GPUs and who has what over the wire, and what administrators say about them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from gpuhub.broker.schemas.base import GroupName, Model, Text, UserName, Wire
from gpuhub.broker.schemas.leases import Purpose


class GpuState(StrEnum):
    """Whether a GPU can be given."""

    FREE = "free"
    HELD = "held"
    #: Its lease is over, and nobody can prove that the container is gone.
    QUARANTINED = "quarantined"
    #: Processes that gpuhub did not start use it, or with Slurm a job beside gpuhub's has it.
    OUTSIDE = "outside"
    #: Lost, fallen off the bus, uncorrectable memory errors, or NVML fails for it.
    FAILED = "failed"
    #: Its node takes no work: not reached, cordoned, draining, or its GPUs cannot be read.
    UNAVAILABLE = "unavailable"


class OutsideProcess(Wire):
    """A process on a GPU that gpuhub did not start; what NVML tells."""

    pid: int
    #: None where NVML cannot tell.
    memory_mib: int | None


class Holder(Wire):
    """Who holds a GPU."""

    owner: str
    purpose: Purpose
    since: datetime
    until: datetime | None
    #: The job's, where it has one.
    name: str = ""
    #: The number of the Slurm job by which it is held; None without Slurm.
    slurm_job: int | None = None
    #: That job is not gpuhub's.
    is_outside: bool = False


class GpuView(Wire):
    """A GPU as everybody sees it."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    state: GpuState
    #: Who holds it; the first one where it is shared.
    holder: Holder | None
    #: Everybody who holds it or a part of it.
    holders: tuple[Holder, ...] = ()
    #: How many parts it is shared in at present; 1 for a whole GPU.
    share: int = 1
    is_mig: bool = False
    #: CUDA compute capability, such as `8.9`; None where NVML cannot tell.
    capability: str | None = None
    #: Why it cannot be given, for a person; None when nothing is wrong.
    message: str | None = None
    outside: tuple[OutsideProcess, ...] = ()
    #: The name of the reservation that keeps it at present.
    reservation: str | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    #: Percent of time busy, and MiB in use, from NVML's last reading; None where not readable.
    utilisation_percent: int | None
    memory_used_mib: int | None


class NodeState(StrEnum):
    """Whether a node can take work."""

    UP = "up"
    #: Its daemon does not answer.
    UNREACHABLE = "unreachable"
    #: An administrator lets it take no new work.
    CORDONED = "cordoned"
    #: Cordoned, and what runs there is being ended.
    DRAINING = "draining"
    #: Unreachable for so long that nobody waits for it.
    DOWN = "down"


class NodeView(Wire):
    """A node as everybody sees it."""

    name: str
    state: NodeState
    message: str | None
    gpus: tuple[GpuView, ...]
    driver: str | None = None
    switch: str | None = None
    rack: str | None = None
    #: Leases that have containers there, GPUs or not.
    leases: int = 0


class QueueEntry(Wire):
    """A waiting request as everybody sees it."""

    lease: str
    position: int
    owner: str
    purpose: Purpose
    #: Such as `profile rtx5090`, `3 nodes × 1 GPU` or `train.py: 1 node × 2 GPUs`.
    wants: str
    since: datetime
    #: None where it is not known.
    expected_start: datetime | None = None


class ProfileView(Wire):
    """A profile with what is free right now."""

    name: str
    title: str
    description: str
    #: GPUs a notebook with it gets; 0 for CPU only.
    gpu_count: int
    #: GPUs in the cluster that can serve it, and those of them free and not claimed by an earlier waiter; both count
    #: parts where it gives a part of a GPU.
    total: int
    free: int
    #: A request made now would be granted at once.
    starts_now: bool
    #: Requests a new one would wait behind; 0 where it starts at once.
    ahead: int
    #: Who holds what could serve it, whose time ends first; a few at most.
    holders: tuple[Holder, ...]
    #: It gives one of so many parts of a GPU; 1 for whole ones.
    share: int = 1


class KindView(Wire):
    """The GPUs of one model."""

    model: str
    free: int
    total: int


class PartitionView(Wire):
    """A partition of Slurm's that has nodes of gpuhub's; None for no limit."""

    name: str
    #: Jobs that name none go there.
    is_default: bool
    #: Its jobs are started.
    is_up: bool
    #: How long a job may last, and what one gets that asks for no time, seconds.
    longest_s: int | None
    usual_s: int | None
    #: Nodes that one job may have.
    most_nodes: int | None
    #: So many of gpuhub's nodes, and what they have.
    nodes: int
    gpus: tuple[KindView, ...]
    #: Names of the profiles whose notebooks go there.
    profiles: tuple[str, ...]


class ReservationRequest(Wire):
    """Keep GPUs for some users in a window."""

    name: Text
    #: All GPUs of these nodes, and these GPUs.
    nodes: Annotated[tuple[Model, ...], Field(max_length=1024)] = ()
    gpus: Annotated[tuple[Annotated[str, StringConstraints(max_length=80)], ...], Field(max_length=8192)] = ()
    users: Annotated[tuple[UserName, ...], Field(max_length=1024)] = ()
    groups: Annotated[tuple[GroupName, ...], Field(max_length=64)] = ()
    #: With a time zone.
    starts_at: AwareDatetime
    ends_at: AwareDatetime


class Reservation(ReservationRequest):
    """A reservation as everybody sees it."""

    id: str
    created_by: str


class CordonRequest(Wire):
    """Why a node is to take no new work; for a drain also how long what runs there may go on."""

    reason: Annotated[str, StringConstraints(max_length=300)] = ""
    #: For a drain only, seconds until leases there end.
    grace_s: Annotated[int, Field(ge=0, le=30 * 86400)] = 0


class CountedBy(StrEnum):
    """Who counted used GPU-time."""

    #: The broker, and fair share goes by it.
    BUILTIN = "builtin"
    #: The broker, beside a Slurm that keeps no accounts or does not answer.
    BROKER = "broker"
    #: slurmdbd, with what was run beside gpuhub.
    SLURM = "slurm"


class AccountHours(Wire):
    """Used GPU-time by one of Slurm's accounts."""

    account: str
    gpu_hours_week: float


class UsageView(Wire):
    """What one owner has, had and may have; None for no limit."""

    owner: str
    gpus: int
    waiting: int
    #: Real GPU-hours in the last seven days.
    gpu_hours_week: float
    #: Decayed and weighted by card, in hours of a 24 GiB card: what fair share goes by.
    decayed_gpu_hours: float
    #: How far its requests are put back at present, seconds.
    penalty_s: float
    max_gpus: int | None
    max_gpu_hours_week: float | None
    max_waiting: int | None
    #: Who counted `gpu_hours_week`, and those hours by Slurm's accounts, where it did.
    counted_by: CountedBy = CountedBy.BUILTIN
    accounts: tuple[AccountHours, ...] = ()


class Event(Wire):
    """One thing that the broker did, or found out."""

    #: Grows from event to event; ask for those after it.
    seq: int = 0
    at: datetime
    #: Such as `lease.granted`, `lease.quarantined`, `container.removed`, `node.unreachable`, `gpu.failed`.
    kind: str
    text: str
    owner: str | None = None
    lease: str | None = None
    job: str | None = None
    node: str | None = None


class ClusterView(Wire):
    """The whole cluster at one moment."""

    nodes: tuple[NodeView, ...]
    profiles: tuple[ProfileView, ...]
    #: The beginning of the queue, and all requests of one's own.
    queue: tuple[QueueEntry, ...]
    #: All requests that wait.
    waiting: int = 0
    #: With Slurm: jobs beside gpuhub's that wait for GPUs in the same queue.
    waiting_outside: int = 0
    reservations: tuple[Reservation, ...] = ()
    #: What decides who gets which GPU: `builtin` is gpuhub itself.
    engine: Literal["builtin", "slurm"] = "builtin"
    #: With Slurm as the engine.
    partitions: tuple[PartitionView, ...] = ()
    #: The cluster's time, so that a browser with another clock shows right spans.
    now: datetime


class Problem(Wire):
    """An error, as RFC 9457 has it; `detail` is the text for the user."""

    type: str
    title: str
    status: int
    detail: str
    code: str
