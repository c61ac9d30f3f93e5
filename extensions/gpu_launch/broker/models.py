"""The broker's answers, as far as a launch needs them.

Unknown fields of an answer are ignored, so that older clients keep working.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

#: States that this client handles; others are only shown.
WAITING, STARTING, RUNNING, PREEMPTING = "waiting", "starting", "running", "preempting"
STOPPING, ENDED = "stopping", "ended"
EXITED = "exited"
#: State of a worker in the driver of a detached job: its container got SIGTERM.
LEAVING = "leaving"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU; `holder` is the user who holds it, empty if it is free or unknown."""

    uuid: str
    node: str
    model: str
    #: 0 if unknown.
    memory_mib: int = 0
    holder: str = ""
    #: `free`, `held` or the reason why it cannot be granted; empty if unknown.
    state: str = ""
    #: Since when its holder does not use it, while others wait; None if it is used, or not known.
    idle_since: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker container."""

    index: int
    node: str
    gpus: tuple[Gpu, ...]
    state: str
    exit_code: int | None
    message: str | None
    #: Its node answers; else its state is the last one that is known.
    is_reachable: bool = True


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with its workers."""

    id: str
    run_id: str
    state: str
    version: int
    #: Queue position from 1; None unless waiting.
    position: int | None
    #: Reason for waiting in one line; None unless waiting.
    waiting_for: str | None
    workers: tuple[Worker, ...]
    reason: str | None
    #: Seconds without a renewal after which the job ends.
    renew_within_s: float
    #: Expected time of the grant; None if unknown.
    expected_start: datetime | None = None
    #: A remark about the grant in one line, for example that the GPUs differ.
    note: str | None = None
    #: Number of preemptions of the whole job.
    preemptions: int = 0
    #: Deadline for checkpoints; None unless preempting.
    checkpoint_until: datetime | None = None
    #: What it has on its GPU is kept in host memory while others have the GPU: `suspending`, `resuming` (it waits for
    #: the GPU) or `restoring`; empty while it runs as usual.
    suspension: str = ""
    #: Empty if unknown. Administrators see the jobs of all users.
    owner: str = ""
    #: It continues without its notebook or command.
    detached: bool = False
    #: A name for people, such as `train.py`; may be empty.
    name: str = ""
    #: The run that its workers joined; None if it joined none.
    joins: str | None = None
    #: Run id of the array that the task belongs to; None for a single job.
    array: str | None = None
    #: Number of the array's tasks that wait for GPUs or run at the same time; None for all.
    array_limit: int | None = None
    #: The run, or array, that must succeed before; None if there is none, or it has.
    after: str | None = None
    #: Number of times that it starts again after a failure, and that it has.
    max_retries: int = 0
    retries: int = 0
    #: It sleeps when it ends by itself and well, until a request to its port.
    sleeps: bool = False
    #: Port of its server, which is reached through the hub, and who reaches it besides the owner.
    port: int | None = None
    port_users: tuple[str, ...] = ()
    nnodes: int = 1
    nproc_per_node: int = 1
    #: Total number of GPUs of a job on any nodes; None for `nnodes` × `nproc_per_node`.
    gpus: int | None = None
    scavenge: bool = False
    created_at: datetime | None = None
    #: None before its workers run, or if unknown.
    started_at: datetime | None = None
    ended_at: datetime | None = None
    #: Exit code of worker 0, for a detached job that was not ended from outside; else None.
    exit_code: int | None = None
    #: What it used of its GPUs, in one line; empty if unknown.
    costs: str = ""

    @property
    def is_ended(self) -> bool:
        return self.state == ENDED

    @property
    def is_granted(self) -> bool:
        """Return whether its workers run or start."""
        return self.state in (STARTING, RUNNING)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A lease of a notebook or job."""

    owner: str
    is_notebook: bool
    #: Name of the notebook server, empty for the default one; a job's id for other leases.
    server: str
    #: Its GPUs are allocated, and it is not being released.
    is_granted: bool
    gpus: tuple[Gpu, ...]
    id: str = ""
    #: Grows with every change of the lease or of its place in the queue.
    version: int = 0
    profile: str = ""
    #: `requested` while it waits, `granted`, `active`, and the states of its end.
    state: str = ""
    nodes: tuple[str, ...] = ()
    #: Queue position from 1; None unless waiting.
    position: int | None = None
    #: Reason for waiting in one line; None unless waiting.
    waiting_for: str | None = None
    #: Expected time of the grant; None if unknown.
    expected_start: datetime | None = None
    #: When its time limit ends it; None without a limit.
    expires_at: datetime | None = None
    #: Defects and slowdowns of its GPUs, one text for each GPU that has some.
    gpu_problems: tuple[str, ...] = ()
    #: State of a notebook that has lent its GPU: `suspending`, `suspended`, `resuming` or `restoring`; otherwise empty.
    suspension: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A choice for a new notebook server."""

    name: str
    title: str = ""
    #: 0 for CPU only.
    gpu_count: int = 1
    #: GPU models that it admits; empty for any.
    models: tuple[str, ...] = ()
    image: str = ""
    #: All images that users may choose, its own among them; empty from a broker that knows no choice.
    images: tuple[str, ...] = ()
    #: Number of shares of a GPU, of which the profile grants one; 1 for whole GPUs.
    share: int = 1
    #: A request would be granted at once.
    starts_now: bool = False


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node with all its GPUs."""

    name: str
    gpus: tuple[Gpu, ...]
    #: `up`, or the reason why it takes no work; empty if unknown.
    state: str = ""
    #: An explanation of the state; may be None.
    message: str | None = None
    #: False for a node that is restricted to groups that the user is not in.
    is_open: bool = True
    #: False for one where scavenging jobs of the user are not placed either.
    takes_scavenging: bool = True
    #: It is a guest: a machine that somebody lends over the internet.
    guest: bool = False
    #: False for a node that takes no jobs of the user with `--guests`.
    takes_guests: bool = False
    #: Owners of waiting requests that could be granted there, at most two; None if unknown.
    wanted_by: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes."""

    nodes: tuple[Node, ...]
    #: Waiting requests of all users, with Slurm also from outside gpuhub.
    waiting: int = 0
    #: Number of waiting requests from outside gpuhub.
    waiting_outside: int = 0
    #: Even a request for free GPUs waits a moment in another scheduler's queue.
    has_delayed_grants: bool = False
    #: Jobs are containers; without Docker on the nodes, they have no port and do not start again.
    has_containers: bool = True
    #: The profiles that the user may choose.
    profiles: tuple[Profile, ...] = ()

    def find_gpus(self, uuids: tuple[str, ...]) -> tuple[Gpu, ...]:
        """Return the known GPUs among these UUIDs, in their order."""
        by_uuid = {gpu.uuid: gpu for node in self.nodes for gpu in node.gpus}
        return tuple(by_uuid[uuid] for uuid in uuids if uuid in by_uuid)

    def is_wanted(self, nodes: frozenset[str], *, owner: str) -> bool:
        """Return whether others than `owner` wait for what one of these nodes has; in doubt, any request counts."""
        wanted_by = [node.wanted_by for node in self.nodes if node.name in nodes]
        known = [owners for owners in wanted_by if owners is not None]
        if self.waiting_outside or len(known) < len(nodes):
            return self.waiting > 0
        return any(name != owner for owners in known for name in owners)

    def list_models(self) -> tuple[str, ...]:
        """Return the names of all GPU models."""
        return tuple(sorted({gpu.model for node in self.nodes for gpu in node.gpus}))


def parse_gpu(data: Mapping[str, Any]) -> Gpu:
    """Parse the broker's `Gpu` or `GpuView`."""
    holder = data.get("holder") or {}
    return Gpu(
        uuid=data["uuid"],
        node=data["node"],
        model=data["model"],
        memory_mib=data.get("memory_mib") or 0,
        holder=holder.get("owner", ""),
        state=data.get("state") or "",
        idle_since=parse_time(holder.get("idle_since")),
    )


def parse_worker(data: Mapping[str, Any]) -> Worker:
    """Parse the broker's `Worker`."""
    return Worker(
        index=data["index"],
        node=data["node"],
        gpus=tuple(parse_gpu(gpu) for gpu in data.get("gpus", ())),
        state=data["state"],
        exit_code=data.get("exit_code"),
        message=data.get("message"),
        is_reachable=data.get("is_reachable", True),
    )


def parse_job(data: Mapping[str, Any]) -> Job:
    """Parse the broker's `Job`."""
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
        suspension=str((lease.get("suspension") or {}).get("state", "")),
        owner=data.get("owner") or "",
        detached=bool(data.get("detached")),
        name=data.get("name") or "",
        joins=data.get("joins"),
        array=data.get("array"),
        array_limit=data.get("array_limit"),
        after=data.get("after"),
        max_retries=data.get("max_retries", 0),
        retries=data.get("retries", 0),
        sleeps=data.get("sleeps", False),
        port=data.get("port"),
        port_users=tuple(data.get("port_users", ())),
        nnodes=data.get("nnodes") or 1,
        nproc_per_node=data.get("nproc_per_node") or 1,
        gpus=data.get("gpus"),
        scavenge=bool(data.get("scavenge")),
        created_at=parse_time(data.get("created_at")),
        started_at=parse_time(data.get("started_at")),
        ended_at=parse_time(data.get("ended_at")),
        exit_code=data.get("exit_code"),
        costs=str((data.get("costs") or {}).get("text") or ""),
    )


def parse_lease(data: Mapping[str, Any]) -> Lease:
    """Parse the broker's `LeaseView`."""
    suspension = str((data.get("suspension") or {}).get("state", ""))
    return Lease(
        owner=data["owner"],
        is_notebook=data["purpose"] == "notebook",
        server=data["subject"],
        is_granted=data["state"] in ("granted", "active") and suspension not in ("suspended", "resuming"),
        gpus=tuple(map(parse_gpu, data.get("gpus", ()))),
        id=data.get("id") or "",
        version=data.get("version") or 0,
        profile=data.get("profile") or "",
        state=data["state"],
        nodes=tuple(data.get("nodes", ())),
        position=data.get("position"),
        waiting_for=data.get("waiting_for"),
        expected_start=parse_time(data.get("expected_start")),
        expires_at=parse_time(data.get("expires_at")),
        gpu_problems=tuple(map(str, data.get("gpu_problems", ()))),
        suspension=suspension,
    )


def parse_profile(data: Mapping[str, Any]) -> Profile:
    """Parse the broker's `ProfileView`."""
    count = data.get("gpu_count")
    return Profile(
        name=data["name"],
        title=data.get("title") or "",
        gpu_count=1 if count is None else count,
        models=tuple(data.get("models", ())),
        image=data.get("image") or "",
        images=tuple(data.get("images", ())),
        share=data.get("share") or 1,
        starts_now=bool(data.get("starts_now")),
    )


def parse_time(value: object) -> datetime | None:
    """Parse a time, in UTC if it has no time zone; return None for other values."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def parse_cluster(data: Mapping[str, Any]) -> Cluster:
    """Parse the broker's `ClusterView`."""
    return Cluster(
        nodes=tuple(
            Node(
                name=node["name"],
                gpus=tuple(map(parse_gpu, node.get("gpus", ()))),
                state=node.get("state") or "",
                message=node.get("message"),
                is_open=node.get("is_open") is not False,
                takes_scavenging=node.get("takes_scavenging") is not False,
                guest=bool(node.get("guest")),
                takes_guests=bool(node.get("takes_guests")),
                wanted_by=None if node.get("wanted_by") is None else tuple(node["wanted_by"]),
            )
            for node in data.get("nodes", ())
        ),
        # With Slurm the jobs of other users wait in the same queue.
        waiting=(data.get("waiting") or 0) + (data.get("waiting_outside") or 0),
        waiting_outside=data.get("waiting_outside") or 0,
        has_delayed_grants=_parse_grants_later(data),
        has_containers=(data.get("capabilities") or {}).get("containers") is not False,
        profiles=tuple(map(parse_profile, data.get("profiles", ()))),
    )


def _parse_grants_later(data: Mapping[str, Any]) -> bool:
    capabilities = data.get("capabilities")
    if capabilities is None:
        # Brokers that list no capabilities have one external backend only.
        return data.get("engine") == "slurm"
    return not capabilities.get("immediate_grants", True)
