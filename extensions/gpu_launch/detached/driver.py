"""The driver of a detached job: its first worker runs the launch, as a notebook's kernel does for any other.

`python -m gpu_launch.detached.driver RUN_FOLDER`, started by `worker.main`. It does not ask the broker: its containers
are there, and its manifest is in its folder. On SIGTERM it lets the ranks write their checkpoints; only the broker
knows whether the job was cancelled or starts again in other containers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.launch_plan import LaunchPlan
from gpu_launch.common import job_manifest, network
from gpu_launch.common.exchange import ExchangeFiles
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.detached.journal import Journal, JournalScreen
from gpu_launch.environment import Environment
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.launch import request as checks
from gpu_launch.launch.launch import Launch
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest
from gpu_launch.launch.static_worker_group import StaticWorkerGroup, parse_workers
from gpu_launch.launch.worker_pool import WorkerPool
from gpu_launch.options.command import parse_words
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output import text as render
from gpu_launch.units import format_span


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


#: Exit codes of a job whose manifest makes no sense, whose ranks have none of their own, and that got SIGTERM.
_USAGE, _FAILED, _TERMINATED = 2, 1, 128 + signal.SIGTERM
#: Most seconds between SIGTERM in the first container and in this one.
_SIGTERM_S = 10.0
_POLL_S = 0.05  # seconds


def main() -> None:
    """Run the job, and end with its exit code."""
    env = environment.read()
    code = Driver(RunFolder(root=Path(sys.argv[1]), preemptions=env.preemptions), env).run()
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
        return self._close("cancelled", _TERMINATED) if self._is_stopping else self._close("done", 0)

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
        workers = parse_workers(self._env.roster)
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
        return Launch(validated, pool=pool, run=self._run, screen=screen, exchange=find_exchange(self._run))

    def _describe_start(self) -> str:
        attempt, preemptions = self._journal.state.attempt, self._env.preemptions
        if not attempt:
            return "starts"
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
        return self._close("failed", code, str(error))

    def _close(self, state: str, code: int, error: str = "") -> int:
        """Write the last line and the status; return the exit code."""
        span = format_span(time.monotonic() - self._began)
        text = {"done": f"done in {span}", "cancelled": f"ended by SIGTERM after {span}"}.get(
            state, f"failed with exit code {code} after {span}"
        )
        reason = f"{error.rstrip()}\n" if error else ""
        self._journal.close(
            f"{reason}gpu_launch: {text}\n", state=state, ended_at=time.time(), exit_code=code, error=error, text=text
        )
        return code

    def _write_line(self, text: str) -> None:
        self._journal.write(f"gpu_launch: {text}\n")


if __name__ == "__main__":
    main()
