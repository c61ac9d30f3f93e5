"""What the broker keeps: leases, jobs and workers as frozen values. Times are seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from gpuhub.broker.schemas import JobState, LeaseState, Purpose, WorkerState
from gpuhub.gpus import Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a lease asks for: `nodes` different nodes with `gpus_per_node` GPUs each."""

    nodes: int = 1
    gpus_per_node: int = 1
    model: str | None = None
    least_memory_mib: int = 0
    exclude: tuple[str, ...] = ()

    @property
    def requirement(self) -> Requirement:
        """What each GPU must be."""
        return Requirement(model=self.model, least_memory_mib=self.least_memory_mib)

    @property
    def size(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGpu:
    """A GPU in a lease; held until `released_at`."""

    uuid: str
    node: str
    index: int
    model: str
    memory_mib: int
    #: Position of its node in the lease's order of nodes.
    worker: int
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
    state: LeaseState = LeaseState.WAITING
    epoch: int = 0
    time_limit_s: int | None = None
    granted_at: float | None = None
    expires_at: float | None = None
    released_at: float | None = None
    reason: str | None = None
    container_id: str | None = None
    nodes: tuple[str, ...] = ()
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
    ended_at: float | None = None
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
