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
from collections.abc import Callable
from typing import Any

from gpu_launch import environment, runs, wire
from gpu_launch.broker import Broker
from gpu_launch.errors import BrokerError, GpuLaunchError
from gpu_launch.plan import Plan

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
        self._local: subprocess.Popen[bytes] | None = None
        self._error: GpuLaunchError | None = None

    def begin(self, *, settings: dict[str, Any]) -> None:
        """Start the own worker and ask for the others; returns when the broker has taken the request.

        `settings` is what engines are started with, see `engine_process`.
        """
        runs.write_secret(self.run.settings, settings)
        if self.plan.own:
            self._start_local()
        if self.plan.workers and self._broker is not None:
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
            check_job(self._job, logs=self._shown(self.run.logs))

    def is_started(self) -> bool:
        """Whether every container runs."""
        if not self.plan.workers:
            return True
        return self._job is not None and self._job.state == wire.RUNNING

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
                if self._broker is not None and self.plan.workers:
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
            job = broker.create_job(
                run_id=self.run.run_id,
                nnodes=self.plan.workers,
                nproc_per_node=self.plan.nproc_per_node,
                server=self._env.server,
                exclude_nodes=self.plan.exclude_nodes,
                model=self.plan.model,
                given_up=self._stopping,
            )
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


def check_job(job: wire.Job, *, logs: str) -> None:
    """Raise for a job that has ended by itself, or lost a worker."""
    for worker in job.workers:
        if worker.state == wire.EXITED:
            code = "no reason given" if worker.exit_code is None else f"exit code {worker.exit_code}"
            why = worker.message or code
            raise GpuLaunchError(f"The worker on {worker.node} ended: {why}. Logs: {logs}")
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
