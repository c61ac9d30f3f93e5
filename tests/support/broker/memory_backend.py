"""A scheduling backend in memory: the minimum that a third backend must implement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuhub.backends.external_scheduler import ExternalScheduler
from gpuhub.backends.interface import BackendHost, EndedLease, ExternalUsage, LeaseRejected, Observation
from gpuhub.backends.interface import SchedulingBackend as Backend
from gpuhub.backends.plugin import BackendPlugin, load_plugin
from gpuhub.broker_api.schemas import Capabilities
from gpuhub.common.errors import Conflict, SchedulerUnreachable
from gpuhub.common.paths import Paths
from gpuhub.config.backends import BACKEND_GROUP, find_backends
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import lease_states
from gpuhub.domain.models import LeaseRow
from gpuhub.domain.scheduler_input import build_request
from gpuhub.nodes.status import NodeStatus
from gpuhub.scheduler.interface import NodeAllocation, SchedulingRequest

CAPABILITIES = Capabilities(
    scheduler="Memory",
    immediate_grants=False,
    external_jobs=True,
    gpu_shares=False,
    cordons=False,
    reservations=False,
    persistent_notebooks=False,
)


@dataclass(slots=True)
class MemoryJob:
    """A job, which waits, has GPUs by node, or has ended."""

    id: int
    lease: str
    request: SchedulingRequest
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_over: bool = False
    limit_s: int | None = None


@dataclass(slots=True)
class MemoryQueue:
    """The other system: first come, first served, whole GPUs. It outlives brokers."""

    jobs: dict[int, MemoryJob] = field(default_factory=dict)
    is_reachable: bool = True
    is_paused: bool = False
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def submit(self, lease: LeaseRow) -> int:
        job = MemoryJob(id=next(self._ids), lease=lease.id, request=build_request(lease))
        self.jobs[job.id] = job
        return job.id

    def start(self, nodes: Mapping[str, NodeStatus]) -> None:
        """Start the jobs that fit, oldest first."""
        for job in self.live():
            if not job.nodes and not self.is_paused:
                job.nodes = self._place(job.request, nodes)

    def live(self) -> list[MemoryJob]:
        return [job for job in self.jobs.values() if not job.is_over]

    def _place(self, request: SchedulingRequest, nodes: Mapping[str, NodeStatus]) -> dict[str, tuple[str, ...]]:
        used = {uuid for job in self.live() for uuids in job.nodes.values() for uuid in uuids}
        free = {
            name: [gpu.uuid for gpu in node.gpus if gpu.uuid not in used and request.requirement.accepts(gpu.card)]
            for name, node in nodes.items()
        }
        places = {name: tuple(uuids[: request.gpus_per_node]) for name, uuids in free.items()}
        fitting = {name: uuids for name, uuids in places.items() if len(uuids) == request.gpus_per_node}
        return dict(list(fitting.items())[: request.nodes]) if len(fitting) >= request.nodes else {}


class MemoryScheduler(ExternalScheduler):
    """Grants the GPUs that the queue has given to jobs."""

    title = "Memory"

    def __init__(self, queue: MemoryQueue) -> None:
        super().__init__()
        self._queue = queue

    def find_allocation(self, request: SchedulingRequest) -> tuple[NodeAllocation, ...] | None:
        job = self._queue.jobs.get(request.slurm_job or 0)
        nodes = {} if job is None or job.is_over else job.nodes
        known = self._state.capacity.nodes
        slots = {
            name: tuple(slot for slot in known[name].capacity.slots if slot.uuid in uuids)
            for name, uuids in nodes.items()
        }
        if any(self.find_held(name) & {slot.uuid for slot in found} for name, found in slots.items()):
            return None
        return tuple(NodeAllocation(node=name, slots=found) for name, found in slots.items()) or None

    def explain(self, request: SchedulingRequest) -> str:
        return "it is not submitted yet" if request.slurm_job is None else "others are before it"


class MemoryBackend(Backend):
    """Leases as jobs of a queue in memory."""

    name = "memory"
    title = "Memory"
    poll_s = 0.1

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._scheduler = MemoryScheduler(queue)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def scheduler(self) -> MemoryScheduler:
        return self._scheduler

    async def setup(self, host: BackendHost) -> None:
        self._host = host

    async def observe(self) -> Observation:
        self._answer()
        self._queue.start(self._host.nodes())
        self._scheduler.note_answer()
        jobs = {job.lease: job.id for job in self._queue.live()}
        ended = {
            lease.id: EndedLease(reason="its job was cancelled")
            for lease in self._host.leases().values()
            if lease.slurm_job is not None and lease.id not in jobs and lease.state not in lease_states.ENDING
        }
        return Observation(jobs=jobs, ended=ended)

    async def submit(self, lease: LeaseRow) -> int | None:
        self._answer()
        if lease.resources.exclusive:
            raise LeaseRejected("Memory refused it: no node is given as a whole")
        return self._queue.submit(lease)

    async def cancel(self, jobs: Mapping[str, int]) -> None:
        self._answer()
        for job in jobs.values():
            self._queue.jobs[job].is_over = True

    async def confirm(self, lease: LeaseRow, *, timeout_s: float = 0.0) -> None:
        self._answer()
        if lease.slurm_job is None or self._queue.jobs[lease.slurm_job].is_over:
            raise Conflict(f"lease {lease.id} cannot start anything: its job was cancelled")

    async def extend(self, lease: LeaseRow, seconds: int) -> None:
        self._answer()
        self._queue.jobs[lease.slurm_job or 0].limit_s = seconds

    def note_unreachable(self, error: SchedulerUnreachable) -> None:
        self._scheduler.note_unreachable(str(error))

    def external_usage(self, now: float) -> ExternalUsage:
        return ExternalUsage()

    def _answer(self) -> None:
        if not self._queue.is_reachable:
            raise SchedulerUnreachable("the queue does not answer")


class MemoryPlugin(BackendPlugin):
    """The plugin that the entry point names."""

    name = "memory"
    title = "Memory"

    def __init__(self) -> None:
        self.queue = MemoryQueue()

    def capabilities(self, cluster: ClusterSettings) -> Capabilities:
        return CAPABILITIES

    def build(self, cluster: ClusterSettings, paths: Paths) -> Backend:
        return MemoryBackend(self.queue)


PLUGIN = MemoryPlugin()


@contextmanager
def installed_memory_backend(folder: Path) -> Iterator[MemoryPlugin]:
    """Install the entry point and a new queue as a distribution would."""
    info = folder / "memory_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memory-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{BACKEND_GROUP}]\nmemory = {__name__}:PLUGIN\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        _forget_plugins()
        PLUGIN.queue = MemoryQueue()
        try:
            yield PLUGIN
        finally:
            _forget_plugins()


def _forget_plugins() -> None:
    find_backends.cache_clear()
    load_plugin.cache_clear()
