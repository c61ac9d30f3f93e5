"""Wire models of leases and their requests, and the base class and field types of all wire models."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints

from gpuhub.common import names

#: Name or id: lower-case letters, digits and dashes, at most 64 characters.
Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
#: Id of a run, chosen by the client.
RunId = Annotated[str, StringConstraints(pattern=f"^{names.RUN_PATTERN}$")]
#: Name of a notebook server; empty for the default one.
ServerName = Annotated[str, StringConstraints(pattern=f"^({names.SERVER_PATTERN})?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
#: Idempotency key of a request, chosen by the client.
RequestKey = Annotated[str, StringConstraints(min_length=1, max_length=128)]
#: Name of a GPU model or node.
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
#: Time limit, seconds; at least a minute, at most 366 days.
TimeLimit = Annotated[int, Field(ge=60, le=366 * 86400)]
ImageName = Annotated[str, StringConstraints(min_length=1, max_length=201)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]
#: A folder below `/datasets`, such as `datasets/imagenet`.
DatasetName = Annotated[str, StringConstraints(pattern=f"^{names.DATASET_PATTERN}$")]


class WireModel(BaseModel):
    """Base of every wire model."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LeaseState(StrEnum):
    """State of a lease: requested → granted → active → releasing → released; see `broker.domain.lease_states`.

    A request that ends while it waits becomes released at once. A lease that should end, without proof that its
    containers are gone, becomes quarantined: its GPUs stay blocked until there is proof.
    """

    REQUESTED = "requested"
    GRANTED = "granted"
    ACTIVE = "active"
    RELEASING = "releasing"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class SuspensionState(StrEnum):
    """State of a suspended notebook: suspending → suspended → resuming → restoring; see `domain.suspension`."""

    #: Its GPU memory is being moved into host memory; it still holds its GPU.
    SUSPENDING = "suspending"
    #: Its variables are in host memory, and others may have its GPU.
    SUSPENDED = "suspended"
    #: It waits in the queue for the GPU that it was suspended on.
    RESUMING = "resuming"
    #: It holds its GPU again, and its memory is being moved back.
    RESTORING = "restoring"


class Purpose(StrEnum):
    """Purpose of a lease."""

    NOTEBOOK = "notebook"
    JOB = "job"


class IdleReason(StrEnum):
    """Why a notebook counts as idle."""

    #: No cell ran, no terminal was used, no file was saved, and its GPUs computed nothing.
    INACTIVE = "inactive"
    #: Its GPUs were hardly used.
    LOW_USE = "low-use"


class IdleView(WireModel):
    """An idle notebook, as shown to its owner."""

    reason: IdleReason
    #: The reason for people, such as `no activity for 50 min`.
    text: str
    since: datetime
    #: When it will be stopped unless it is used or kept.
    stops_at: datetime
    #: The end is near: the owner is warned.
    is_warned: bool
    #: Until when the owner keeps it; None if the owner does not.
    kept_until: datetime | None = None
    #: The time for which the owner may keep it now, seconds; 0 if not any longer.
    keep_s: int = 0


class SuspensionView(WireModel):
    """A suspended notebook, as shown to its owner."""

    state: SuspensionState
    #: One line for people, such as `suspended for 12 min: its variables are in host memory`.
    text: str
    since: datetime
    #: Host memory that holds what was on the GPU, MiB.
    moved_mib: int


class ActivityReport(WireModel):
    """What happens in a notebook, as its own server reports it."""

    #: Whether a cell or ranks run.
    is_busy: bool
    #: Seconds since the last activity of a kernel, terminal or file.
    inactive_s: Annotated[float, Field(ge=0, le=366 * 86400)]
    #: Seconds since a cell last began; None if none has since the server started.
    last_cell_s: Annotated[float, Field(ge=0, le=366 * 86400)] | None = None


class ActivityAnswer(WireModel):
    """The answer to a report."""

    #: None while the notebook is not idle.
    idle: IdleView | None
    #: Seconds until the next report; 0 if none is wanted.
    report_in_s: float
    #: Defects and slowdowns of the notebook's GPUs, one text for each GPU that has some.
    gpu_problems: tuple[str, ...] = ()
    #: None unless the notebook is suspended, or is being suspended or resumed.
    suspension: SuspensionView | None = None


class ReclaimRequest(WireModel):
    """Question of the hub's culler whether to stop a notebook now."""

    owner: UserName
    server: ServerName = ""


class ReclaimAnswer(WireModel):
    """Whether to stop the notebook now."""

    stop: bool


class LeasedGpuView(WireModel):
    """One leased GPU."""

    uuid: str
    node: str
    index: int
    #: Short model name, such as `RTX 5090`.
    model: str
    memory_mib: int
    #: Number of shares that the GPU is divided into, of which the lease has one; 1 for the whole GPU.
    share: int = 1
    #: Memory that the user of a GPU share should not exceed, MiB; it is not enforced. None for a whole GPU.
    memory_cap_mib: int | None = None


class ContainerSizeView(WireModel):
    """CPU and memory of a lease's container on one node."""

    node: str
    #: Cores.
    cpus: float
    memory_mib: int


class LeaseRequest(WireModel):
    """Request of a lease for a notebook."""

    profile: Slug
    server: ServerName = ""
    #: Idempotency key: a repeated request with the same key and owner returns the same lease.
    key: RequestKey
    #: Owner of the lease, if not the caller; only with the scope `custom:gpuhub:any-owner`.
    owner: UserName | None = None
    #: The owner's groups in the hub; only with the same scope.
    groups: Annotated[tuple[GroupName, ...], Field(max_length=64), FailFast()] = ()
    #: Time limit, seconds, shorter than the profile's; None for the profile's.
    time_limit_s: TimeLimit | None = None
    #: Ask again for its GPUs if the notebook's container is lost, such as by a reboot of its node.
    persistent: bool = False
    #: The image that was chosen, which the hub is told when it has to start the notebook again; None for the profile's.
    image: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = None
    #: Whether it may be suspended for others while it is idle, where the profile's settings say so.
    suspendable: bool = True


class LeaseView(WireModel):
    """A lease, as shown to its owner."""

    id: str
    owner: str
    purpose: Purpose
    #: Name of the notebook server (empty for the default one), or id of the job.
    subject: str
    profile: str | None
    state: LeaseState
    #: Number that grows with every change of the lease or of its place in the queue.
    version: int
    #: Position in the queue, from 1; None unless requested, or resuming.
    position: int | None
    #: One line for the user that explains why the request waits. None unless requested.
    waiting_for: str | None
    #: Expected time of the grant, from time limits; None if unknown, or unless requested.
    expected_start: datetime | None = None
    #: Note of the grant for the user, such as that the GPU models differ; None for none.
    note: str | None = None
    priority: int = 0
    #: Nodes of the lease's containers, in the order of the workers; one for a notebook. Empty until granted.
    nodes: tuple[str, ...]
    gpus: tuple[LeasedGpuView, ...]
    #: Limits of its containers, by node; empty until granted, and with Slurm.
    sizes: tuple[ContainerSizeView, ...] = ()
    #: Number of the Slurm job behind the lease; None without Slurm, and until it is submitted.
    slurm_job: int | None = None
    #: Number of the grant, which is in the containers' labels; 1 after the first.
    epoch: int
    created_at: datetime
    granted_at: datetime | None
    #: When its time limit ends it; None without a limit, and before the grant.
    expires_at: datetime | None
    #: Why it ended, for the user.
    reason: str | None
    #: The notebook asks again for its GPUs if its container is lost.
    persistent: bool = False
    #: None unless it is a notebook that is idle, and idle notebooks are stopped.
    idle: IdleView | None = None
    #: Defects and slowdowns of its GPUs, one text for each GPU that has some; empty unless granted.
    gpu_problems: tuple[str, ...] = ()
    #: None unless it is a notebook that is suspended, or is being suspended or resumed.
    suspension: SuspensionView | None = None
    #: Whether it is a notebook that its owner may suspend now.
    may_suspend: bool = False


class ActivationRequest(WireModel):
    """Report that the notebook's container exists."""

    container_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12,64}$")]


class StagingView(WireModel):
    """Progress of the copies of datasets that a notebook's node gets."""

    #: Whether the notebook's container may be created.
    is_ready: bool
    #: What is copied now, for the user.
    message: str = ""
    #: The volume of each copy, by dataset; empty until all are there.
    volumes: dict[str, str] = Field(default_factory=dict)


class ExtensionRequest(WireModel):
    """Request of more time: the lease then ends `time_limit_s` seconds from now."""

    time_limit_s: TimeLimit


class ConstraintView(WireModel):
    """One requirement of a waiting request, and when the request would start without it."""

    demand: str
    would_start_at: datetime | None


class PendingReasonView(WireModel):
    """The reasons why a request waits."""

    lease: str
    position: int
    waits_for: str
    expected_start: datetime | None
    #: Its requirements; the one that delays it most is first.
    obstacles: tuple[ConstraintView, ...]
