"""The launcher of granted jobs' workers, and the reason why a worker ended."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import JobState, LeaseState, WorkerState
from gpuhub.common.errors import GpuhubError, NodeUnreachable, NotFound
from gpuhub.common.tasks import cancel_tasks
from gpuhub.common.units import format_size
from gpuhub.config.containers.container_size import DEFAULT_CPUS, DEFAULT_MEMORY
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.security import WorkerSize
from gpuhub.docker.containers.service_access import find_offered_services
from gpuhub.docker.containers.user_containers import WorkerSpec
from gpuhub.domain import job_states
from gpuhub.domain.models import JobRow, LeaseRow, WorkerRow
from gpuhub.domain.owner_limits import list_groups
from gpuhub.domain.reconcile import explain_identity_change
from gpuhub.nodes.status import NodeIdentity

log = logging.getLogger(__name__)

#: Starts (or adopts) a worker's container and returns its id.
StartWorker = Callable[[WorkerSpec], Awaitable[str]]
#: Brings copies of datasets to nodes, and returns their volumes by dataset.
StageDatasets = Callable[[Sequence[str], Sequence[str]], Awaitable[Mapping[str, str]]]
#: Copies the files of a job to its container on a guest, given by node and id.
SendFiles = Callable[[JobRow, str, str], Awaitable[None]]
#: Raises GpuhubError if nothing of a lease may be started any more.
CheckLease = Callable[[LeaseRow], Awaitable[None]]

_MIB = 1024**2
#: Exit code after SIGKILL.
_KILLED = 137
#: Characters of a job's name in the name of its workers; a part of a host name has 63 at most.
_LONGEST_LABEL = 50
#: Delay before a failed start is tried again, seconds.
_RETRY_S = 2.0


class WorkerLauncher:
    """Starts the workers of granted jobs, with at most one start of each job at a time."""

    def __init__(
        self,
        *,
        core: BrokerState,
        instance: str,
        start_worker: StartWorker,
        refuse_ended: CheckLease | None = None,
        stage: StageDatasets | None = None,
        send_files: SendFiles | None = None,
    ) -> None:
        """Build the launcher, which starts nothing yet.

        Args:
            send_files: Copies a job's files to a container on a guest; None where there are no guests.
            refuse_ended: Called with a worker's lease between the creation and the start of its container.
            stage: Called before the containers of a lease are created; None where nodes have no copies of datasets.
        """
        self._stage = stage
        self._send_files = send_files
        self._core = core
        self._refuse_ended = refuse_ended
        self._instance = instance
        self._start_worker = start_worker
        self._starting: dict[str, asyncio.Task[None]] = {}
        #: When the last start for a lease ended; monotonic.
        self._started: dict[str, float] = {}
        #: Leases of which a container may have been started, in this run of the broker or an earlier one.
        self._may_run = {
            lease.id for lease in core.ledger.snapshot.leases.values() if lease.state is not LeaseState.REQUESTED
        }
        self._retry: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Start workers whenever the ledger changes, until cancelled."""
        while True:
            changed = self._core.ledger.changed
            self.start_granted()
            await changed.wait()

    def start_granted(self) -> None:
        """Start the workers of every job that has its GPUs and lacks workers, in the background."""
        snapshot = self._core.ledger.snapshot
        for job in snapshot.jobs.values():
            if job.state is not JobState.STARTING or job.lease_id in self._starting:
                continue
            pending = [worker for worker in job.workers if worker.state is WorkerState.PENDING]
            if any(self._identity(worker.node) is None for worker in pending):
                # The node was not polled in this run of the broker: an earlier run may have started the worker already.
                self._schedule_retry()
            elif pending:
                lease = snapshot.leases[job.lease_id]
                task = asyncio.ensure_future(self._start(job, lease, pending))
                self._starting[lease.id] = task
                task.add_done_callback(partial(self._note_started, lease.id))
        self._started = {lease: at for lease, at in self._started.items() if lease in snapshot.leases}
        self._may_run &= snapshot.leases.keys()

    def find_launching(self, since: float) -> frozenset[str]:
        """Return leases for which containers were created at any time since `since` (monotonic)."""
        return frozenset(self._starting) | {lease for lease, at in self._started.items() if at >= since}

    async def close(self) -> None:
        """Cancel running starts; containers that they created are found by label later."""
        if self._retry is not None:
            self._retry.cancel()
        await cancel_tasks(self._starting.values())

    async def _start(self, job: JobRow, lease: LeaseRow, pending: list[WorkerRow]) -> None:
        staged: Mapping[str, str] = {}
        if lease.resources.stage and self._stage is not None:
            try:
                staged = await self._stage(lease.resources.stage, [worker.node for worker in pending])
            except NodeUnreachable as error:
                await self._requeue(lease, error)
                return
            except GpuhubError as error:
                changes = [(job.id, partial(_failed, index=worker.index, message=str(error))) for worker in pending]
                await self._core.ledger.change(mutations.change_jobs(changes))
                return
        outcomes = await asyncio.gather(*(self._start_one(job, lease, worker, staged) for worker in pending))
        unreachable = next(filter(None, outcomes), None)
        if unreachable is not None:
            await self._requeue(lease, unreachable)

    async def _requeue(self, lease: LeaseRow, error: NodeUnreachable) -> None:
        may_run = lease.id in self._may_run
        await self._core.ledger.change(mutations.requeue_unstarted(lease.id, str(error), may_run=may_run))

    async def _start_one(
        self, job: JobRow, lease: LeaseRow, worker: WorkerRow, staged: Mapping[str, str]
    ) -> NodeUnreachable | None:
        """Start a worker and record how that went; return the error if its node does not answer."""
        change: Callable[[JobRow, float], JobRow]
        identity = self._identity(worker.node)
        another = None if identity is None else explain_identity_change(lease, worker.node, identity)
        if another is not None:
            # The worker may run under the previous daemon, where this daemon does not see it.
            await self._core.ledger.change(
                mutations.change_jobs([(job.id, partial(_failed, index=worker.index, message=another))])
            )
            return None
        try:
            spec = replace(
                build_spec(self._instance, job, lease, worker, staged),
                services=self._find_services(lease, worker.node),
                before_start=partial(self._check_start, lease),
            )
            if self._send_files is not None and self._core.cluster.node(worker.node).guest:
                spec = replace(spec, fill_home=partial(self._send_files, job, worker.node))
            container_id = await self._start_worker(spec)
        except NodeUnreachable as error:
            return error
        except GpuhubError as error:
            change = partial(_failed, index=worker.index, message=str(error))
        except Exception:
            log.exception("worker %s of job %s could not be started", worker.index, job.id)
            change = partial(_failed, index=worker.index, message="it could not be started (see the broker's log)")
        else:
            change = partial(_running, index=worker.index, container_id=container_id)
        await self._core.ledger.change(mutations.change_jobs([(job.id, change)]))
        return None

    async def _check_start(self, lease: LeaseRow) -> None:
        if self._refuse_ended is not None:
            await self._refuse_ended(lease)
        self._may_run.add(lease.id)

    def _find_services(self, lease: LeaseRow, node: str) -> tuple[ServiceSettings, ...]:
        """Return the services of a worker: none on a guest, whose owner could read what reaches them."""
        cluster = self._core.cluster
        if cluster.node(node).guest:
            return ()
        return find_offered_services(cluster, lease.owner, list_groups(cluster, lease.owner, lease.groups))

    def _schedule_retry(self) -> None:
        """Wake the ledger after a delay, once for all jobs that wait for it."""
        loop = asyncio.get_running_loop()
        if self._retry is None or self._retry.when() <= loop.time():
            self._retry = loop.call_later(_RETRY_S, self._core.ledger.notify_all)

    def _identity(self, node: str) -> NodeIdentity | None:
        """Return the daemon and boot of the node; None where it has not been polled."""
        record = self._core.capacity.inventory.nodes[node]
        return None if record.daemon_id is None else record.identity

    def _note_started(self, lease_id: str, task: asyncio.Task[None]) -> None:
        self._starting.pop(lease_id, None)
        self._started[lease_id] = self._core.clock.monotonic()
        if task.cancelled():
            return
        if task.exception() is None:
            self._core.ledger.notify_all()
            return
        # The result could not be stored; the next start adopts the container.
        log.error("starting the workers of lease %s failed", lease_id, exc_info=task.exception())
        self._schedule_retry()


def build_spec(
    instance: str, job: JobRow, lease: LeaseRow, worker: WorkerRow, staged: Mapping[str, str] | None = None
) -> WorkerSpec:
    """Return the specification of a worker's container; `staged` has the volumes of copies by dataset."""
    size, shm = lease.find_size(worker.node), lease.resources.shm_mib
    return WorkerSpec(
        instance=instance,
        owner=job.owner,
        job_id=job.id,
        run_id=job.joins or job.run_id,
        index=worker.index,
        run_index=job.first_worker + worker.index,
        lease_id=lease.id,
        epoch=lease.epoch,
        node=worker.node,
        gpu_uuids=tuple(gpu.uuid for gpu in lease.gpus if gpu.worker == worker.index),
        image=job.image,
        size=WorkerSize(
            cpus=size.cpu_milli / 1000 or DEFAULT_CPUS,
            memory=size.memory_mib * _MIB or DEFAULT_MEMORY,
            shm=None if shm is None else shm * _MIB,
        ),
        worker_list=build_worker_list(job, lease) if job.detached else None,
        preemptions=job.preemptions,
        retries=(job.retries, job.max_retries),
        times_asleep=job.times_asleep if job.sleeps else None,
        slurm_job=lease.slurm_job,
        aliases=list_aliases(job, lease, worker),
        staged=staged or {},
    )


def list_aliases(job: JobRow, lease: LeaseRow, worker: WorkerRow) -> tuple[str, ...]:
    """Return the names by which the other jobs of a job group find a worker: `trainer-0.GROUP`, as in SkyPilot."""
    if lease.resources.bundle is None:
        return ()
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    return (f"{name[:_LONGEST_LABEL] or 'job'}-{worker.index}.{lease.resources.bundle}",)


def build_worker_list(job: JobRow, lease: LeaseRow) -> str:
    """Return all workers of a detached job as JSON, for worker 0, which leads them and cannot query the broker."""
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


async def inspect_exit(
    daemons: DockerClients, node: str, container_id: str | None, memory: int
) -> tuple[int | None, str]:
    """Return a worker's exit code, and a text that explains it.

    Args:
        daemons: the nodes' Docker daemons.
        node: the worker's node.
        container_id: the worker's container; None where none was created.
        memory: the container's memory limit, bytes.

    Raises:
        NodeUnreachable: try again later.
    """
    if container_id is None:
        return None, "its container is gone"
    try:
        details = await daemons.call(node, "inspect_container", container_id)
    except NotFound:
        return None, "its container is gone"
    return parse_exit(details.get("State") or {}, memory)


def parse_exit(state: dict[str, Any], memory: int) -> tuple[int | None, str]:
    """Return exit code and explanation from the `State` of an ended container.

    Args:
        state: such as `{"ExitCode": 137, "OOMKilled": true, "Error": ""}`.
        memory: the container's memory limit, bytes.
    """
    code = state.get("ExitCode")
    if state.get("OOMKilled"):
        return code, f"out of memory (limit {format_size(memory)})"
    if state.get("Error"):
        return code, str(state["Error"])[:300]
    if code == _KILLED:
        return code, "killed (exit code 137)"
    return code, f"ended with exit code {code}"


def _failed(job: JobRow, now: float, *, index: int, message: str) -> JobRow:
    return job_states.record_worker_exit(job, index, None, message, now)


def _running(job: JobRow, now: float, *, index: int, container_id: str) -> JobRow:
    return job_states.record_worker_start(job, index, container_id, now)
