"""Immutable values of leases, jobs, reservations and events, as the store has them, and the identity of a caller."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from gpuhub.broker_api.schemas import JobState, LeaseState, NotificationKind, Purpose, SuspensionState, WorkerState
from gpuhub.common.gpu import GpuRequirement
from gpuhub.config.containers.container_size import DEFAULT_CPUS, DEFAULT_MEMORY

#: Size of a container with a share of a node of unknown size.
_USUAL_CPU_MILLI = round(DEFAULT_CPUS * 1000)
_USUAL_MEMORY_MIB = DEFAULT_MEMORY // 1024**2


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed: prefix `l` for leases, `j` for jobs, `r` for reservations."""
    return f"{prefix}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The resources of a request: `nodes` different nodes with `gpus_per_node` GPUs each, or `spread` GPUs anywhere."""

    nodes: int = 1
    #: Below `nodes` for an elastic job.
    least_nodes: int = 1
    gpus_per_node: int = 1
    #: GPUs in total, on any nodes; None for `nodes` and `gpus_per_node`.
    spread: int | None = None
    models: tuple[str, ...] = ()
    least_memory_mib: int = 0
    least_driver: str | None = None
    least_capability: tuple[int, int] | None = None
    #: Number of equal shares of the GPU, of which the request gets one; 1 for whole GPUs.
    share: int = 1
    exclude: tuple[str, ...] = ()
    exclusive: bool = False
    same_model: bool = False
    #: Datasets of which each node gets a copy before its container starts.
    stage: tuple[str, ...] = ()
    batch: bool = False
    scavenge: bool = False
    #: It runs on guests, and only there.
    guests: bool = False
    priority: int = 0
    #: Limits of its container on each node, or the least that it needs where its GPUs' share of the node counts.
    cpu_milli: int = 0
    memory_mib: int = 0
    cpu_by_gpu: bool = False
    memory_by_gpu: bool = False
    #: Size of /dev/shm; None for the usual one.
    shm_mib: int | None = None
    #: A notebook that may be suspended for others while it is idle.
    suspendable: bool = True
    #: Run id of the job group whose waiting requests are granted at the same moment; None for a request by itself.
    bundle: str | None = None
    #: Seconds that it keeps them when the jobs of its group without this value have ended; None for such a job.
    auxiliary_s: int | None = None

    @property
    def requirement(self) -> GpuRequirement:
        return GpuRequirement(
            models=self.models,
            least_memory_mib=self.least_memory_mib,
            least_driver=self.least_driver,
            least_capability=self.least_capability,
        )

    @property
    def size(self) -> int:
        """Return the largest number of GPUs."""
        return self.spread if self.spread is not None else self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGpu:
    """A GPU, or a share of one, in a lease; held until `released_at`."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    #: Position of its node in the lease's order of nodes.
    worker: int
    #: The lease has part `part` (from 0) of `share` parts; a whole GPU is part 0 of 1.
    share: int = 1
    part: int = 0
    #: When an elastic job was asked to release it while the lease continues; None if it was not.
    shrink_requested_at: float | None = None
    released_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSize:
    """CPU and memory of the container of a lease on one node."""

    cpu_milli: int
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """What happens to the GPU memory of a notebook or job whose GPU others have; `domain.suspension` changes it."""

    state: SuspensionState
    #: Start of the state, seconds since 1970.
    since: float
    #: Host memory that holds what was on the GPU, MiB; what may be needed while it is moved out.
    moved_mib: int = 0
    #: Its user ran a cell while the memory was moved out: it continues as soon as that is done.
    is_wanted: bool = False
    #: When it began to be suspended, seconds since 1970: a cell that began later brings it back.
    begun_at: float = 0.0
    #: Rest of a job's time limit, which does not continue meanwhile, seconds; None without one.
    left_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """A lease; only functions of `lease_states` change it."""

    id: str
    #: Number in the order of requests.
    seq: int
    key: str
    owner: str
    purpose: Purpose
    subject: str
    profile: str | None
    resources: ResourceRequest
    created_at: float
    #: Start of the current state, seconds since 1970.
    since: float
    state: LeaseState = LeaseState.REQUESTED
    #: Its job waits for other jobs; the scheduler gets the request when that is over.
    is_held: bool = False
    #: The owner's groups at the time of the request.
    groups: tuple[str, ...] = ()
    epoch: int = 0
    time_limit_s: int | None = None
    granted_at: float | None = None
    expires_at: float | None = None
    #: Since when and until when its owner keeps an idle notebook; None if never.
    kept_from: float | None = None
    kept_until: float | None = None
    #: A notebook that asks again for its GPUs if its container is lost.
    is_persistent: bool = False
    #: The image that a notebook's owner chose; None for its profile's.
    image: str | None = None
    #: When containers of the notebook were lost, seconds since 1970; the last ones.
    losses: tuple[float, ...] = ()
    released_at: float | None = None
    #: Why it ended; while it is granted or active, why its time was shortened.
    reason: str | None = None
    #: For the owner: the scheduler's note at the grant, later why it is quarantined.
    note: str | None = None
    #: None while its notebook has its GPUs as usual.
    suspension: Suspension | None = None
    #: Since when it holds its GPU again after a suspension, seconds since 1970; None if it never was suspended.
    held_from: float | None = None
    #: Time of the quarantine, seconds since 1970: from then on its GPUs are blocked and not charged to its owner.
    quarantined_at: float | None = None
    container_id: str | None = None
    #: Id of the Slurm job of the lease; None without Slurm, and until it is submitted.
    slurm_job: int | None = None
    nodes: tuple[str, ...] = ()
    #: Node → ids of its Docker daemon and of its machine's boot at the grant, None if not known. Another daemon proves
    #: nothing, unless the machine was rebooted.
    identities: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    gpus: tuple[LeasedGpu, ...] = ()
    #: Node → what its container there was granted; a node of unknown size is not listed.
    sizes: Mapping[str, ContainerSize] = field(default_factory=dict)
    version: int = 0

    def evolve(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def find_size(self, node: str) -> ContainerSize:
        """Return CPU and memory of its container on a node."""
        granted, resources = self.sizes.get(node), self.resources
        if granted is not None:
            return granted
        least_cpu = _USUAL_CPU_MILLI if resources.cpu_by_gpu else 0
        least_memory = _USUAL_MEMORY_MIB if resources.memory_by_gpu else 0
        return ContainerSize(
            cpu_milli=max(resources.cpu_milli, least_cpu), memory_mib=max(resources.memory_mib, least_memory)
        )

    @property
    def is_open(self) -> bool:
        return self.state is not LeaseState.RELEASED

    @property
    def waits(self) -> bool:
        """Whether the scheduler has a request of it: for all its GPUs, or for the one that it was suspended on."""
        if self.suspension is not None and self.state is LeaseState.ACTIVE:
            return self.suspension.state is SuspensionState.RESUMING
        return self.state is LeaseState.REQUESTED and not self.is_held

    @property
    def charged_from(self) -> float:
        """Since when its GPUs are charged to its owner, seconds since 1970."""
        return next(at for at in (self.held_from, self.granted_at, self.created_at) if at is not None)

    @property
    def held(self) -> tuple[LeasedGpu, ...]:
        """GPUs that no other lease may get."""
        return tuple(gpu for gpu in self.gpus if gpu.released_at is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker container of a job."""

    index: int
    node: str
    state: WorkerState = WorkerState.PENDING
    container_id: str | None = None
    exit_code: int | None = None
    message: str | None = None

    def evolve(self, **changes: Any) -> Self:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job; only functions of `job_states` change it."""

    id: str
    run_id: str
    owner: str
    server: str
    #: The lease of the notebook that submitted the job, which ends with it; None without a notebook.
    notebook_lease: str | None
    lease_id: str
    image: str
    nnodes: int
    nproc_per_node: int
    created_at: float
    since: float
    state: JobState = JobState.WAITING
    min_nnodes: int = 1
    gpus: int | None = None
    #: The run id of its job array.
    array: str | None = None
    #: Number of the array's jobs that may wait for GPUs or run at the same time; None for all.
    array_limit: int | None = None
    #: The owner's run, or array, that must succeed before; None if there is none, or it has.
    after: str | None = None
    #: How often it may start again after a failure, and how often it has.
    max_retries: int = 0
    retries: int = 0
    #: When it ends by itself with exit code 0, it starts again at the next request to its port; how often it has
    #: ended so.
    sleeps: bool = False
    times_asleep: int = 0
    #: It is ending because worker 0 of a detached job failed or could not be started.
    has_failed: bool = False
    #: How often it was preempted as a whole, and until when its workers may write a checkpoint.
    preemptions: int = 0
    checkpoint_until: float | None = None
    #: It outlives its notebook, and ends with worker 0.
    detached: bool = False
    #: Name for people.
    name: str = ""
    #: Port of its server in worker 0 that is reached through the hub, and the users who may besides the owner.
    port: int | None = None
    port_users: tuple[str, ...] = ()
    #: The owner's run that its workers join, numbered from `first_worker`; the job ends with that run.
    joins: str | None = None
    first_worker: int = 0
    #: When all of its workers ran; set again after a preemption.
    started_at: float | None = None
    ended_at: float | None = None
    #: Exit code of worker 0 of a detached job that ended without being stopped.
    exit_code: int | None = None
    reason: str | None = None
    workers: tuple[WorkerRow, ...] = ()
    version: int = 0

    def evolve(self, **changes: Any) -> Self:
        return replace(self, **changes)

    @property
    def is_open(self) -> bool:
        return self.state is not JobState.ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Open leases and jobs by id."""

    leases: Mapping[str, LeaseRow] = field(default_factory=dict)
    jobs: Mapping[str, JobRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRow:
    """GPUs kept for some users in a window: all GPUs of `nodes`, and `gpus`."""

    id: str
    name: str
    nodes: tuple[str, ...]
    gpus: tuple[str, ...]
    users: tuple[str, ...]
    groups: tuple[str, ...]
    starts_at: float
    ends_at: float
    created_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationRow:
    """A text about an event for its owner, or for the owner of the machines (`owner` None)."""

    kind: NotificationKind
    #: Identifies the event: a notification with this key is stored once, and so sent once.
    key: str
    title: str
    body: str
    owner: str | None = None
    #: How long it is worth sending, seconds.
    valid_s: float = 86400.0
    #: What has a problem, such as `node:rig1`, and whether the problem is there now; empty for what only happens.
    subject: str = ""
    is_open: bool = False
    #: Set by the store.
    at: float = 0.0
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One thing that the broker did or saw."""

    at: float
    #: Such as `lease.granted`.
    kind: str
    text: str
    owner: str | None = None
    lease: str | None = None
    job: str | None = None
    node: str | None = None
    #: Stored and queued for sending in the same transaction as the event.
    notifications: tuple[NotificationRow, ...] = ()
    #: Set by the store; grows.
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShareRow:
    """A view of a job's output or of a saved notebook that its owner shares with another user, until `expires_at`."""

    #: The job's id, or the notebook's, which follows from owner and path.
    subject: str
    viewer: str
    owner: str
    #: Run id of the job, which may be forgotten before its shares end; empty for a notebook.
    run_id: str
    #: Name of the job, or of the notebook's file.
    name: str
    created_at: float
    expires_at: float
    #: The notebook's, below the owner's home; empty for a job.
    path: str = ""

    @property
    def title(self) -> str:
        """What is shared, for its owner."""
        return self.path or self.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The user or service that sends a request."""

    name: str
    is_user: bool = True
    is_admin: bool = False
    #: May act for other owners, as the hub's spawner does.
    any_owner: bool = False
    #: May have idle notebooks stopped, as the hub's culler does.
    may_reclaim: bool = False
    #: Groups in the hub.
    groups: frozenset[str] = frozenset()

    @property
    def sees_all(self) -> bool:
        """Return whether it may read and end the leases of all users."""
        return self.is_admin or self.any_owner
