"""The containers of a detached job as worker 0 sees them: all are there, and nobody can be asked about them."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gpu_launch import environment, runs, wire
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.gang import end_local, start_local
from gpu_launch.plan import Plan
from gpu_launch.roster import Roster


def parse_roster(text: str) -> tuple[wire.Worker, ...]:
    """GPU_LAUNCH_ROSTER, by index. UsageError for anything else."""
    try:
        workers = tuple(sorted((wire.parse_worker(one) for one in json.loads(text)), key=lambda worker: worker.index))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"GPU_LAUNCH_ROSTER is no list of workers ({type(error).__name__}: {error}).") from None
    if not workers or workers[0].index != 0:
        raise UsageError("GPU_LAUNCH_ROSTER does not name worker 0.")
    return workers


class GivenGang:
    """Worker 0's own container, and those of the other workers. Implements `containers.Containers`."""

    def __init__(
        self, plan: Plan, run: runs.RunFolder, *, others: tuple[wire.Worker, ...], env: environment.Environment
    ) -> None:
        self._plan, self._run, self._env = plan, run, env
        self._lock = threading.Lock()
        self._without: frozenset[int] = frozenset()
        self._stopping = threading.Event()
        self._local: subprocess.Popen[bytes] | None = None
        self._job = wire.Job(
            id=run.run_id,
            run_id=run.run_id,
            state=wire.RUNNING,
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
    def plan(self) -> Plan:
        """What was granted."""
        return self._plan

    @property
    def run(self) -> runs.RunFolder:
        """The folder by which workers find their controller."""
        return self._run

    @property
    def job(self) -> wire.Job:
        """The job as far as it can be known from inside."""
        return self._job

    @property
    def is_alone(self) -> bool:
        """Whether worker 0 is all there is."""
        return not self._plan.workers

    def begin(self, *, settings: dict[str, Any]) -> None:
        """Start this container's own engine. The others have their settings since before the job was asked for."""
        del settings
        with self._lock:
            if not self._stopping.is_set():
                self._local = start_local(self._run)

    def publish(self, connection: dict[str, Any]) -> None:
        """Give engines the way to the controller."""
        runs.write_secret(self._run.connection, connection)
        if self._stopping.is_set():
            self._run.connection.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise when this container's own engine ended. Of the others the ranks' silence tells."""
        if self._stopping.is_set():
            return
        if self._local is not None and (code := self._local.poll()) is not None:
            raise GpuLaunchError(
                f"The worker in {self._env.node}'s container ended ({code}). "
                f"Its log: {runs.shown(self._run.log('notebook'), self._env.home)}"
            )

    def is_started(self) -> bool:
        """Always: the driver begins when all containers run."""
        return True

    def workers(self) -> tuple[wire.Worker, ...]:
        """The other workers that are counted on."""
        return tuple(worker for worker in self._job.workers if worker.index not in self._without)

    def roster(self) -> Roster:
        """Who takes part in a start made now."""
        workers = self.workers()
        return Roster(
            own=True,
            workers=tuple(worker.index for worker in workers),
            nodes=tuple(worker.node for worker in workers),
            nproc_per_node=self._plan.nproc_per_node,
            preemptions=self._job.preemptions,
        )

    def go_without(self, indexes: Iterable[int]) -> None:
        """Count no longer on these workers."""
        self._without |= frozenset(indexes)

    def look(self) -> None:
        """Nobody can be asked."""

    def leave(self) -> None:
        """This container was told to end, so all of them: no ranks are started again. Safe in a signal's handler."""
        # Whoever sent SIGTERM sets the limit, by killing the containers.
        until = datetime.now(UTC) + timedelta(hours=23)
        self._job = replace(self._job, state=wire.LEAVING, checkpoint_until=until)

    def stop(self) -> None:
        """End this container's engine. The others end without their controller, or with the job."""
        self._stopping.set()
        with self._lock:
            self._run.connection.unlink(missing_ok=True)
            if self._local is not None:
                self._local.terminate()
                end_local(self._local)
