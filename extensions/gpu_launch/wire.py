"""What the broker answers, as far as a launch needs it. Unknown fields are ignored: an older client keeps working."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

#: Job and worker states with a meaning here; any other state is shown as it is.
WAITING, STARTING, RUNNING, PREEMPTING = "waiting", "starting", "running", "preempting"
STOPPING, ENDED = "stopping", "ended"
EXITED = "exited"
#: Of a detached job as its own driver sees it: its container was told to end.
LEAVING = "leaving"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; `holder` is who holds it, empty for nobody or not told."""

    uuid: str
    node: str
    model: str
    #: 0 where not told.
    memory_mib: int = 0
    holder: str = ""
    #: `free`, `held` or why it cannot be given; empty where not told.
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker container."""

    index: int
    node: str
    gpus: tuple[Gpu, ...]
    state: str
    exit_code: int | None
    message: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A gang of workers."""

    id: str
    run_id: str
    state: str
    version: int
    #: Place in the queue from 1; None unless waiting.
    position: int | None
    #: What it waits for, one line for a person.
    waiting_for: str | None
    workers: tuple[Worker, ...]
    reason: str | None
    #: Ends when not renewed for this long, in seconds.
    renew_within_s: float
    #: When it is expected to be granted; None where not known.
    expected_start: datetime | None = None
    #: From the grant, one line for a person: that its cards differ, say.
    note: str | None = None
    #: How often it was preempted as a whole and waited again.
    preemptions: int = 0
    #: Until when checkpoints may be written; None unless preempting.
    checkpoint_until: datetime | None = None
    #: Whose it is; empty where not told. An administrator is told of everybody's.
    owner: str = ""
    #: It goes on without whoever asked for it.
    detached: bool = False
    #: For people, such as `train.py`; empty where none was given.
    name: str = ""
    #: The run that its workers joined; None for its own.
    joins: str | None = None
    nnodes: int = 1
    nproc_per_node: int = 1
    #: GPUs in all, for a job on any nodes; None for `nnodes` × `nproc_per_node`.
    gpus: int | None = None
    scavenge: bool = False
    created_at: datetime | None = None
    #: None until its workers run, or where that is not told.
    started_at: datetime | None = None
    ended_at: datetime | None = None
    #: Worker 0's, of a detached job that has ended by itself; None for any other.
    exit_code: int | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state == ENDED

    @property
    def is_granted(self) -> bool:
        """Whether its workers are there or on their way."""
        return self.state in (STARTING, RUNNING)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node and its GPUs, whoever holds them."""

    name: str
    gpus: tuple[Gpu, ...]
    #: `up`, or why it takes no work; empty where not told.
    state: str = ""
    #: The same for a person; None when nothing is to be said.
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes."""

    nodes: tuple[Node, ...]
    #: Requests that wait for GPUs, whoever's.
    waiting: int = 0
    #: What decides who gets which GPU; empty where not told.
    engine: str = ""

    @property
    def grants_later(self) -> bool:
        """Whether even a request for what is free waits a moment, for another queue than the broker's own."""
        return self.engine == "slurm"

    def cards(self, uuids: tuple[str, ...]) -> tuple[Gpu, ...]:
        """The GPUs with these UUIDs, in their order, as far as they are known."""
        known = {gpu.uuid: gpu for node in self.nodes for gpu in node.gpus}
        return tuple(known[uuid] for uuid in uuids if uuid in known)

    def models(self) -> tuple[str, ...]:
        """Every GPU model, once, by name."""
        return tuple(sorted({gpu.model for node in self.nodes for gpu in node.gpus}))


def parse_gpu(data: Mapping[str, Any]) -> Gpu:
    """A `Gpu` or `GpuView` of the broker."""
    holder = data.get("holder") or {}
    return Gpu(
        uuid=data["uuid"],
        node=data["node"],
        model=data["model"],
        memory_mib=data.get("memory_mib") or 0,
        holder=holder.get("owner", ""),
        state=data.get("state") or "",
    )


def parse_worker(data: Mapping[str, Any]) -> Worker:
    """A `Worker` of the broker."""
    return Worker(
        index=data["index"],
        node=data["node"],
        gpus=tuple(parse_gpu(gpu) for gpu in data.get("gpus", ())),
        state=data["state"],
        exit_code=data.get("exit_code"),
        message=data.get("message"),
    )


def parse_job(data: Mapping[str, Any]) -> Job:
    """A `Job` of the broker."""
    lease = data.get("lease") or {}
    return Job(
        id=data["id"],
        run_id=data["run_id"],
        state=data["state"],
        version=data["version"],
        position=lease.get("position"),
        waiting_for=lease.get("waiting_for"),
        workers=tuple(sorted(map(parse_worker, data.get("workers", ())), key=lambda worker: worker.index)),
        reason=data.get("reason"),
        renew_within_s=float(data.get("renew_within_s") or 30.0),
        expected_start=parse_time(lease.get("expected_start")),
        note=lease.get("note"),
        preemptions=data.get("preemptions") or 0,
        checkpoint_until=parse_time(data.get("checkpoint_until")),
        owner=data.get("owner") or "",
        detached=bool(data.get("detached")),
        name=data.get("name") or "",
        joins=data.get("joins"),
        nnodes=data.get("nnodes") or 1,
        nproc_per_node=data.get("nproc_per_node") or 1,
        gpus=data.get("gpus"),
        scavenge=bool(data.get("scavenge")),
        created_at=parse_time(data.get("created_at")),
        started_at=parse_time(data.get("started_at")),
        ended_at=parse_time(data.get("ended_at")),
        exit_code=data.get("exit_code"),
    )


def parse_time(value: object) -> datetime | None:
    """A moment with its time zone (UTC where none is told); None for anything else."""
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found is not None and found.tzinfo is None else found


def parse_cluster(data: Mapping[str, Any]) -> Cluster:
    """A `ClusterView` of the broker."""
    return Cluster(
        nodes=tuple(
            Node(
                name=node["name"],
                gpus=tuple(map(parse_gpu, node.get("gpus", ()))),
                state=node.get("state") or "",
                message=node.get("message"),
            )
            for node in data.get("nodes", ())
        ),
        # With Slurm others' jobs wait in the same queue.
        waiting=(data.get("waiting") or 0) + (data.get("waiting_outside") or 0),
        engine=data.get("engine") or "",
    )
