"""What the broker keeps: leases, jobs and workers as frozen values. Times are seconds since 1970."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from gpuhub.broker.schemas import JobState, LeaseState, Purpose, WorkerState
from gpuhub.gpus import Requirement


def new_id(prefix: str) -> str:
    """An id that nobody can guess: `l` for leases, `j` for jobs, `r` for reservations."""
    return f"{prefix}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a lease asks for: `nodes` different nodes with `gpus_per_node` GPUs each, or `spread` GPUs anywhere."""

    nodes: int = 1
    #: Below `nodes` for an elastic job.
    least_nodes: int = 1
    gpus_per_node: int = 1
    #: GPUs in all, on any nodes; None for the shape above.
    spread: int | None = None
    models: tuple[str, ...] = ()
    least_memory_mib: int = 0
    least_driver: str | None = None
    least_capability: tuple[int, int] | None = None
    #: One of so many parts of one GPU; 1 for whole GPUs.
    share: int = 1
    exclude: tuple[str, ...] = ()
    exclusive: bool = False
    same_model: bool = False
    batch: bool = False
    scavenge: bool = False
    priority: int = 0
    #: What its container on each node may use; counted where the node's settings say what it has.
    cpu_milli: int = 0
    memory_mib: int = 0

    @property
    def requirement(self) -> Requirement:
        """What each GPU must be."""
        return Requirement(
            models=self.models,
            least_memory_mib=self.least_memory_mib,
            least_driver=self.least_driver,
            least_capability=self.least_capability,
        )

    @property
    def size(self) -> int:
        """GPUs in all, at most."""
        return self.spread if self.spread is not None else self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGpu:
    """A GPU, or a part of one, in a lease; held until `released_at`."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    #: Position of its node in the lease's order of nodes.
    worker: int
    #: It is part `part` (from 0) of so many; a whole GPU is part 0 of 1.
    share: int = 1
    part: int = 0
    #: When an elastic job was told to give it back while the lease goes on; None: it was not.
    shed_at: float | None = None
    released_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """A lease; changed by the functions of `leases` alone."""

    id: str
    #: Place in the order in which requests came.
    seq: int
    key: str
    owner: str
    purpose: Purpose
    subject: str
    profile: str | None
    ask: Ask
    created_at: float
    #: When the present state began.
    since: float
    state: LeaseState = LeaseState.REQUESTED
    #: The owner's groups when it was asked for.
    groups: tuple[str, ...] = ()
    epoch: int = 0
    time_limit_s: int | None = None
    granted_at: float | None = None
    expires_at: float | None = None
    released_at: float | None = None
    #: Why it ended; while it is granted or active: why its time was cut short.
    reason: str | None = None
    #: For the owner: what the engine said at the grant, later why it is quarantined.
    note: str | None = None
    #: From then on its GPUs are blocked, and not charged to its owner.
    quarantined_at: float | None = None
    container_id: str | None = None
    #: The Slurm job that stands for it; None without Slurm, and until it is submitted.
    slurm_job: int | None = None
    nodes: tuple[str, ...] = ()
    #: By node, at the grant: its Docker daemon's id and its machine's boot id, None where not known. Another daemon's
    #: word is no proof, unless the machine was started anew.
    identities: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    gpus: tuple[LeasedGpu, ...] = ()
    version: int = 0

    def evolve(self, **changes: Any) -> Self:
        """A copy with changes."""
        return replace(self, **changes)

    @property
    def is_open(self) -> bool:
        """Not ended."""
        return self.state is not LeaseState.RELEASED

    @property
    def held(self) -> tuple[LeasedGpu, ...]:
        """GPUs that nobody else may get."""
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
        """A copy with changes."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job; changed by the functions of `job_rules` alone."""

    id: str
    run_id: str
    owner: str
    server: str
    #: The lease of the notebook that asked; the job ends with it. None when no notebook asked.
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
    #: The run id of the array it belongs to.
    array: str | None = None
    #: How often it was preempted as a whole, and until when its workers may write a checkpoint.
    preemptions: int = 0
    checkpoint_until: float | None = None
    #: It outlives its notebook, and ends when worker 0 has.
    detached: bool = False
    #: For people.
    name: str = ""
    #: The run of the same owner that its workers join, where they count from `first_worker`; it ends with that one.
    joins: str | None = None
    first_worker: int = 0
    #: When all of its workers ran; after a preemption, anew.
    started_at: float | None = None
    ended_at: float | None = None
    #: Worker 0's, of a detached job that ended by itself.
    exit_code: int | None = None
    reason: str | None = None
    workers: tuple[WorkerRow, ...] = ()
    version: int = 0

    def evolve(self, **changes: Any) -> Self:
        """A copy with changes."""
        return replace(self, **changes)

    @property
    def is_open(self) -> bool:
        """Not ended."""
        return self.state is not JobState.ENDED


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
class EventRow:
    """One thing that the broker did, or found out."""

    at: float
    #: Such as `lease.granted`.
    kind: str
    text: str
    owner: str | None = None
    lease: str | None = None
    job: str | None = None
    node: str | None = None
    #: Given by the store; grows.
    seq: int = 0
