"""The driver of a detached job: its first worker runs the launch, as a notebook's kernel does for any other.

`python -m gpu_launch.detached.driver RUN_FOLDER`, started by `worker.main`. It does not ask the broker: its containers
are there, and its manifest is in its folder. On SIGTERM it lets the ranks write their checkpoints; only the broker
knows whether the job was cancelled or starts again in other containers. `StaticWorkerGroup` is its worker group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.holdings import Holding
from gpu_launch.common import job_manifest, network, run_folder
from gpu_launch.common.exchange import ExchangeFiles
from gpu_launch.common.launch_spec import Membership
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.detached.journal import Journal, JournalScreen
from gpu_launch.environment import Environment
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.launch import request as checks
from gpu_launch.launch.launch import Launch
from gpu_launch.launch.plan import LaunchPlan
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest
from gpu_launch.launch.workers.local_worker import end_local_worker, start_local_worker
from gpu_launch.launch.workers.worker_pool import WorkerPool
from gpu_launch.options.command import parse_words
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output import text as render
from gpu_launch.units import format_span

#: Exit codes of a job whose manifest makes no sense, whose ranks have none of their own, and that got SIGTERM.
_USAGE, _FAILED, _TERMINATED = 2, 1, 128 + signal.SIGTERM
#: Maximum time between SIGTERM in the first container and in this one, seconds.
_SIGTERM_S = 10.0
_POLL_S = 0.05  # seconds


def build_options(job: job_manifest.JobManifest, run: RunFolder, nnodes: int) -> LaunchOptions:
    """Return the options of a job on `nnodes` nodes.

    Raises:
        UsageError: for a manifest that makes no sense.
    """
    if job.task is not None:
        # One program a node, `task_main`, which sees all GPUs of its container.
        command = ("-m", "gpu_launch.detached.task_main", str(run.root))
        options = LaunchOptions(no_python=True, script=sys.executable, arguments=command)
    else:
        options = parse_words(list(job.words), cell=job.cell is not None)
    return replace(options, nnodes=nnodes, detach=True, keep_s=0, timeout_s=None, send=(), returns=())


def build_plan(options: LaunchOptions, workers: Sequence[models.Worker]) -> LaunchPlan:
    """Return the plan for these workers; the container of worker 0 is the driver's own."""
    least = options.least_nnodes
    return LaunchPlan(
        nnodes=len(workers),
        least_nnodes=len(workers) if least is None else min(least, len(workers)),
        nproc_per_node=options.nproc_per_node,
        includes_notebook=True,
        notebook_gpus=workers[0].gpus,
        exclude_nodes=(),
        demand=GpuRequest(),
    )


def find_exchange(run: RunFolder) -> ExchangeFiles | None:
    """Return the notebook's files for the ranks; None for none."""
    if not run.exchange.is_dir():
        return None
    return ExchangeFiles(files={path.name: path.read_bytes() for path in run.exchange.iterdir() if path.is_file()})


def main() -> None:
    """Run the job, and end with its exit code."""
    env = environment.read()
    code = Driver(RunFolder(root=Path(sys.argv[1]), earlier_starts=env.earlier_starts), env).run()
    sys.stderr.flush()
    # All files are written; a thread of a library must not keep the container alive.
    os._exit(code)


class Driver:
    """One start of a detached job."""

    def __init__(self, run: RunFolder, env: Environment) -> None:
        self._run, self._env = run, env
        self._began = time.monotonic()
        self._journal = Journal(run)
        #: Set in a signal handler, which must not take a lock.
        self._is_stopping = False
        self._group: StaticWorkerGroup | None = None
        self._launch: Launch | None = None

    def run(self) -> int:
        """Run the job; return its exit code."""
        signal.signal(signal.SIGTERM, self._handle_sigterm)
        try:
            self._work()
        except GpuLaunchError as error:
            return self._fail(error)
        except Exception as error:  # noqa: BLE001 - the job's outermost edge: its output must say why it ends
            traceback.print_exc()
            return self._fail(GpuLaunchError(f"{type(error).__name__}: {error}"))
        # After SIGTERM ranks may end well, with a checkpoint, and the job may still start again.
        if self._is_stopping:
            return self._close("cancelled", _TERMINATED)
        return self._close("done" if self._env.sleeps is None else job_manifest.ASLEEP, 0)

    def _work(self) -> None:
        earlier = self._journal.open()
        self._journal.update(
            state="starting",
            attempt=0 if earlier is None else earlier.attempt + 1,
            started_at=time.time() if earlier is None else earlier.started_at,
            ended_at=None,
            exit_code=None,
            error="",
            text="starting",
        )
        launch = self._launch = self._build()
        launch.ranks.attempt = self._journal.state.attempt
        outcome = "failed"
        try:
            launch.begin()
            while launch.step():
                pass
            outcome = "done"
        finally:
            launch.end(outcome)

    def _build(self) -> Launch:
        """Return the launch, after all checks."""
        job = job_manifest.parse_manifest(self._run.manifest.read_text())
        workers = parse_workers(self._env.worker_list)
        self._write_line(f"{job.name} {self._describe_start()} on {render.format_nodes(workers, '')}")
        options = build_options(job, self._run, len(workers))
        cwd = self._env.home / job.folder
        if not cwd.is_dir():
            raise UsageError(f"The job's folder {cwd} does not exist.")
        script = options.script
        if job.task is None and job.cell is None:
            script = checks.check_command(options, cwd=cwd, home=self._env.home, shared=False)
        request = LaunchRequest(options=options, cell=job.cell, cwd=cwd, env=self._env, environ=job.environ)
        validated = ValidatedRequest(
            request=request, plan=build_plan(options, workers), script=script, is_task=job.task is not None
        )
        self._group = StaticWorkerGroup(validated.plan, self._run, others=workers[1:], env=self._env)
        if self._is_stopping:
            self._group.mark_leaving()
        pool = WorkerPool(
            self._group,
            address=network.find_own_interface(self._env.subnet).address,
            notebook_text=validated.notebook_text,
        )
        screen = JournalScreen(self._journal, self._observe)
        exchange = find_exchange(self._run)
        return Launch(validated, pool=pool, run=self._run, screen=screen, exchange=exchange, is_logged=True)

    def _describe_start(self) -> str:
        attempt, preemptions = self._journal.state.attempt, self._env.preemptions
        if not attempt:
            return "starts"
        if self._env.retries:
            return f"starts again, attempt {self._env.retries + 1} of {self._env.max_retries + 1},"
        if self._env.sleeps:
            return "wakes"
        return f"starts again, preempted {render.format_times(preemptions)}," if preemptions else "starts again"

    def _observe(self) -> dict[str, Any]:
        """Return the part of the status that the ranks show."""
        if self._launch is None:
            return {}
        ranks = self._launch.ranks
        return {"state": "running" if ranks.all_started() else "starting", "attempt": ranks.attempt}

    def _handle_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._group is not None:
            self._group.mark_leaving()

    def _fail(self, error: GpuLaunchError) -> int:
        ranks = self._launch.ranks if self._launch is not None else None
        first = ranks.find_first_failure() if ranks is not None else None
        was_ended = first is not None and first.exit_code in (-signal.SIGTERM, _TERMINATED)
        if was_ended or (ranks is not None and ranks.terminating_nodes()):
            # All containers get SIGTERM, but not at the same moment.
            deadline = time.monotonic() + _SIGTERM_S
            while not self._is_stopping and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if self._is_stopping:
            return self._close("cancelled", _TERMINATED)
        code = _USAGE if isinstance(error, UsageError) else _FAILED
        if first is not None and first.exit_code:
            code = first.exit_code if first.exit_code > 0 else 128 - first.exit_code
        if self._env.retries < self._env.max_retries:
            # Not its last state: readers wait for the next start, which needs the secrets in the manifest.
            return self._close("cancelled", code, str(error))
        return self._close("failed", code, str(error))

    def _close(self, state: str, code: int, error: str = "") -> int:
        """Write the last line and the status; return the exit code."""
        span = format_span(time.monotonic() - self._began)
        text = {
            "done": f"done in {span}",
            "cancelled": f"ended by SIGTERM after {span}",
            job_manifest.ASLEEP: f"asleep after {span}: it starts again at the next request to its port",
        }.get(state, f"failed with exit code {code} after {span}")
        if state == "cancelled" and not self._is_stopping:
            text = f"failed with exit code {code} after {span}; it is started again"
        reason = f"{error.rstrip()}\n" if error else ""
        if state in job_manifest.FINAL_STATES:
            reason += self._remove_secrets()
        self._journal.close(
            f"{reason}gpu_launch: {text}\n", state=state, ended_at=time.time(), exit_code=code, error=error, text=text
        )
        return code

    def _remove_secrets(self) -> str:
        """Remove the values of secrets from the manifest: the job never starts again. Return a line if that fails."""
        try:
            manifest = job_manifest.parse_manifest(self._run.manifest.read_text())
            if manifest.secret_names:
                text = job_manifest.dump_json(job_manifest.remove_secrets(manifest))
                run_folder.write_private(self._run.manifest, text.encode())
        except UsageError:
            return ""  # the job has failed because of it
        except OSError as failure:
            return f"gpu_launch: the secrets in {self._run.manifest} could not be removed: {failure.strerror}\n"
        return ""

    def _write_line(self, text: str) -> None:
        self._journal.write(f"gpu_launch: {text}\n")


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
    """The containers of a job as its worker 0 knows them: all are there. The broker is not asked."""

    def __init__(
        self,
        plan: LaunchPlan,
        run: RunFolder,
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
    def run(self) -> RunFolder:
        """The folder by which workers find their controller."""
        return self._run

    @property
    def job(self) -> models.Job:
        """The job as far as its own container knows it."""
        return self._job

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """Return nothing: all containers are there."""
        return ()

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

    def list_gpu_problems(self, nodes: Collection[str]) -> tuple[str, ...]:
        # A worker has no token for the broker.
        return ()

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


if __name__ == "__main__":
    main()
