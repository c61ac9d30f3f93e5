"""What goes over the wire between the broker and its clients. Frozen; unknown fields are refused."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gpuhub import names

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
RunId = Annotated[str, StringConstraints(pattern=f"^{names.RUN_PATTERN}$")]
ServerName = Annotated[str, StringConstraints(pattern=f"^({names.SERVER_PATTERN})?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]


class Wire(BaseModel):
    """Base of every wire value."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LeaseState(StrEnum):
    """A lease's life: waiting → granted → active → releasing → released.

    A request that ends while waiting goes straight to released.
    """

    WAITING = "waiting"
    GRANTED = "granted"
    ACTIVE = "active"
    RELEASING = "releasing"
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


class LeaseRequest(Wire):
    """Ask for a notebook's lease."""

    profile: Slug
    server: ServerName = ""
    #: Chosen by the caller; a repeated request with the same key and owner returns the same lease.
    key: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    #: Only with the scope `custom:gpuhub:any-owner`.
    owner: UserName | None = None


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
    #: Place in the queue from 1; None unless waiting.
    position: int | None
    #: One line for a person: what a waiting lease waits for. None unless waiting.
    waiting_for: str | None
    #: Nodes where the lease's containers go, in worker order; one for a notebook. Empty until granted.
    nodes: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    #: Container labels carry it; grows when a lease is granted again.
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


class JobRequest(Wire):
    """Ask for workers: `nnodes` containers on different nodes with `nproc_per_node` GPUs each, all or none."""

    run_id: RunId
    nnodes: Annotated[int, Field(ge=1, le=1024)]
    #: GPUs a worker.
    nproc_per_node: Annotated[int, Field(ge=1, le=64)]
    #: The notebook server that asks; its image and user network are the workers'.
    server: ServerName = ""
    #: Nodes not to use: the notebook's own, where its own GPUs take part.
    exclude_nodes: tuple[str, ...] = ()
    #: Only GPUs of this model; None for any.
    model: Annotated[str, StringConstraints(max_length=64)] | None = None


class JobState(StrEnum):
    """A job's life. `ended` is final, with the reason in `reason`."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
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


class GpuState(StrEnum):
    """Whether a GPU can be given."""

    FREE = "free"
    HELD = "held"
    #: The node cannot be reached, or the GPU has failed.
    UNAVAILABLE = "unavailable"


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
    holder: Holder | None
    #: Percent of time busy, and MiB in use, from NVML's last reading; None where not readable.
    utilisation_percent: int | None
    memory_used_mib: int | None


class NodeState(StrEnum):
    """Whether a node can take work."""

    UP = "up"
    UNREACHABLE = "unreachable"


class NodeView(Wire):
    """A node as everybody sees it."""

    name: str
    state: NodeState
    message: str | None
    gpus: tuple[GpuView, ...]


class QueueEntry(Wire):
    """A waiting request as everybody sees it."""

    lease: str
    position: int
    owner: str
    purpose: Purpose
    #: Such as `profile rtx5090` or `3 nodes × 1 GPU`.
    wants: str
    since: datetime


class ProfileView(Wire):
    """A profile with what is free right now."""

    name: str
    title: str
    description: str
    #: GPUs a notebook with it gets; 0 for CPU only.
    gpu_count: int
    #: GPUs in the cluster that can serve it, and those of them free and not claimed by an earlier waiter.
    total: int
    free: int
    #: A request made now would be granted at once.
    starts_now: bool
    #: Requests a new one would wait behind; 0 where it starts at once.
    ahead: int
    holders: tuple[Holder, ...]


class ClusterView(Wire):
    """The whole cluster at one moment."""

    nodes: tuple[NodeView, ...]
    profiles: tuple[ProfileView, ...]
    queue: tuple[QueueEntry, ...]
    #: The cluster's time, so that a browser with another clock shows right spans.
    now: datetime


class Problem(Wire):
    """An error, as RFC 9457 has it; `detail` is the text for the user."""

    type: str
    title: str
    status: int
    detail: str
    code: str
