"""What Slurm says and what is asked of it, as values. Times are seconds since 1970; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """Slurm's base states of a job, by its own names."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    #: Over for its owner; processes or the Epilog still end on its nodes.
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


#: It may still get, or has, its GPUs.
LIVE = frozenset({State.PENDING, State.RUNNING, State.SUSPENDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as Slurm has it, anybody's."""

    id: int
    name: str
    user_id: int
    #: Empty where Slurm's name service does not know the number.
    user_name: str = ""
    state: State
    #: Its flags say so besides the state: its nodes are not clean yet.
    is_completing: bool = False
    #: Slurm's own word for why it waits or ended, such as `Resources`; empty for none.
    reason: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    #: Higher goes first.
    priority: int = 0
    submitted_at: float | None = None
    #: Of a job that waits: when Slurm expects it to start; None where it does not say.
    expected_start: float | None = None
    started_at: float | None = None
    #: When its time limit ends it, or when it ended; None without a limit.
    ends_at: float | None = None
    time_limit_s: int | None = None
    #: Its script's, as a shell tells it; None while it may go on, and where Slurm does not say.
    exit_code: int | None = None
    #: In Slurm's order; empty while it waits.
    nodes: tuple[str, ...] = ()
    #: By node, the numbers of its GPUs there as gres.conf counts them; empty while it waits, and without GPUs.
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: For people, such as `2 nodes × gpu:rtx5090:1`.
    wants: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as Slurm has it."""

    name: str
    #: Slurm's word with its flags, such as `idle`, `mixed+drain`, `down*`.
    state: str
    #: New jobs may start there.
    takes_work: bool
    #: Why not, in Slurm's or its administrator's words; empty for nothing said.
    reason: str = ""
    #: GPUs by type, and how many of them jobs have; the type is empty where gres.conf names none.
    gpus: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    cpus: int = 0
    memory_mib: int = 0
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition with its limits; None for no limit."""

    name: str
    is_default: bool = False
    is_up: bool = True
    longest_s: int | None = None
    #: What a job gets that asks for no time.
    usual_s: int | None = None
    most_nodes: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All jobs and nodes at one moment."""

    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What changes only when an administrator changes it."""

    #: Such as (22, 5, 8).
    version: tuple[int, ...]
    cluster: str
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    #: slurmdbd answers; without it there are no accounts, and QOS and fair share are not kept.
    has_accounting: bool
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    reservations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """For whom a job is submitted: the name service of Slurm's machines must know these numbers by this name."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One job to submit. No text of a user's is in it but the name, which `names.py` has made."""

    name: str
    submitter: Submitter
    script: str
    nodes: int = 1
    least_nodes: int = 1
    #: GPUs on each node, and their type; None for any. Not used with `spread`.
    gpus_per_node: int = 0
    gpu_type: str | None = None
    #: So many GPUs in all, on any nodes.
    spread: int | None = None
    #: On each node.
    cpus: int = 1
    memory_mib: int = 0
    #: None for the partition's own.
    time_limit_s: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    exclude: tuple[str, ...] = ()
    exclusive: bool = False
    #: As for `nice`: higher goes later; below 0 for Slurm's operators only.
    nice: int = 0
    #: Goes on when one of its nodes fails.
    survives_nodes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime:
    """GPU-seconds of one user on one account, as slurmdbd counted them."""

    user: str
    account: str
    gpu_seconds: float
