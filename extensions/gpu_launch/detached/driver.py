"""What a detached job's first worker runs: it leads the launch, as a notebook's kernel does for any other.

`python -m gpu_launch.detached.driver RUN_FOLDER`, started by `worker`. It asks nobody: its containers are there, its
order is in its folder. Told to end (SIGTERM), it lets the ranks write their checkpoints; whether the job was cancelled
or begins again in other containers is the broker's to know.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_launch import checks, environment, network, order, render
from gpu_launch.crew import Crew
from gpu_launch.detached.file_screen import FileScreen, Journal
from gpu_launch.detached.given import GivenGang, parse_roster
from gpu_launch.detached.prepare import build_options, build_plan, find_exchange
from gpu_launch.environment import Environment
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.launch import Launch
from gpu_launch.quantities import format_span
from gpu_launch.request import Checked, Request
from gpu_launch.runs import RunFolder

#: Exit codes of a job whose order makes no sense, whose ranks have none of their own, and that was told to end.
_USAGE, _FAILED, _TOLD = 2, 1, 128 + signal.SIGTERM
#: Seconds between the first container that is told to end and this one.
_TOLD_S = 10.0
_POLL_S = 0.05  # seconds


def main() -> None:
    """Ends with the job's exit code."""
    env = environment.read()
    code = Driver(RunFolder(root=Path(sys.argv[1]), preemptions=env.preemptions), env).lead()
    sys.stderr.flush()
    # Everything that matters is written; no thread of a library keeps the container.
    os._exit(code)


class Driver:
    """One start of a detached job."""

    def __init__(self, run: RunFolder, env: Environment) -> None:
        self._run, self._env = run, env
        self._began = time.monotonic()
        self._journal = Journal(run)
        #: Set in a signal's handler, where no lock may be taken.
        self._is_told = False
        self._gang: GivenGang | None = None
        self._launch: Launch | None = None

    def lead(self) -> int:
        """The job's exit code."""
        signal.signal(signal.SIGTERM, self._tell)
        try:
            self._work()
        except GpuLaunchError as error:
            return self._fail(error)
        except Exception as error:  # noqa: BLE001 - the job's outermost edge: it ends with a word, not without
            traceback.print_exc()
            return self._fail(GpuLaunchError(f"{type(error).__name__}: {error}"))
        # Ranks that were told may end well after their checkpoint, and the job may still begin again.
        return self._close("cancelled", _TOLD) if self._is_told else self._close("done", 0)

    def _work(self) -> None:
        earlier = self._journal.open()
        self._journal.note(
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
        """Everything that can be refused is refused here."""
        job = order.parse_order(self._run.order.read_text())
        workers = parse_roster(self._env.roster)
        self._say(f"{job.name} {self._when()} on {render.nodes_text(workers, '')}")
        options = build_options(job, self._run, len(workers))
        cwd = self._env.home / job.folder
        if not cwd.is_dir():
            raise UsageError(f"The job's folder {cwd} is not there.")
        script = options.script
        if job.task is None and job.cell is None:
            script = checks.check_command(options, cwd=cwd, home=self._env.home, shared=False)
        request = Request(options=options, cell=job.cell, cwd=cwd, env=self._env, environ=job.environ)
        checked = Checked(
            request=request, plan=build_plan(options, workers), script=script, is_task=job.task is not None
        )
        self._gang = GivenGang(checked.plan, self._run, others=workers[1:], env=self._env)
        if self._is_told:
            self._gang.leave()
        crew = Crew(self._gang, address=network.own(self._env.subnet).address, own_text=checked.own_text)
        screen = FileScreen(self._journal, self._observe)
        return Launch(checked, crew=crew, run=self._run, screen=screen, exchange=find_exchange(self._run))

    def _when(self) -> str:
        attempt, preemptions = self._journal.state.attempt, self._env.preemptions
        if not attempt:
            return "starts"
        return f"starts again, preempted {render.times(preemptions)}," if preemptions else "starts again"

    def _observe(self) -> dict[str, Any]:
        """What of the state is seen from the ranks."""
        if self._launch is None:
            return {}
        ranks = self._launch.ranks
        return {"state": "running" if ranks.is_running() else "starting", "attempt": ranks.attempt}

    def _tell(self, _number: int, _frame: FrameType | None) -> None:
        self._is_told = True
        if self._gang is not None:
            self._gang.leave()

    def _fail(self, error: GpuLaunchError) -> int:
        ranks = self._launch.ranks if self._launch is not None else None
        first = ranks.first_failed() if ranks is not None else None
        was_ended = first is not None and first.exit_code in (-signal.SIGTERM, _TOLD)
        if was_ended or (ranks is not None and ranks.leaving()):
            # All containers are told to end, one a little sooner than the other.
            deadline = time.monotonic() + _TOLD_S
            while not self._is_told and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if self._is_told:
            return self._close("cancelled", _TOLD)
        code = _USAGE if isinstance(error, UsageError) else _FAILED
        if first is not None and first.exit_code:
            code = first.exit_code if first.exit_code > 0 else 128 - first.exit_code
        return self._close("failed", code, str(error))

    def _close(self, state: str, code: int, error: str = "") -> int:
        """Write the last words; the exit code again."""
        span = format_span(time.monotonic() - self._began)
        text = {"done": f"done in {span}", "cancelled": f"told to end after {span}"}.get(
            state, f"failed with exit code {code} after {span}"
        )
        said = f"{error.rstrip()}\n" if error else ""
        self._journal.close(
            f"{said}gpu_launch: {text}\n", state=state, ended_at=time.time(), exit_code=code, error=error, text=text
        )
        return code

    def _say(self, text: str) -> None:
        self._journal.write(f"gpu_launch: {text}\n")


if __name__ == "__main__":
    main()
