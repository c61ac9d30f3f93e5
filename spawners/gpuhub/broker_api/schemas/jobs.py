"""Wire models of jobs, job arrays and workers."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import FailFast, Field, StringConstraints

from gpuhub.broker_api.schemas.costs import CostView
from gpuhub.broker_api.schemas.leases import (
    DatasetName,
    ImageName,
    LeasedGpuView,
    LeaseView,
    ModelName,
    RunId,
    ServerName,
    Slug,
    TimeLimit,
    UserName,
    WireModel,
)


class JobRequest(WireModel):
    """Request of workers, all or none.

    These are `nnodes` containers on different nodes with `nproc_per_node` GPUs each, or `gpus` GPUs on any nodes.
    """

    run_id: RunId
    nnodes: Annotated[int, Field(ge=1, le=1024)] = 1
    #: Minimum number of nodes of an elastic job, to which it may be shrunk; None for exactly `nnodes`.
    min_nnodes: Annotated[int, Field(ge=1, le=1024)] | None = None
    #: GPUs of each worker.
    nproc_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    #: Total number of GPUs, on any number of nodes; then `nnodes` and `nproc_per_node` must be 1.
    gpus: Annotated[int, Field(ge=1, le=8192)] | None = None
    #: Notebook server that sends the request; workers use its image and user network.
    server: ServerName = ""
    #: Nodes that must not be used, such as the notebook's own, where its GPUs take part.
    exclude_nodes: Annotated[tuple[ModelName, ...], Field(max_length=1024), FailFast()] = ()
    #: Accepted GPU models in order of preference; empty for any.
    models: Annotated[tuple[ModelName, ...], Field(max_length=16), FailFast()] = ()
    #: Minimum memory of each GPU, MiB.
    least_memory_mib: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    #: Minimum version of NVIDIA's driver, such as `570` or `570.86.15`; None for any.
    least_driver: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$")] | None = None
    #: Minimum CUDA compute capability, such as `8.9`; None for any.
    least_capability: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")] | None = None
    #: Datasets of which each node gets a copy on its own disk before the workers start.
    stage: Annotated[tuple[DatasetName, ...], Field(max_length=16), FailFast()] = ()
    #: CPU cores and memory (MiB) of each worker; None for its GPUs' share of the node, or the numbers of cluster.toml.
    #: With the flags at least that: the GPUs' share, if that is more.
    cpus: Annotated[float, Field(ge=0.1, le=4096)] | None = None
    cpus_or_more: bool = False
    ram_mib: Annotated[int, Field(ge=64, le=1 << 27)] | None = None
    ram_mib_or_more: bool = False
    #: Size of /dev/shm of each worker, which counts in its memory, MiB; None for that of cluster.toml, else half of it.
    shm_mib: Annotated[int, Field(ge=1, le=1 << 27)] | None = None
    #: All GPUs must be of the same model.
    same_model: bool = False
    #: No other lease may run on the nodes.
    exclusive: bool = False
    #: No user waits for it: interactive requests go first.
    batch: bool = False
    #: It may be preempted: its workers get SIGTERM and a grace period, and the job waits again.
    scavenge: bool = False
    #: It runs on guests, machines that others lend, and only there: its folder is sent there, and what it wrote comes
    #: back. For detached jobs on one node.
    guests: bool = False
    #: Higher priorities go first; only an administrator may request more than 0.
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    #: Time limit, seconds; None for the one of cluster.toml.
    time_limit_s: TimeLimit | None = None
    #: It outlives the notebook: it needs no heartbeats, worker 0 leads the others, and the job ends with worker 0.
    #: `server` then only determines the image.
    detached: bool = False
    #: Profile whose image the workers run; None for that of the server, or the default one.
    profile: Slug | None = None
    #: One of the images that this profile offers, or with None any of the owner's profiles; None for the profile's own.
    image: ImageName | None = None
    #: Name that all users see, such as `train.py`; without control characters, since terminals show it.
    name: Annotated[str, StringConstraints(max_length=80, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = ""
    #: Run of the same owner that the workers join: they read its folder, and are numbered from `first_worker`.
    joins: RunId | None = None
    first_worker: Annotated[int, Field(ge=0, le=100_000)] = 0
    #: Run, or array, of the same owner that must succeed before a detached job waits for GPUs; if it fails or is
    #: cancelled, the job ends.
    after: RunId | None = None
    #: Number of times that a detached job starts again after a failure.
    max_retries: Annotated[int, Field(ge=0, le=100)] = 0
    #: A job with a port that ends by itself with exit code 0 sleeps: it releases its GPUs, and waits for them again at
    #: the next request to its port.
    sleeps: bool = False
    #: Port of a server that a detached job runs in worker 0, and that its owner reaches through the hub; None for none.
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    #: Other users who reach the port.
    port_users: Annotated[tuple[UserName, ...], Field(max_length=32), FailFast()] = ()


class ArrayRequest(WireModel):
    """Request of an array: `count` jobs of one GPU each, with run ids `RUN-0`, `RUN-1`, …"""

    job: JobRequest
    count: Annotated[int, Field(ge=1, le=1000)]
    #: Number of jobs that wait for GPUs or run at the same time; None for all.
    max_running: Annotated[int, Field(ge=1, le=1000)] | None = None


class GroupRequest(WireModel):
    """Request of a job group: detached jobs that get their GPUs at the same moment, and else end by themselves."""

    #: Id of the group, as that of an array: `after` of other jobs may name it.
    run_id: RunId
    jobs: Annotated[tuple[JobRequest, ...], Field(min_length=2, max_length=16), FailFast()]
    #: Run id → seconds that a job runs on when all that are not named here have ended. Others end by themselves.
    auxiliary: Annotated[dict[str, Annotated[int, Field(ge=0, le=86400)]], Field(max_length=15)] = {}


class JobCheckRequest(WireModel):
    """Request to check a job, an array of `count` of them, or a job group, before their files are uploaded."""

    job: JobRequest
    #: None for a single job, and for a job group.
    count: Annotated[int, Field(ge=1, le=1000)] | None = None
    #: The further jobs of a job group.
    others: Annotated[tuple[JobRequest, ...], Field(max_length=15), FailFast()] = ()


class JobState(StrEnum):
    """State of a job. `ended` is final, with the reason in `reason`; a preempted job becomes `waiting` again."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    #: Its workers got SIGTERM and have a grace period to write a checkpoint.
    PREEMPTING = "preempting"
    STOPPING = "stopping"
    ENDED = "ended"


class WorkerState(StrEnum):
    """State of a worker container."""

    PENDING = "pending"
    RUNNING = "running"
    EXITED = "exited"


class WorkerView(WireModel):
    """One worker container of a job."""

    index: int
    node: str
    gpus: tuple[LeasedGpuView, ...]
    state: WorkerState
    exit_code: int | None
    #: Why it could not start, or ended, for the user, such as `out of memory`.
    message: str | None
    #: Its node answers. While it does not, `state` is the last one that is known.
    is_reachable: bool = True


class JobView(WireModel):
    """A job, as shown to its owner."""

    id: str
    run_id: str
    owner: str
    state: JobState
    version: int
    lease: LeaseView
    workers: tuple[WorkerView, ...]
    nnodes: int
    nproc_per_node: int
    reason: str | None
    created_at: datetime
    #: Time without a heartbeat after which the job ends, seconds.
    renew_within_s: float
    #: Minimum number of nodes of an elastic job; `nnodes` for any other.
    min_nnodes: int = 1
    #: Total number of GPUs of a job on any nodes; None for `nnodes` × `nproc_per_node`.
    gpus: int | None = None
    scavenge: bool = False
    #: Number of times that the whole job was preempted.
    preemptions: int = 0
    #: End of the grace period for the checkpoint; None unless preempting.
    checkpoint_until: datetime | None = None
    #: Run id of the job's array or job group; None for a single job.
    array: str | None = None
    #: Number of the array's jobs that wait for GPUs or run at the same time; None for all.
    array_limit: int | None = None
    #: Run, or array, that must succeed before; None if there is none, or it has.
    after: str | None = None
    #: Number of times that it starts again after a failure, and that it has.
    max_retries: int = 0
    retries: int = 0
    #: It sleeps when it ends by itself with exit code 0, until a request to its port; how often it did.
    sleeps: bool = False
    times_asleep: int = 0
    #: Port of its server that is reached through the hub, and the users who may besides its owner.
    port: int | None = None
    port_users: tuple[str, ...] = ()
    detached: bool = False
    name: str = ""
    #: Run that its workers joined; None for none.
    joins: str | None = None
    #: When all of its workers first ran, after the last preemption.
    started_at: datetime | None = None
    ended_at: datetime | None = None
    #: Exit code of worker 0 of a detached job that ended without being stopped; None for any other.
    exit_code: int | None = None
    #: What it used; None before its end, and if it had no GPU.
    costs: CostView | None = None


class VisitView(WireModel):
    """A visit: for its duration, a browser reaches a job's server at `path`, without a cookie."""

    #: Below the address of the hub, such as `/services/broker/visits/KEY/`; who knows it, has the visitor's access.
    path: str


class UploadResult(WireModel):
    """Number and size of the files of an upload."""

    files: int
    bytes: int
