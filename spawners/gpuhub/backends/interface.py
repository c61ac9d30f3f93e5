"""The interface between the broker and what decides which lease gets which GPUs.

A backend has two sides. Its `scheduler` mirrors the ledger inside the broker's transactions and answers at once. Where
another system decides, the broker polls it as well (`observe`) and keeps leases and that system's jobs in agreement;
the backend itself never changes a lease. `docs/backends.md` describes each method for authors of backends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpuhub.broker_api.schemas import Capabilities, JobRequest, LeaseRequest, NodeView, PartitionView, UsageView
from gpuhub.common.errors import Conflict, GpuhubError, SchedulerUnreachable
from gpuhub.common.program_session import ProgramSession
from gpuhub.docker.containers.user_containers import WorkerSpec
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.nodes.power_status import PowerState
from gpuhub.nodes.status import NodeStatus
from gpuhub.scheduler.interface import Scheduler

#: Time to wait for an unreachable backend before a notebook's container is started, seconds.
NOTEBOOK_TIMEOUT_S = 6.0
#: Time to wait for an unreachable backend before a worker's container is started, seconds.
WORKER_TIMEOUT_S = 60.0


class LeaseRejected(GpuhubError):
    """The backend does not take a lease; the text becomes the reason for which it ends."""

    code = "invalid-request"


class BackendHost(Protocol):
    """What a backend may read of the broker. All of it is what the ledger shows at the moment of the call."""

    @property
    def clock(self) -> Clock:
        """The broker's clock."""
        ...

    def leases(self) -> Mapping[str, LeaseRow]:
        """Return the open leases by id."""
        ...

    def jobs(self) -> Mapping[str, JobRow]:
        """Return the open jobs by id."""
        ...

    def nodes(self) -> Mapping[str, NodeStatus]:
        """Return what is known of each node of cluster.toml."""
        ...


# -- what a poll shows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLease:
    """A lease whose job in the backend is over."""

    reason: str
    #: Exit code of the program that led a detached job; None where something else ended it.
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of one poll of the backend, as far as the ledger has to follow it. Leases are named by id."""

    #: Jobs of leases for which the ledger has none yet.
    jobs: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, EndedLease] = field(default_factory=dict)
    #: Nodes that elastic leases lost while they continue.
    lost_nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: When leases without a time limit of their own end, seconds since 1970; None for never.
    ends_at: Mapping[str, float | None] = field(default_factory=dict)
    #: Notes for owners; None removes a note.
    notes: Mapping[str, str | None] = field(default_factory=dict)
    #: Nodes as the backend reports them, where no Docker daemon can be asked.
    nodes: Sequence[NodeStatus] = ()
    #: Node → ending leases of which nothing is left there.
    cleared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Whether nodes sleep, where the backend switches them.
    power: Mapping[str, PowerState] = field(default_factory=dict)
    #: False while it is not known which jobs exist: a submission might be made twice.
    may_submit: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalJob:
    """A job that has GPUs and belongs to no lease."""

    id: int
    owner: str
    #: Text for a person, such as `Slurm job 17 of carol, until 21:40`.
    text: str
    #: Seconds since 1970; None where they are not known.
    started_at: float | None = None
    ends_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalUsage:
    """What others hold of the cluster at one moment."""

    #: GPU UUID → the external job that holds it.
    gpus: Mapping[str, ExternalJob] = field(default_factory=dict)
    #: Nodes that get no work, with the reason for a person.
    unavailable: Mapping[str, str] = field(default_factory=dict)
    #: Others' jobs that wait for GPUs and for nothing else.
    waiting: int = 0


# -- the backend ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AccountedHours:
    """GPU-hours of a period by a backend's own accounting, by user and by account."""

    by_user: Mapping[str, float]
    by_account: Mapping[str, float]


class SchedulingBackend(ABC):
    """Decides which waiting lease gets which GPUs."""

    #: Its name in cluster.toml and in the kinds of its events.
    name: str
    #: Its name for people.
    title: str
    #: Interval between two polls, seconds; None for a backend that is not polled, because its scheduler alone decides.
    poll_s: float | None = None

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return what it offers; the broker and the pages ask this instead of its name."""

    @property
    @abstractmethod
    def scheduler(self) -> Scheduler:
        """Return the scheduler, which mirrors the ledger and decides within its transactions."""

    async def setup(self, host: BackendHost) -> None:  # noqa: B027 - a backend may need nothing of the broker
        """Prepare; called once, before anything else, when the broker starts."""

    # -- admission ------------------------------------------------------------------------------------------------

    def validate_request(self, request: LeaseRequest | JobRequest) -> None:  # noqa: B027 - all may be possible
        """Refuse a request for what this backend never offers.

        Raises:
            InvalidRequest: With what to do instead.
        """

    def admit(self, lease: LeaseRow) -> None:  # noqa: B027 - all may be possible
        """Refuse a lease that can never be granted.

        Raises:
            InvalidRequest: With what there is.
        """

    # -- leases and their jobs ------------------------------------------------------------------------------------

    @abstractmethod
    async def observe(self) -> Observation:
        """Poll the backend; from then on `scheduler` decides by what was observed.

        Raises:
            SchedulerUnreachable: It gives no answer. Nothing is concluded from that.
        """

    @abstractmethod
    async def submit(self, lease: LeaseRow) -> int | None:
        """Submit a waiting lease and return the number of its job; None when it cannot be submitted yet.

        Raises:
            LeaseRejected: It will never be accepted; the lease ends.
            Unavailable: Something that is needed gives no answer; the submission is tried again.
            SchedulerUnreachable: It is not known whether it was accepted; the next poll shows it.
        """

    @abstractmethod
    async def cancel(self, jobs: Mapping[str, int]) -> None:
        """Cancel the jobs of leases that have ended; those that are over are ignored.

        Args:
            jobs: Job numbers by lease. Nothing of these leases is left on the nodes.

        Raises:
            SchedulerUnreachable: Some may not be cancelled; all are tried again.
        """

    async def reconcile(self) -> None:  # noqa: B027 - a backend may have nothing of the kind
        """Bring jobs into agreement with the leases, once after each poll: cancel unwanted ones, release nodes.

        Raises:
            SchedulerUnreachable: It gives no answer; tried again after the next poll.
        """

    async def confirm(self, lease: LeaseRow, *, timeout_s: float = NOTEBOOK_TIMEOUT_S) -> None:  # noqa: B027
        """Refuse to start a container of a lease whose job no longer runs.

        Args:
            lease: A granted or active one; its container exists, so that from now on the job's end removes it.
            timeout_s: How long an unreachable backend is waited for.

        Raises:
            Conflict: Its job is over, or elsewhere.
            SchedulerUnreachable: It gives no answer.
        """

    @abstractmethod
    async def extend(self, lease: LeaseRow, seconds: int) -> None:
        """Let the job of a lease continue for this long from now; called before the lease is extended.

        Raises:
            Conflict: The job does not run.
            InvalidRequest: The backend refuses it; the text has its words.
            SchedulerUnreachable: It is not known whether the limit has changed.
        """

    async def start_worker(self, spec: WorkerSpec) -> str:
        """Return the stand-in for a worker's container where the backend's job is what runs.

        Raises:
            Conflict: The lease has no job.
        """
        raise Conflict(f"lease {spec.lease_id}: {self.title} does not run workers by itself")

    async def start_courier(self, owner: str, arguments: Sequence[str]) -> ProgramSession:
        """Start a courier for the files of an owner's home, where the nodes have no containers.

        Raises:
            Unavailable: It cannot be started now.
            Conflict: The backend's jobs are not what runs.
        """
        raise Conflict(f"{self.title} starts no program of {owner}'s by itself")

    async def start_courier_of_job(self, job: JobRow, node: str, arguments: Sequence[str]) -> ProgramSession:
        """Start a courier beside a job's worker on a node, where the nodes have no containers.

        Raises:
            Unavailable: It cannot be started now.
            Conflict: The job has ended, or the backend's jobs are not what runs.
        """
        raise Conflict(f"job {job.id}: {self.title} does not run it by itself")

    def note_unreachable(self, error: SchedulerUnreachable) -> None:  # noqa: B027 - not every one can be unreachable
        """The backend gives no answer: its last state stays valid, and waiting users see the reason."""

    # -- others ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def external_usage(self, now: float) -> ExternalUsage:
        """Return what others hold of the cluster, as the last poll showed it."""

    def build_partitions(self, nodes: Sequence[NodeView]) -> tuple[PartitionView, ...]:
        """Return the queues that users may choose, with what is free there."""
        return ()

    async def count_usage(self, views: Sequence[UsageView], *, is_everybody: bool) -> list[UsageView]:
        """Return views with the backend's own count of GPU-hours, where it has one.

        Args:
            views: One for each owner.
            is_everybody: They are for all users: those whom only the backend knows are added.
        """
        return list(views)

    async def count_gpu_hours(self, since: float, until: float) -> AccountedHours | None:
        """Return the GPU-hours of a period that the backend's own accounting counts, jobs from outside gpuhub included.

        None where it counts none, or does not answer.
        """
        return None

    # -- what gpuhub does not offer with it -----------------------------------------------------------------------

    def describe_cordon(self, node: str) -> str:
        """Return how an administrator cordons a node with the backend's own tools."""
        return f"nodes are cordoned with {self.title}'s own tools, not by gpuhub"

    def describe_reservation(self) -> str:
        """Return how an administrator reserves GPUs with the backend's own tools."""
        return f"GPUs are reserved with {self.title}'s own tools, not by gpuhub"

    async def close(self) -> None:  # noqa: B027 - nothing may be open
        """Drop the connections."""


def raise_first(outcomes: Sequence[BaseException | None]) -> None:
    """Raise the first of these errors, if any; `SchedulerUnreachable` before all others, as nothing is tried then."""
    errors = [outcome for outcome in outcomes if outcome is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, SchedulerUnreachable)):
        raise error
