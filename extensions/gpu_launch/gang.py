"""The containers of one run: the notebook's own worker, and the broker's jobs.

Knows nothing of ipyparallel; safe to use from several threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpu_launch import environment, runs, wire
from gpu_launch.broker import Broker
from gpu_launch.errors import LaunchFailed
from gpu_launch.plan import Plan, free_nodes
from gpu_launch.roster import Roster
from gpu_launch.tracked import TrackedJob, free
from gpu_launch.way import lost_text

_LOCAL_S = 5.0  # seconds for the own worker to end
#: What is free is granted within this time, where the broker asks another scheduler for it.
_GRANT_S = 15.0


class Gang:
    """Starts what a plan says and frees it again."""

    def __init__(
        self,
        plan: Plan,
        run: runs.RunFolder,
        *,
        env: environment.Environment,
        broker: Broker | None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._run = plan, run
        self._env, self._broker, self._on_change = env, broker, on_change
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._main: TrackedJob | None = None
        #: Jobs of workers that came later, and how often the first one had been preempted then.
        self._joined: list[tuple[int, TrackedJob]] = []
        self._next_worker = plan.workers
        #: Workers that are no longer counted on, by how often the job had been preempted, and index.
        self._without: set[tuple[int, int]] = set()
        #: Nobody is asked: nothing is needed, or nothing was free and the notebook's own GPUs are enough.
        self._asks_nobody = not plan.workers
        self._local: subprocess.Popen[bytes] | None = None

    @property
    def plan(self) -> Plan:
        """What was asked for."""
        return self._plan

    @property
    def run(self) -> runs.RunFolder:
        """The folder by which workers find their controller."""
        return self._run

    def begin(self, *, settings: dict[str, Any]) -> None:
        """Start the own worker and ask for the others; returns when the broker has taken the request.

        `settings` is what engines are started with, see `engine_process`.
        """
        with self._lock:
            if self._stopping.is_set():
                return
            runs.write_secret(self.run.settings, settings)
            if self.plan.own:
                self._local = start_local(self.run)
        if not self._asks_nobody and self._broker is not None:
            self._ask(self._broker)

    def publish(self, connection: dict[str, Any]) -> None:
        """Give engines the way to the controller."""
        runs.write_secret(self.run.connection, connection)
        if self._stopping.is_set():
            self.run.connection.unlink(missing_ok=True)

    @property
    def job(self) -> wire.Job | None:
        """The broker's job as last seen; None while there is none."""
        return self._main.job if self._main else None

    @property
    def jobs(self) -> tuple[str, ...]:
        """Ids of the broker's jobs."""
        return tuple(tracked.job.id for tracked in self._tracked())

    def check(self) -> None:
        """Raise what went wrong: a worker that ended, a job that was ended for us."""
        if self._stopping.is_set():
            return
        # What became of jobs that came later is seen from their workers alone: the launch goes on without them.
        if self._main is not None and self._main.error is not None:
            raise self._main.error
        if self._local is not None and (code := self._local.poll()) is not None:
            raise LaunchFailed(
                f"The worker in this container ended ({code}). Its log: {self._shown(self.run.log('notebook'))}"
            )
        if self.job is not None:
            check_job(self.job, logs=self._shown(self.run.logs), may_lose=self.plan.is_elastic)

    @property
    def is_alone(self) -> bool:
        """Whether the notebook's own container is all there is."""
        return self._asks_nobody and not self._joined

    def is_started(self) -> bool:
        """Whether every container runs."""
        return self._asks_nobody or (self.job is not None and self.job.state == wire.RUNNING)

    def workers(self) -> tuple[wire.Worker, ...]:
        """The workers that are counted on."""
        return tuple(
            worker
            for tracked in [*([self._main] if self._main else []), *self._current()]
            for worker in tracked.job.workers
            if (self._preemptions, worker.index) not in self._without
        )

    def roster(self) -> Roster | None:
        """Who takes part in a start made now; None while that is not decided."""
        if not self._asks_nobody and (self.job is None or not self.job.is_granted) and not self._current():
            return None
        workers = [worker for worker in self.workers() if worker.state != wire.EXITED or not self.plan.is_elastic]
        return Roster(
            own=self.plan.own,
            workers=tuple(worker.index for worker in workers),
            nodes=tuple(worker.node for worker in workers),
            nproc_per_node=self.plan.nproc_per_node,
            preemptions=self._preemptions,
        )

    def go_without(self, indexes: Iterable[int]) -> None:
        """Count no longer on these workers."""
        self._without |= {(self._preemptions, index) for index in indexes}
        self._drop_joined(lambda _, tracked: all(self._is_dropped(worker) for worker in tracked.job.workers))

    def look(self) -> None:
        """Ask the broker how the jobs are now, rather than wait for their news."""
        for tracked in self._tracked():
            tracked.look()

    def grow(self) -> bool:
        """Ask for the workers that the plan lacks, as far as they are free and nobody waits; whether any came.

        Raises BrokerError.
        """
        self._drop_joined(lambda _, tracked: tracked.is_over)
        roster, broker = self.roster(), self._broker
        missing = 0 if roster is None else self.plan.nnodes - roster.nnodes
        if broker is None or roster is None or missing <= 0:
            return False
        cluster = broker.cluster()
        if cluster.waiting or not free_nodes(self.plan, cluster, roster.nodes):
            return False
        with self._lock:
            if self._stopping.is_set():
                return False
            first = self._next_worker
            job = broker.create_job(
                run_id=runs.new_id(),
                nnodes=missing,
                min_nnodes=1,
                nproc_per_node=self.plan.nproc_per_node,
                server=self._env.server,
                exclude_nodes=(*self.plan.exclude_nodes, *roster.nodes),
                demand=self.plan.demand,
                joins=self.run.run_id,
                first_worker=first,
                given_up=self._stopping,
            )
            if cluster.grants_later:
                job = self._wait_for_grant(broker, job)
            if not job.is_granted:
                broker.delete_job(job.id)
                return False
            self._next_worker += missing
            tracked = TrackedJob(broker, job, first_worker=first, on_change=self._on_change)
            self._joined.append((self._preemptions, tracked))
        return True

    def attach(self, job_id: str) -> None:
        """Take over a job that is there already, after the kernel that asked for it."""
        if self._broker is not None:
            self._main = TrackedJob(self._broker, self._broker.job(job_id), on_change=self._changed)

    def stop(self) -> None:
        """Free everything; returns when the broker has said that the GPUs are free. May be called again."""
        self._stopping.set()
        with self._lock:
            local = self._local
            if local is not None and local.poll() is None:
                local.terminate()
            self.run.connection.unlink(missing_ok=True)
            try:
                self._free()
            finally:
                if local is not None:
                    end_local(local)

    @property
    def _preemptions(self) -> int:
        return self.job.preemptions if self.job is not None else 0

    def _tracked(self) -> list[TrackedJob]:
        return [*([self._main] if self._main else []), *(tracked for _, tracked in self._joined)]

    def _current(self) -> list[TrackedJob]:
        """The jobs that came later and are still there; one that is preempted gives up its workers for good."""
        return [
            tracked
            for preemptions, tracked in self._joined
            if preemptions == self._preemptions and tracked.job.is_granted and not tracked.job.preemptions
        ]

    def _changed(self) -> None:
        if self._preemptions and self._joined:
            # With the first job's workers those that joined them are gone too: the whole launch waits again.
            self._drop_joined(lambda preemptions, _: preemptions != self._preemptions)
        self._on_change()

    def _is_dropped(self, worker: wire.Worker) -> bool:
        return worker.state == wire.EXITED or (self._preemptions, worker.index) in self._without

    def _drop_joined(self, is_over: Callable[[int, TrackedJob], bool]) -> None:
        """End jobs that came later and of which nothing is needed."""
        for one in [one for one in self._joined if is_over(*one)]:
            self._joined.remove(one)
            one[1].stop()
            if self._broker is not None:
                self._broker.delete_job(one[1].job.id)

    def _ask(self, broker: Broker) -> None:
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
                given_up=self._stopping,
            )
            if job.state == wire.WAITING and not plan.least_workers:
                # The notebook's own GPUs are enough to begin with: nobody waits for more.
                cluster = broker.cluster()
                if cluster.grants_later and free_nodes(plan, cluster):
                    job = self._wait_for_grant(broker, job)
            if job.state == wire.WAITING and not plan.least_workers:
                broker.delete_job(job.id)
                self._asks_nobody = True
                return
            self._main = TrackedJob(broker, job, on_change=self._changed)
        self._on_change()

    def _wait_for_grant(self, broker: Broker, job: wire.Job) -> wire.Job:
        """The job as soon as it is granted; as it is when that takes too long, or nobody wants it any more."""
        deadline = time.monotonic() + _GRANT_S
        while job.state == wire.WAITING and time.monotonic() < deadline and not self._stopping.is_set():
            job = broker.job(job.id, version=job.version, wait_s=1.0)
        return job

    def _free(self) -> None:
        if self._broker is None:
            return
        if self._main is None and not self._asks_nobody:
            # The request may have been taken without our seeing the answer.
            for job in self._broker.jobs():
                if job.run_id == self.run.run_id:
                    free(self._broker, job)
        tracked = self._tracked()
        for one in tracked:
            one.stop()
        for one in tracked:
            one.free()

    def _shown(self, path: Any) -> str:
        return runs.shown(path, self._env.home)


def check_job(job: wire.Job, *, logs: str, may_lose: bool) -> None:
    """Raise for a job that has ended by itself or, unless it `may_lose` some, lost a worker that was to stay."""
    exited = [worker for worker in job.workers if worker.state == wire.EXITED]
    if exited and job.is_granted and not may_lose:
        raise LaunchFailed(lost_text(exited[0], logs=logs))
    if job.state in (wire.ENDED, wire.STOPPING):
        raise LaunchFailed(f"The workers were stopped: {job.reason or 'no reason given'}.")


def start_local(run: runs.RunFolder) -> subprocess.Popen[bytes]:
    """The worker in this process's own container."""
    environ = environment.without_secrets(os.environ) | {"GPU_LAUNCH_RUN": run.run_id}
    environ.pop("GPU_LAUNCH_WORKER", None)
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_launch.worker"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_local(process: subprocess.Popen[bytes]) -> None:
    """Wait for it to end after its SIGTERM, and kill it when that takes too long."""
    try:
        process.wait(_LOCAL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def load_connection(path: Any) -> dict[str, Any] | None:
    """A controller's connection file; None while it is absent or being written."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return data
