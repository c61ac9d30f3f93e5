"""The containers of one run: the notebook's own worker, and the broker's job with its renewal.

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
from gpu_launch.errors import BrokerError, GpuLaunchError
from gpu_launch.plan import Plan
from gpu_launch.roster import Roster
from gpu_launch.way import lost_text

#: Renewals within the time a job lives without one.
_RENEWALS = 4
_FREED_S = 60.0  # seconds to wait for the broker's proof that the GPUs are free
_LOCAL_S = 5.0  # seconds for the own worker to end


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
        self.plan, self.run = plan, run
        self._env, self._broker, self._on_change = env, broker, on_change
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._job: wire.Job | None = None
        #: Workers that are no longer counted on, by how often the job had been preempted, and index.
        self._without: set[tuple[int, int]] = set()
        #: Nobody is asked: nothing is needed, or nothing was free and the notebook's own GPUs are enough.
        self._is_alone = not plan.workers
        self._local: subprocess.Popen[bytes] | None = None
        self._error: GpuLaunchError | None = None

    def begin(self, *, settings: dict[str, Any]) -> None:
        """Start the own worker and ask for the others; returns when the broker has taken the request.

        `settings` is what engines are started with, see `engine_process`.
        """
        runs.write_secret(self.run.settings, settings)
        if self.plan.own:
            self._start_local()
        if not self._is_alone and self._broker is not None:
            self._ask(self._broker)

    def publish(self, connection: dict[str, Any]) -> None:
        """Give engines the way to the controller."""
        runs.write_secret(self.run.connection, connection)
        if self._stopping.is_set():
            self.run.connection.unlink(missing_ok=True)

    @property
    def job(self) -> wire.Job | None:
        """The broker's job as last seen; None while there is none."""
        return self._job

    def check(self) -> None:
        """Raise what went wrong: a worker that ended, a job that was ended for us."""
        if self._error is not None:
            raise self._error
        if self._stopping.is_set():
            return
        if self._local is not None and (code := self._local.poll()) is not None:
            raise GpuLaunchError(
                f"The worker in this container ended ({code}). Its log: {self._shown(self.run.log('notebook'))}"
            )
        if self._job is not None:
            check_job(self._job, logs=self._shown(self.run.logs), may_lose=self.plan.is_elastic)

    @property
    def is_alone(self) -> bool:
        """Whether the notebook's own container is all there is."""
        return self._is_alone

    def is_started(self) -> bool:
        """Whether every container runs."""
        if self._is_alone:
            return True
        return self._job is not None and self._job.state == wire.RUNNING

    def workers(self) -> tuple[wire.Worker, ...]:
        """The workers that are counted on."""
        return () if self._job is None else self._counted(self._job)

    def roster(self) -> Roster | None:
        """Who takes part in a start made now; None while that is not decided."""
        job = self._job
        if self._is_alone:
            return Roster(own=True, workers=(), nodes=(), nproc_per_node=self.plan.nproc_per_node)
        if job is None or not job.is_granted:
            return None
        workers = self._counted(job)
        return Roster(
            own=self.plan.own,
            workers=tuple(worker.index for worker in workers),
            nodes=tuple(worker.node for worker in workers),
            nproc_per_node=self.plan.nproc_per_node,
            preemptions=job.preemptions,
        )

    def _counted(self, job: wire.Job) -> tuple[wire.Worker, ...]:
        return tuple(worker for worker in job.workers if (job.preemptions, worker.index) not in self._without)

    def go_without(self, indexes: Iterable[int]) -> None:
        """Count no longer on these workers."""
        if self._job is not None:
            self._without |= {(self._job.preemptions, index) for index in indexes}

    def look(self) -> None:
        """Ask the broker how the job is now, rather than wait for its news."""
        if self._job is not None and self._broker is not None and not self._stopping.is_set():
            self._set(self._broker.job(self._job.id))

    def attach(self, job_id: str) -> None:
        """Take over a job that is there already, after the kernel that asked for it."""
        if self._broker is not None:
            self._watch(self._broker, self._broker.job(job_id))

    def stop(self) -> None:
        """Free everything; returns when the broker has said that the GPUs are free. May be called again."""
        self._stopping.set()
        with self._lock:
            local = self._local
            if local is not None and local.poll() is None:
                local.terminate()
            self.run.connection.unlink(missing_ok=True)
            try:
                if self._broker is not None and not self._is_alone:
                    self._free(self._broker)
            finally:
                if local is not None:
                    _reap(local)

    def _start_local(self) -> None:
        environ = environment.without_secrets(os.environ) | {"GPU_LAUNCH_RUN": self.run.run_id}
        environ.pop("GPU_LAUNCH_WORKER", None)
        self._local = subprocess.Popen(
            [sys.executable, "-m", "gpu_launch.worker"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

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
                broker.delete_job(job.id)
                self._is_alone = True
                return
        self._watch(broker, job)

    def _watch(self, broker: Broker, job: wire.Job) -> None:
        self._set(job)
        for target in (self._follow, self._renew):
            threading.Thread(target=target, args=(broker, job), name="gpu_launch job", daemon=True).start()

    def _set(self, job: wire.Job) -> None:
        self._job = job
        self._on_change()

    def _follow(self, broker: Broker, job: wire.Job) -> None:
        """Keep `job` as the broker has it."""
        while not self._stopping.is_set() and job.state != wire.ENDED:
            try:
                job = broker.job(job.id, version=job.version)
            except BrokerError as error:
                self._fail(error)
                return
            if not self._stopping.is_set():
                self._set(job)

    def _renew(self, broker: Broker, job: wire.Job) -> None:
        """Say that the kernel lives, until it does not."""
        while not self._stopping.wait(job.renew_within_s / _RENEWALS):
            try:
                broker.renew(job.id)
            except BrokerError as error:
                self._fail(error)
                return

    def _fail(self, error: GpuLaunchError) -> None:
        if not self._stopping.is_set():
            self._error = error
            self._on_change()

    def _free(self, broker: Broker) -> None:
        # The request may have been taken without our seeing the answer.
        job = self._job or next((job for job in broker.jobs() if job.run_id == self.run.run_id), None)
        if job is None:
            return
        job = broker.delete_job(job.id)
        deadline = time.monotonic() + _FREED_S
        while job.state != wire.ENDED:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"The GPUs of {self.run.run_id} are not free after {_FREED_S:.0f} s; the broker goes on trying."
                )
            job = broker.job(job.id, version=job.version, wait_s=5.0)
        self._job = job

    def _shown(self, path: Any) -> str:
        return runs.shown(path, self._env.home)


def check_job(job: wire.Job, *, logs: str, may_lose: bool) -> None:
    """Raise for a job that has ended by itself or, unless it `may_lose` some, lost a worker that was to stay."""
    exited = [worker for worker in job.workers if worker.state == wire.EXITED]
    if exited and job.is_granted and not may_lose:
        raise GpuLaunchError(lost_text(exited[0], logs=logs))
    if job.state in (wire.ENDED, wire.STOPPING):
        raise GpuLaunchError(f"The workers were stopped: {job.reason or 'no reason given'}.")


def _reap(process: subprocess.Popen[bytes]) -> None:
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
