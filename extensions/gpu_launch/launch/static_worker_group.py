"""The containers of a detached job as its worker 0 knows them: all are there, and the broker is not asked."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.launch_plan import LaunchPlan
from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import Membership
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.launch.worker_group import end_local_worker, start_local_worker


def parse_workers(text: str) -> tuple[models.Worker, ...]:
    """Return the workers in GPU_LAUNCH_ROSTER, by index.

    Raises:
        UsageError: for anything else.
    """
    try:
        workers = tuple(
            sorted((models.parse_worker(item) for item in json.loads(text)), key=lambda worker: worker.index)
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"GPU_LAUNCH_ROSTER is not a list of workers ({type(error).__name__}: {error}).") from None
    if not workers or workers[0].index != 0:
        raise UsageError("GPU_LAUNCH_ROSTER does not name worker 0.")
    return workers


class StaticWorkerGroup:
    """The container of worker 0, and those of the other workers; a `WorkerGroup`."""

    def __init__(
        self,
        plan: LaunchPlan,
        run: run_folder.RunFolder,
        *,
        others: tuple[models.Worker, ...],
        env: environment.Environment,
    ) -> None:
        self._plan, self._run, self._env = plan, run, env
        self._lock = threading.Lock()
        self._dropped: frozenset[int] = frozenset()
        self._stopping = threading.Event()
        self._local: subprocess.Popen[bytes] | None = None
        self._job = models.Job(
            id=run.run_id,
            run_id=run.run_id,
            state=models.RUNNING,
            version=1,
            position=None,
            waiting_for=None,
            workers=others,
            reason=None,
            renew_within_s=float("inf"),
            preemptions=env.preemptions,
            detached=True,
        )

    @property
    def plan(self) -> LaunchPlan:
        """The granted plan."""
        return self._plan

    @property
    def run(self) -> run_folder.RunFolder:
        """The folder by which workers find their controller."""
        return self._run

    @property
    def job(self) -> models.Job:
        """The job as far as its own container knows it."""
        return self._job

    @property
    def is_notebook_only(self) -> bool:
        """Return whether worker 0 is the only one."""
        return not self._plan.workers

    def start(self, *, settings: dict[str, Any]) -> None:
        """Start this container's own engine. The others got their settings before the job was requested."""
        del settings
        with self._lock:
            if not self._stopping.is_set():
                self._local = start_local_worker(self._run)

    def publish_connection(self, connection: dict[str, Any]) -> None:
        """Publish the connection to the controller for the engines."""
        run_folder.write_secret_json(self._run.connection, connection)
        if self._stopping.is_set():
            self._run.connection.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise when this container's own engine has ended. The silence of ranks shows the end of the others."""
        if self._stopping.is_set():
            return
        if self._local is not None and (code := self._local.poll()) is not None:
            raise GpuLaunchError(
                f"The worker in {self._env.node}'s container ended ({code}). "
                f"Its log: {run_folder.shorten_path(self._run.log_file('notebook'), self._env.home)}"
            )

    def is_started(self) -> bool:
        """Return True: the driver starts when all containers are running."""
        return True

    def workers(self) -> tuple[models.Worker, ...]:
        """Return the other workers that are in use."""
        return tuple(worker for worker in self._job.workers if worker.index not in self._dropped)

    def membership(self) -> Membership:
        """Return who takes part in a start now."""
        workers = self.workers()
        return Membership(
            includes_notebook=True,
            workers=tuple(worker.index for worker in workers),
            nodes=tuple(worker.node for worker in workers),
            nproc_per_node=self._plan.nproc_per_node,
            preemptions=self._job.preemptions,
        )

    def drop_workers(self, indexes: Iterable[int]) -> None:
        """Stop using these workers."""
        self._dropped |= frozenset(indexes)

    def refresh(self) -> None:
        """Do nothing: the job is not polled."""

    def mark_leaving(self) -> None:
        """Note that this container, and so all of them, got SIGTERM: no ranks start again. Safe in a signal handler."""
        # The broker sets the limit, by killing the containers.
        until = datetime.now(UTC) + timedelta(hours=23)
        self._job = replace(self._job, state=models.LEAVING, checkpoint_until=until)

    def stop(self) -> None:
        """End this container's engine. The others end without their controller, or with the job."""
        self._stopping.set()
        with self._lock:
            self._run.connection.unlink(missing_ok=True)
            if self._local is not None:
                self._local.terminate()
                end_local_worker(self._local)
