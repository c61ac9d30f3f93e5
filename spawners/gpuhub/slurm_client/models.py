"""Slurm's jobs, nodes, partitions and submissions as values. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class SlurmJobState(StrEnum):
    """Slurm's base states of a job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    #: Ended for its owner, but processes or the Epilog still run on its nodes.
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"


#: States in which a job has its GPUs or may still get them.
LIVE_STATES = frozenset({SlurmJobState.PENDING, SlurmJobState.RUNNING, SlurmJobState.SUSPENDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job of any user as Slurm reports it."""

    id: int
    name: str
    user_id: int
    #: Empty if Slurm's name service does not know the UID.
    user_name: str = ""
    state: SlurmJobState
    #: Whether a flag in addition to the state reports that its nodes are not clean yet.
    is_completing: bool = False
    #: Slurm's reason why it waits or ended, such as `Resources`; may be empty.
    reason: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    #: Jobs with a higher priority start first.
    priority: int = 0
    submitted_at: float | None = None
    #: Slurm's expected start of a pending job; None if unknown.
    expected_start: float | None = None
    started_at: float | None = None
    #: Time at which it ended or its time limit ends it; None without a limit.
    ends_at: float | None = None
    time_limit_s: int | None = None
    #: Exit code of its script in the shell's form; None while it is live, and if Slurm does not report it.
    exit_code: int | None = None
    #: Its nodes in Slurm's order; empty while it is pending.
    nodes: tuple[str, ...] = ()
    #: Indices of its GPUs by node, in gres.conf's numbering; empty while it is pending, and without GPUs.
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: CPUs and memory that Slurm allocated on all of its nodes together; None while it is pending. Memory is None also
    #: where Slurm does not allocate it (SelectTypeParameters without Memory).
    cpus: int | None = None
    memory_mib: int | None = None
    #: The requested resources for users, such as `2 nodes × gpu:rtx5090:1`.
    wants: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node as Slurm reports it."""

    name: str
    #: Slurm's state with flags, such as `idle`, `mixed+drain`, `down*`.
    state: str
    #: Whether new jobs may start there.
    takes_work: bool
    #: Slurm's or the administrator's reason if not; may be empty.
    reason: str = ""
    #: Numbers of all GPUs and of those that jobs have, by type; the type is empty if gres.conf names none.
    gpus: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    cpus: int = 0
    memory_mib: int = 0
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    """A partition with its limits; None for no limit."""

    name: str
    #: None if it is unknown: slurmrestd of Slurm 23.02 and later does not report it.
    is_default: bool | None = False
    is_up: bool = True
    max_time_s: int | None = None
    #: Time limit of a job that requests none.
    default_time_s: int | None = None
    max_nodes: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSnapshot:
    """All jobs and nodes at one moment."""

    jobs: tuple[SlurmJob, ...]
    nodes: tuple[SlurmNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSite:
    """The configuration of a Slurm cluster, which only an administrator changes."""

    #: Such as (22, 5, 8).
    version: tuple[int, ...]
    cluster: str
    partitions: tuple[SlurmPartition, ...]
    nodes: tuple[SlurmNode, ...]
    #: Whether slurmdbd answers; without it there are no accounts, QOS and fair share.
    has_accounting: bool
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    reservations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """The user for whom a job is submitted; Slurm's machines must have the same name, UID and GIDs."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSubmission:
    """A job to be submitted. It contains no text that a user chose freely."""

    name: str
    submitter: Submitter
    script: str
    nodes: int = 1
    min_nodes: int = 1
    #: Number of GPUs on each node (not used with `spread`), and their type; None for any.
    gpus_per_node: int = 0
    gpu_type: str | None = None
    #: Number of GPUs in all, on any nodes.
    spread: int | None = None
    #: CPUs and memory on each node.
    cpus: int = 1
    memory_mib: int = 0
    #: None for the partition's default.
    time_limit_s: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    exclude: tuple[str, ...] = ()
    exclusive: bool = False
    #: Slurm's nice value: jobs with a higher one start later; only Slurm's operators may go below 0.
    nice: int = 0
    #: Whether it continues when one of its nodes fails.
    survives_nodes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime:
    """GPU-seconds of one user on one account, as slurmdbd counted them."""

    user: str
    account: str
    gpu_seconds: float
