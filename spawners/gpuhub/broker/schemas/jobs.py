"""Jobs and their workers over the wire."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from gpuhub.broker.schemas.base import Model, RunId, ServerName, Slug, TimeLimit, Wire
from gpuhub.broker.schemas.leases import Gpu, Lease


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
    #: It outlives the notebook: nobody renews it, worker 0 leads the others, and the job ends with worker 0. `server`
    #: then only says whose image to use.
    detached: bool = False
    #: The profile whose image the workers run; None for the server's own, or the default one.
    profile: Slug | None = None
    #: For people, such as `train.py`; everybody sees it. No control characters: it is shown in terminals.
    name: Annotated[str, StringConstraints(max_length=80, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = ""
    #: Its workers join those of this run of the same owner: they read its folder, and are numbered from `first_worker`.
    joins: RunId | None = None
    first_worker: Annotated[int, Field(ge=0, le=100_000)] = 0


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
    created_at: datetime
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
    detached: bool = False
    name: str = ""
    #: The run that its workers joined; None for its own.
    joins: str | None = None
    #: When all of its workers ran; after a preemption, anew.
    started_at: datetime | None = None
    ended_at: datetime | None = None
    #: Worker 0's, of a detached job that has ended by itself; None for any other.
    exit_code: int | None = None


class Unpacked(Wire):
    """What came with an upload."""

    files: int
    bytes: int
