"""What goes over the wire between the broker and its clients. Frozen; unknown fields are refused."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

from gpuhub import names

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
RunId = Annotated[str, StringConstraints(pattern=f"^{names.RUN_PATTERN}$")]
ServerName = Annotated[str, StringConstraints(pattern=f"^({names.SERVER_PATTERN})?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Model = Annotated[str, StringConstraints(min_length=1, max_length=64)]
#: Seconds; a year at most.
TimeLimit = Annotated[int, Field(ge=60, le=366 * 86400)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]


class Wire(BaseModel):
    """Base of every wire value."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LeaseState(StrEnum):
    """A lease's life: requested → granted → active → releasing → released; see `leases`.

    A request that ends while it waits goes straight to released. A lease that is to end while nobody can prove that
    its containers are gone is quarantined: its GPUs stay blocked until there is proof.
    """

    REQUESTED = "requested"
    GRANTED = "granted"
    ACTIVE = "active"
    RELEASING = "releasing"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Purpose(StrEnum):
    """What a lease is for."""

    NOTEBOOK = "notebook"
    JOB = "job"


class Gpu(Wire):
    """One leased GPU."""

    uuid: str
    node: str
    index: int
    #: Short model name, such as `RTX 5090`.
    model: str
    memory_mib: int
    #: The lease has one of so many parts; 1 for the whole GPU.
    share: int = 1
    #: What a part promises to use at most, MiB; no wall stands behind it. None for a whole GPU.
    memory_cap_mib: int | None = None


class LeaseRequest(Wire):
    """Ask for a notebook's lease."""

    profile: Slug
    server: ServerName = ""
    #: Chosen by the caller; a repeated request with the same key and owner returns the same lease.
    key: Key
    #: Only with the scope `custom:gpuhub:any-owner`.
    owner: UserName | None = None
    #: The owner's groups in the hub; only with the same scope.
    groups: Annotated[tuple[GroupName, ...], Field(max_length=64)] = ()
    #: Shorter than the profile's, seconds; None for the profile's own.
    time_limit_s: TimeLimit | None = None


class Lease(Wire):
    """A lease as its owner sees it."""

    id: str
    owner: str
    purpose: Purpose
    #: The notebook's server name (empty for the default one) or the job's id.
    subject: str
    profile: str | None
    state: LeaseState
    #: Grows with every change of this lease or its place in the queue.
    version: int
    #: Place in the queue from 1; None unless requested.
    position: int | None
    #: One line for a person: what a requested lease waits for. None unless requested.
    waiting_for: str | None
    #: When it is expected to be granted, from time limits; None where that is not known, or unless requested.
    expected_start: datetime | None = None
    #: For a person, from the grant: that its cards differ, say. None when there is nothing to say.
    note: str | None = None
    priority: int = 0
    #: Nodes where the lease's containers go, in worker order; one for a notebook. Empty until granted.
    nodes: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    #: Container labels carry it; the grant makes it 1.
    epoch: int
    created_at: datetime
    granted_at: datetime | None
    #: When the profile's time limit ends it; None without a limit or before the grant.
    expires_at: datetime | None
    #: Why it ended, for a person.
    reason: str | None


class Activation(Wire):
    """The notebook's container exists."""

    container_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12,64}$")]


class Extension(Wire):
    """Ask for more time: the lease then ends so many seconds from now."""

    time_limit_s: TimeLimit


class Obstacle(Wire):
    """One of a request's own demands, and when it would start without it."""

    demand: str
    would_start_at: datetime | None


class Why(Wire):
    """Why a request waits."""

    lease: str
    position: int
    waits_for: str
    expected_start: datetime | None
    #: Its own demands; the one that makes it wait most stands first.
    obstacles: tuple[Obstacle, ...]


class JobRequest(Wire):
    """Ask for workers, all or none: `nnodes` containers on different nodes with `nproc_per_node` GPUs each, or `gpus`
    GPUs on any nodes.
    """

    run_id: RunId
    nnodes: Annotated[int, Field(ge=1, le=1024)] = 1
    #: An elastic job takes so many nodes at the least, and may be shrunk to them; None for exactly `nnodes`.
    min_nnodes: Annotated[int, Field(ge=1, le=1024)] | None = None
    #: GPUs a worker.
    nproc_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    #: GPUs in all, on any number of nodes; stands instead of `nnodes` and `nproc_per_node`, which must then be 1.
    gpus: Annotated[int, Field(ge=1, le=8192)] | None = None
    #: The notebook server that asks; its image and user network are the workers'.
    server: ServerName = ""
    #: Nodes not to use: the notebook's own, where its own GPUs take part.
    exclude_nodes: Annotated[tuple[Model, ...], Field(max_length=1024)] = ()
    #: Only GPUs of these models, best liked first; empty for any.
    models: Annotated[tuple[Model, ...], Field(max_length=16)] = ()
    #: Least memory of each GPU, MiB.
    least_memory_mib: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    #: NVIDIA's driver on the nodes, such as `570` or `570.86.15`.
    least_driver: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$")] | None = None
    #: CUDA compute capability, such as `8.9`.
    least_capability: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")] | None = None
    #: All GPUs of one model.
    same_model: bool = False
    #: Nothing else may run on the nodes.
    exclusive: bool = False
    #: Nobody watches it: interactive requests go before.
    batch: bool = False
    #: It may be preempted: its workers get SIGTERM, a grace period, and the job waits again.
    scavenge: bool = False
    #: Higher goes first; only an administrator may ask for more than 0.
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    #: None for the settings' own.
    time_limit_s: TimeLimit | None = None


class ArrayRequest(Wire):
    """Ask for many jobs of one GPU each: `count` jobs with run ids `RUN-0`, `RUN-1`, …"""

    job: JobRequest
    count: Annotated[int, Field(ge=1, le=1000)]


class JobState(StrEnum):
    """A job's life. `ended` is final, with the reason in `reason`; a preempted job goes back to `waiting`."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    #: Its workers got SIGTERM and have a grace period to write a checkpoint.
    PREEMPTING = "preempting"
    STOPPING = "stopping"
    ENDED = "ended"


class WorkerState(StrEnum):
    """A worker container's life."""

    PENDING = "pending"
    RUNNING = "running"
    EXITED = "exited"


class Worker(Wire):
    """One worker container of a job."""

    index: int
    node: str
    gpus: tuple[Gpu, ...]
    state: WorkerState
    exit_code: int | None
    #: For a person: why it could not start or ended, `out of memory` among them.
    message: str | None


class Job(Wire):
    """A job as its owner sees it."""

    id: str
    run_id: str
    owner: str
    state: JobState
    version: int
    lease: Lease
    workers: tuple[Worker, ...]
    nnodes: int
    nproc_per_node: int
    reason: str | None
    #: The job ends when it is not renewed for this long.
    renew_within_s: float
    #: The least number of nodes of an elastic job; `nnodes` for any other.
    min_nnodes: int = 1
    #: GPUs in all, for a job on any nodes; None for `nnodes` × `nproc_per_node`.
    gpus: int | None = None
    scavenge: bool = False
    #: How often it was preempted as a whole.
    preemptions: int = 0
    #: Until when its workers may write a checkpoint; None unless preempting.
    checkpoint_until: datetime | None = None
    #: The run id of the array it belongs to; None for a job of its own.
    array: str | None = None


class GpuState(StrEnum):
    """Whether a GPU can be given."""

    FREE = "free"
    HELD = "held"
    #: Its lease is over, and nobody can prove that the container is gone.
    QUARANTINED = "quarantined"
    #: Processes that gpuhub did not start use it.
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
    #: Such as `profile rtx5090` or `3 nodes × 1 GPU`.
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
    reservations: tuple[Reservation, ...] = ()
    #: The cluster's time, so that a browser with another clock shows right spans.
    now: datetime


class Problem(Wire):
    """An error, as RFC 9457 has it; `detail` is the text for the user."""

    type: str
    title: str
    status: int
    detail: str
    code: str
