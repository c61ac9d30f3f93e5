"""The containers of one run: the notebook's own worker, and the workers of the broker's jobs.

Independent of ipyparallel, and thread-safe.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.holdings import Holding, list_holdings
from gpu_launch.broker.job_watcher import JobWatcher, release_job
from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import Membership
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.errors import BrokerError, LaunchFailed
from gpu_launch.launch.membership import format_lost_worker
from gpu_launch.launch.plan import LaunchPlan, free_nodes
from gpu_launch.launch.workers.local_worker import end_local_worker, start_local_worker


class WorkerGroup(Protocol):
    """The containers of one run: requested by a notebook, or there already in a detached job. Thread-safe."""

    @property
    def plan(self) -> LaunchPlan:
        """The plan that was requested."""

    @property
    def run(self) -> RunFolder:
        """The folder by which workers find their controller."""

    @property
    def job(self) -> models.Job | None:
        """The broker's job in its last known state; None while there is none."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What the user held of the requested kind when the request had to wait."""

    @property
    def is_notebook_only(self) -> bool:
        """Return whether this process's own container is the only one."""

    def check(self) -> None:
        """Raise the failure of a worker, or of the job."""

    def is_started(self) -> bool:
        """Return whether every container is running."""

    def workers(self) -> tuple[models.Worker, ...]:
        """Return the workers that are in use."""

    def membership(self) -> Membership | None:
        """Return who takes part in a start now; None while that is not decided."""

    def drop_workers(self, indexes: Iterable[int]) -> None:
        """Stop using these workers."""

    def refresh(self) -> None:
        """Poll the job now, instead of waiting for its next change."""

    def list_gpu_problems(self, nodes: Collection[str]) -> tuple[str, ...]:
        """Return what the broker knows of defects of the owner's GPUs on these nodes; it is asked for a moment only."""

    def start(self, *, settings: dict[str, Any]) -> None:
        """Ask for the containers; their engines start with `settings`, see `worker.main`."""

    def publish_connection(self, connection: dict[str, Any]) -> None:
        """Publish the connection to the controller for the engines."""

    def stop(self) -> None:
        """Free everything; return when it is free. May be called again."""


_PROBLEMS_S = 3.0  # seconds for the broker to say what is wrong with GPUs
#: Seconds within which free GPUs are granted when the broker asks another scheduler for them.
_GRANT_S = 15.0


class BrokerWorkerGroup:
    """The containers of a plan, requested of the broker."""

    def __init__(
        self,
        plan: LaunchPlan,
        run: run_folder.RunFolder,
        *,
        env: environment.Environment,
        broker: BrokerClient | None,
        name: str = "",
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the request; `name` names the job for people, see `broker.holdings`."""
        self._plan, self._run, self._name = plan, run, name
        self._env, self._broker, self._on_change = env, broker, on_change
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._first_job: JobWatcher | None = None
        #: Jobs of workers that joined later, with the number of preemptions of the first job at that time.
        self._later_jobs: list[tuple[int, JobWatcher]] = []
        self._next_worker = plan.workers
        #: Workers that are not used any more, by the number of preemptions of the job, and index.
        self._dropped: set[tuple[int, int]] = set()
        #: No job is needed, or nothing was free and the notebook's own GPUs are enough.
        self._needs_no_job = not plan.workers
        self._local: subprocess.Popen[bytes] | None = None
        self._holdings: tuple[Holding, ...] = ()

    @property
    def plan(self) -> LaunchPlan:
        """The plan that was requested."""
        return self._plan

    @property
    def run(self) -> run_folder.RunFolder:
        """The folder by which workers find their controller."""
        return self._run

    def start(self, *, settings: dict[str, Any]) -> None:
        """Start the notebook's own worker and ask for the others; return when the broker has accepted the request."""
        with self._lock:
            if self._stopping.is_set():
                return
            run_folder.write_secret_json(self.run.settings, settings)
            if self.plan.includes_notebook:
                self._local = start_local_worker(self.run)
        if not self._needs_no_job and self._broker is not None:
            self._request_workers(self._broker)

    def publish_connection(self, connection: dict[str, Any]) -> None:
        """Publish the connection to the controller for the engines."""
        run_folder.write_secret_json(self.run.connection, connection)
        if self._stopping.is_set():
            self.run.connection.unlink(missing_ok=True)

    @property
    def job(self) -> models.Job | None:
        """The broker's first job in its last known state; None while there is none."""
        return self._first_job.job if self._first_job else None

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What the user held of the requested kind when the request had to wait."""
        return self._holdings

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Ids of the broker's jobs."""
        return tuple(tracked.job.id for tracked in self._all_jobs())

    def check(self) -> None:
        """Raise the failure of a worker, or of the job."""
        if self._stopping.is_set():
            return
        # Later jobs do not end the launch: it continues without their workers, whose state shows their end.
        if self._first_job is not None and self._first_job.error is not None:
            raise self._first_job.error
        if self._local is not None and (code := self._local.poll()) is not None:
            raise LaunchFailed(
                f"The worker in this container ended ({code}). Its log: {self._shown(self.run.log_file('notebook'))}"
            )
        if self.job is not None:
            check_job(self.job, logs=self._shown(self.run.logs), may_lose=self.plan.is_elastic)

    @property
    def is_notebook_only(self) -> bool:
        """Return whether the notebook's own container is the only one."""
        return self._needs_no_job and not self._later_jobs

    def is_started(self) -> bool:
        """Return whether every container is running."""
        return self._needs_no_job or (self.job is not None and self.job.state == models.RUNNING)

    def workers(self) -> tuple[models.Worker, ...]:
        """Return the workers that are in use."""
        return tuple(
            worker
            for tracked in [*([self._first_job] if self._first_job else []), *self._active_later_jobs()]
            for worker in tracked.job.workers
            if (self._preemptions, worker.index) not in self._dropped
        )

    def membership(self) -> Membership | None:
        """Return who takes part in a start now; None while that is not decided."""
        if not self._needs_no_job and (self.job is None or not self.job.is_granted) and not self._active_later_jobs():
            return None
        workers = [worker for worker in self.workers() if worker.state != models.EXITED or not self.plan.is_elastic]
        return Membership(
            includes_notebook=self.plan.includes_notebook,
            workers=tuple(worker.index for worker in workers),
            nodes=tuple(worker.node for worker in workers),
            nproc_per_node=self.plan.nproc_per_node,
            preemptions=self._preemptions,
        )

    def drop_workers(self, indexes: Iterable[int]) -> None:
        """Stop using these workers."""
        self._dropped |= {(self._preemptions, index) for index in indexes}
        self._drop_later_jobs(lambda _, tracked: all(self._is_dropped(worker) for worker in tracked.job.workers))

    def refresh(self) -> None:
        """Poll the jobs now, instead of waiting for their next change."""
        for tracked in self._all_jobs():
            tracked.refresh()

    def list_gpu_problems(self, nodes: Collection[str]) -> tuple[str, ...]:
        if self._broker is None:
            return ()
        broker = self._broker
        problems: list[str] = []

        def ask() -> None:
            with contextlib.suppress(BrokerError):
                for lease in broker.list_leases():
                    problems.extend(lease.gpu_problems if set(lease.nodes) & set(nodes) else ())

        # The client waits for a broker that restarts; the failure of the ranks is shown without it.
        thread = threading.Thread(target=ask, name="gpu_launch GPU problems", daemon=True)
        thread.start()
        thread.join(_PROBLEMS_S)
        return tuple(dict.fromkeys(problems))

    def scale_up(self) -> bool:
        """Ask for the missing workers of the plan, if they are free and no one waits; return whether any were granted.

        Raises:
            BrokerError: when the broker refuses or cannot be reached.
        """
        self._drop_later_jobs(lambda _, tracked: tracked.is_over)
        membership, broker = self.membership(), self._broker
        missing = 0 if membership is None else self.plan.nnodes - membership.nnodes
        if broker is None or membership is None or missing <= 0:
            return False
        cluster = broker.get_cluster()
        if cluster.waiting or not free_nodes(self.plan, cluster, membership.nodes):
            return False
        with self._lock:
            if self._stopping.is_set():
                return False
            first = self._next_worker
            job = broker.create_job(
                run_id=run_folder.new_run_id(),
                nnodes=missing,
                min_nnodes=1,
                nproc_per_node=self.plan.nproc_per_node,
                server=self._env.server,
                exclude_nodes=(*self.plan.exclude_nodes, *membership.nodes),
                demand=self.plan.demand,
                name=self._name,
                joins=self.run.run_id,
                first_worker=first,
                cancelled=self._stopping,
            )
            if cluster.has_delayed_grants:
                job = self._wait_for_grant(broker, job)
            if not job.is_granted:
                broker.delete_job(job.id)
                return False
            self._next_worker += missing
            tracked = JobWatcher(broker, job, first_worker=first, on_change=self._on_change)
            self._later_jobs.append((self._preemptions, tracked))
        return True

    def attach(self, job_id: str) -> None:
        """Take over a job that an earlier kernel requested."""
        if self._broker is not None:
            self._first_job = JobWatcher(self._broker, self._broker.get_job(job_id), on_change=self._handle_change)

    def stop(self) -> None:
        """Free everything; return when the broker has confirmed that the GPUs are free. May be called again."""
        self._stopping.set()
        with self._lock:
            local = self._local
            if local is not None and local.poll() is None:
                local.terminate()
            self.run.connection.unlink(missing_ok=True)
            try:
                self._release_jobs()
            finally:
                if local is not None:
                    end_local_worker(local)

    @property
    def _preemptions(self) -> int:
        return self.job.preemptions if self.job is not None else 0

    def _all_jobs(self) -> list[JobWatcher]:
        return [*([self._first_job] if self._first_job else []), *(tracked for _, tracked in self._later_jobs)]

    def _active_later_jobs(self) -> list[JobWatcher]:
        """Return the later jobs that are still granted; a preempted one loses its workers for good."""
        return [
            tracked
            for preemptions, tracked in self._later_jobs
            if preemptions == self._preemptions and tracked.job.is_granted and not tracked.job.preemptions
        ]

    def _handle_change(self) -> None:
        if self._preemptions and self._later_jobs:
            # The workers that joined are gone with those of the first job: the whole launch waits again.
            self._drop_later_jobs(lambda preemptions, _: preemptions != self._preemptions)
        self._on_change()

    def _is_dropped(self, worker: models.Worker) -> bool:
        return worker.state == models.EXITED or (self._preemptions, worker.index) in self._dropped

    def _drop_later_jobs(self, is_over: Callable[[int, JobWatcher], bool]) -> None:
        """End later jobs whose workers are not needed any more."""
        for entry in [entry for entry in self._later_jobs if is_over(*entry)]:
            self._later_jobs.remove(entry)
            _, watcher = entry
            watcher.stop()
            if self._broker is not None:
                self._broker.delete_job(watcher.job.id)

    def _request_workers(self, broker: BrokerClient) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            plan = self.plan
            job = broker.create_job(
                run_id=self.run.run_id,
                nnodes=plan.workers,
                min_nnodes=max(1, plan.least_workers) if plan.is_elastic else None,
                nproc_per_node=plan.nproc_per_node,
                server=self._env.server,
                exclude_nodes=plan.exclude_nodes,
                demand=plan.demand,
                image=self._env.image,
                name=self._name,
                cancelled=self._stopping,
            )
            if job.state == models.WAITING and not plan.least_workers:
                # The notebook's own GPUs are enough for a start, so the launch does not wait for more.
                cluster = broker.get_cluster()
                if cluster.has_delayed_grants and free_nodes(plan, cluster):
                    job = self._wait_for_grant(broker, job)
            if job.state == models.WAITING and not plan.least_workers:
                broker.delete_job(job.id)
                self._needs_no_job = True
                return
            if job.state == models.WAITING and not _can_start(plan, broker.get_cluster()):
                self._holdings = list_holdings(broker, [job], plan.demand, server=self._env.server)
            self._first_job = JobWatcher(broker, job, on_change=self._handle_change)
        self._on_change()

    def _wait_for_grant(self, broker: BrokerClient, job: models.Job) -> models.Job:
        """Return the job as soon as it is granted; as it is when that takes too long, or the launch stops."""
        deadline = time.monotonic() + _GRANT_S
        while job.state == models.WAITING and time.monotonic() < deadline and not self._stopping.is_set():
            job = broker.get_job(job.id, version=job.version, wait_s=1.0)
        return job

    def _release_jobs(self) -> None:
        if self._broker is None:
            return
        if self._first_job is None and not self._needs_no_job:
            # The broker may have accepted the request although its answer did not arrive.
            for job in self._broker.list_jobs():
                if job.run_id == self.run.run_id:
                    release_job(self._broker, job)
        watchers = self._all_jobs()
        for watcher in watchers:
            watcher.stop()
        for watcher in watchers:
            watcher.release()

    def _shown(self, path: Any) -> str:
        return run_folder.shorten_path(path, self._env.home)


def _can_start(plan: LaunchPlan, cluster: models.Cluster) -> bool:
    """Return whether a waiting request may be granted at once, by another scheduler."""
    return cluster.has_delayed_grants and len(free_nodes(plan, cluster)) >= plan.least_workers


def check_job(job: models.Job, *, logs: str, may_lose: bool) -> None:
    """Raise for a job that has ended, and for a lost worker unless the job `may_lose` some."""
    exited = [worker for worker in job.workers if worker.state == models.EXITED]
    if exited and job.is_granted and not may_lose:
        raise LaunchFailed(format_lost_worker(exited[0], logs=logs))
    if job.state in (models.ENDED, models.STOPPING):
        raise LaunchFailed(f"The workers were stopped: {job.reason or 'no reason given'}.")
