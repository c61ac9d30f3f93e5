"""Starts the workers of granted jobs, and finds out why one ended."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gpuhub.broker import job_rules
from gpuhub.broker.core import Core
from gpuhub.broker.reconcile import why_another
from gpuhub.broker.rows import JobRow, LeaseRow, WorkerRow
from gpuhub.broker.schemas import JobState, WorkerState
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.workers import WorkerSpec
from gpuhub.errors import GpuhubError, NotFound
from gpuhub.nodes.records import Identity
from gpuhub.quantities import format_size

log = logging.getLogger(__name__)

#: Starts (or adopts) a worker's container and returns its id.
StartWorker = Callable[[WorkerSpec], Awaitable[str]]
#: Raises where nothing of a lease may be started any more.
RefuseEnded = Callable[[LeaseRow], Awaitable[None]]

_OUT_OF_MEMORY = 137
_RETRY_S = 2.0


class JobRunner:
    """At most one start of each job at a time."""

    def __init__(
        self, *, core: Core, instance: str, start_worker: StartWorker, refuse_ended: RefuseEnded | None = None
    ) -> None:
        """`refuse_ended` is asked about a worker's lease when its container is there, before it is started."""
        self._core = core
        self._refuse_ended = refuse_ended
        self._instance = instance
        self._start_worker = start_worker
        self._starting: dict[str, asyncio.Task[None]] = {}
        #: When the last start for a lease ended; monotonic.
        self._started: dict[str, float] = {}
        self._again: asyncio.TimerHandle | None = None

    def start_granted(self) -> None:
        """Begin to start the workers of every job that has its GPUs and lacks workers."""
        snapshot = self._core.ledger.snapshot
        for job in snapshot.jobs.values():
            if job.state is not JobState.STARTING or job.lease_id in self._starting:
                continue
            pending = [worker for worker in job.workers if worker.state is WorkerState.PENDING]
            if any(self._identity(worker.node) is None for worker in pending):
                # This broker has not looked at the node yet: an earlier one may have started the worker already.
                self._look_again()
            elif pending:
                lease = snapshot.leases[job.lease_id]
                task = asyncio.ensure_future(self._start(job, lease, pending))
                self._starting[lease.id] = task
                task.add_done_callback(partial(self._note_started, lease.id))
        self._started = {lease: at for lease, at in self._started.items() if lease in snapshot.leases}

    def busy(self, since: float) -> frozenset[str]:
        """Leases for which containers were being made at some time since then (monotonic)."""
        return frozenset(self._starting) | {lease for lease, at in self._started.items() if at >= since}

    async def close(self) -> None:
        """Let starts end that have begun; what they made is found by label later."""
        if self._again is not None:
            self._again.cancel()
        for task in list(self._starting.values()):
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)

    async def _start(self, job: JobRow, lease: LeaseRow, pending: list[WorkerRow]) -> None:
        await asyncio.gather(*(self._start_one(job, lease, worker) for worker in pending))

    async def _start_one(self, job: JobRow, lease: LeaseRow, worker: WorkerRow) -> None:
        change: Callable[[JobRow, float], JobRow]
        identity = self._identity(worker.node)
        another = None if identity is None else why_another(lease, worker.node, identity)
        if another is not None:
            # Under the daemon of before, the worker may run already, where this one does not see it.
            await self._core.edit_jobs([(job.id, partial(_failed, index=worker.index, message=another))])
            return
        try:
            spec = build_spec(self._instance, job, lease, worker)
            if self._refuse_ended is not None:
                spec = replace(spec, before_start=partial(self._refuse_ended, lease))
            container_id = await self._start_worker(spec)
        except GpuhubError as error:
            change = partial(_failed, index=worker.index, message=str(error))
        except Exception:
            log.exception("worker %s of job %s could not be started", worker.index, job.id)
            change = partial(_failed, index=worker.index, message="it could not be started (see the broker's log)")
        else:
            change = partial(_running, index=worker.index, container_id=container_id)
        await self._core.edit_jobs([(job.id, change)])

    def _look_again(self) -> None:
        """Come back a little later, once for all that wait for it."""
        loop = asyncio.get_running_loop()
        if self._again is None or self._again.when() <= loop.time():
            self._again = loop.call_later(_RETRY_S, self._core.ledger.wake)

    def _identity(self, node: str) -> Identity | None:
        """Which daemon answers on the node, and which boot of it; None where nobody has asked yet."""
        record = self._core.inventory.nodes[node]
        return None if record.daemon_id is None else record.identity

    def _note_started(self, lease_id: str, task: asyncio.Task[None]) -> None:
        self._starting.pop(lease_id, None)
        self._started[lease_id] = self._core.clock.monotonic()
        if task.cancelled():
            return
        if task.exception() is None:
            self._core.ledger.wake()
            return
        # What was started could not be stored; it is adopted at the next try.
        log.error("starting the workers of lease %s failed", lease_id, exc_info=task.exception())
        self._look_again()


def build_spec(instance: str, job: JobRow, lease: LeaseRow, worker: WorkerRow) -> WorkerSpec:
    """What a worker's container is made from."""
    return WorkerSpec(
        instance=instance,
        owner=job.owner,
        job_id=job.id,
        run_id=job.joins or job.run_id,
        index=worker.index,
        number=job.first_worker + worker.index,
        lease_id=lease.id,
        epoch=lease.epoch,
        node=worker.node,
        gpu_uuids=tuple(gpu.uuid for gpu in lease.gpus if gpu.worker == worker.index),
        image=job.image,
        roster=build_roster(job, lease) if job.detached else None,
        preemptions=job.preemptions,
        slurm_job=lease.slurm_job,
    )


def build_roster(job: JobRow, lease: LeaseRow) -> str:
    """All workers of a detached job as JSON: its worker 0 leads them, and has nobody to ask. All run, or will."""
    return json.dumps(
        [
            {
                "index": worker.index,
                "node": worker.node,
                "gpus": [
                    {"uuid": gpu.uuid, "node": gpu.node, "model": gpu.model, "memory_mib": gpu.memory_mib}
                    for gpu in lease.gpus
                    if gpu.worker == worker.index
                ],
                "state": WorkerState.RUNNING.value,
            }
            for worker in job.workers
        ]
    )


async def find_exit(daemons: Daemons, node: str, container_id: str | None, memory: int) -> tuple[int | None, str]:
    """A worker's exit code and what it means, for a person. `memory` is its limit in bytes.

    Raises:
        NodeUnreachable: ask again later.
    """
    if container_id is None:
        return None, "its container is gone"
    try:
        found = await daemons.call(node, "inspect_container", container_id)
    except NotFound:
        return None, "its container is gone"
    return parse_exit(found.get("State") or {}, memory)


def parse_exit(state: dict[str, Any], memory: int) -> tuple[int | None, str]:
    """The `State` of an ended container, such as `{"ExitCode": 137, "OOMKilled": true, "Error": ""}`."""
    code = state.get("ExitCode")
    if state.get("OOMKilled"):
        return code, f"out of memory (limit {format_size(memory)})"
    if state.get("Error"):
        return code, str(state["Error"])[:300]
    if code == _OUT_OF_MEMORY:
        return code, "killed (exit code 137)"
    return code, f"ended with exit code {code}"


def _failed(job: JobRow, now: float, *, index: int, message: str) -> JobRow:
    return job_rules.worker_exited(job, index, None, message, now)


def _running(job: JobRow, now: float, *, index: int, container_id: str) -> JobRow:
    return job_rules.worker_running(job, index, container_id, now)
