"""One launch: containers, ranks, their output, and everything given back at the end, whatever the end."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_launch import command, environment, network, render, runs
from gpu_launch.broker import Broker
from gpu_launch.display import Screen
from gpu_launch.errors import GpuLaunchError, LaunchFailed, LaunchInterrupted, UsageError
from gpu_launch.fleet import HEARTBEAT_MISSES, Fleet
from gpu_launch.gang import Gang
from gpu_launch.options import Options
from gpu_launch.output import Sink
from gpu_launch.progress import Ranks
from gpu_launch.request import Checked, Request, build_spec, check
from gpu_launch.spec import LaunchSpec

_FLUSH_S = 0.05  # seconds between flushes to the notebook
_VICTIMS_S = 1.0  # seconds other nodes have to fail by themselves after the first failure
_TERM_S = 3.0  # seconds from SIGTERM to SIGKILL
_KILLED_S = 3.0  # seconds to hear of ranks that were killed
_INTERRUPT_S = 2.0  # seconds ranks have to end after the user's interrupt
_STARTED_S = 10.0  # seconds for all starts to be confirmed after the first failure


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """A launch that ended well."""

    run_id: str
    seconds: float
    ranks: int
    nodes: tuple[str, ...]
    #: Every rank's whole output.
    logs: Path


def launch(options: Options, *, cell: str | None = None, before: Mapping[str, str]) -> LaunchResult:
    """Run one launch from this notebook. `before` is the environment when the notebook began.

    Raises UsageError before anything is asked for; LaunchFailed or LaunchInterrupted after everything is freed.
    """
    env = environment.read()
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise UsageError("This notebook's folder does not exist any more; use %cd to go to another.") from None
    user_set = environment.changed(before, os.environ)
    broker = Broker(env.broker_url, env.token) if env.broker_url and env.token else None
    checked = check(Request(options=options, cell=cell, cwd=cwd, env=env, environ=user_set), broker)
    return Launch(checked, broker).run()


class Launch:
    """One run of a checked request."""

    def __init__(self, checked: Checked, broker: Broker | None) -> None:
        self._checked, self._plan, self._options = checked, checked.plan, checked.request.options
        self._began = time.monotonic()
        self._own = network.own(checked.request.env.subnet, wait_s=2.0)
        self._run = runs.create(checked.request.env.home)
        self._logs = runs.shown(self._run.logs, checked.request.env.home)
        self._screen = Screen()
        self._gang = Gang(self._plan, self._run, env=checked.request.env, broker=broker)
        self._fleet = Fleet(self._gang, self._own.address)
        self._ranks = Ranks(self._plan, self._options)
        self._note = ""
        self._problem: BaseException | None = None
        #: The last start that every node has confirmed.
        self._spec: LaunchSpec | None = None

    def run(self) -> LaunchResult:
        """To its end; raises LaunchFailed, LaunchInterrupted."""
        self._sink = Sink(self._own.address)
        starting: list[threading.Thread] = []
        outcome = "failed"
        try:
            starting.append(_start(self._begin, self._fail))
            starting.append(_start(self._bring_up, self._fail))
            self._until_done(starting)
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            self._interrupt()
            raise LaunchInterrupted(f"every rank is stopped. Logs: {self._logs}") from None
        finally:
            self._free(starting)
            seconds = time.monotonic() - self._began
            ranks = f"{render.count(self._ranks.total, 'rank')} on {self._nodes()}"
            self._screen.progress(f"{outcome} {'in' if outcome == 'done' else 'after'} {seconds:.1f} s · {ranks}")
        return LaunchResult(
            run_id=self._run.run_id,
            seconds=seconds,
            ranks=self._ranks.total,
            nodes=self._ranks.nodes(),
            logs=self._run.logs,
        )

    def _begin(self) -> None:
        settings = {"is_launch": True, "profile_dir": str(self._run.profile), "heartbeat_misses": HEARTBEAT_MISSES}
        self._gang.begin(settings=settings)

    def _bring_up(self) -> None:
        if self._checked.request.cell is not None:
            self._run.cell.write_text(self._checked.request.cell)
        port = network.free_port(self._own.address)
        spec = build_spec(self._checked, self._run, own=self._own, port=port, channel=self._sink.channel)
        started = self._fleet.up(spec)
        addresses = [info.address for _, info in sorted(self._fleet.infos.items())]
        if len(addresses) == self._plan.nnodes:
            (self._run.root / "torchrun.sh").write_text(command.build_by_hand(started, addresses))
            self._spec = started

    def _until_done(self, starting: list[threading.Thread]) -> None:
        while not self._ranks.all_ended():
            if self._problem is not None:
                raise self._problem
            self._gang.check()
            self._check_wait()
            self._pump()
            self._ranks.check_alive(time.monotonic())
            if self._ranks.failed():
                self._settle()
                for thread in starting:
                    thread.join(_STARTED_S)
                if self._ranks.attempt >= self._options.max_restarts or self._spec is None:
                    raise LaunchFailed(self._ranks.describe(logs=self._logs))
                self._restart(self._spec)
        self._drain()

    def _settle(self) -> None:
        """After the first failure: let the other nodes fail by themselves, then end them."""
        if not self._pump_until_ended(_VICTIMS_S):
            self._fleet.signal(signal.SIGTERM)
            if not self._pump_until_ended(_TERM_S):
                self._fleet.kill()
                self._pump_until_ended(_KILLED_S)
        self._drain()

    def _restart(self, spec: LaunchSpec) -> None:
        self._note = f"restart {spec.attempt + 1} of {self._options.max_restarts} · "
        self._ranks.restart()
        self._spec = self._fleet.again(spec)

    def _pump_until_ended(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not self._ranks.all_ended() and time.monotonic() < deadline:
            self._pump()
        return self._ranks.all_ended()

    def _pump(self) -> None:
        """Show what the launch does, and what has come."""
        self._screen.progress(self._note + self._state())
        messages = self._sink.receive(int(_FLUSH_S * 1000))
        began = time.monotonic()
        self._show(self._ranks.take(messages, began))
        if messages:
            # Not more often than a browser can draw.
            time.sleep(max(0.0, _FLUSH_S - (time.monotonic() - began)))

    def _drain(self) -> None:
        """Show the rest, unended lines included."""
        while messages := self._sink.receive(0):
            self._show(self._ranks.take(messages, time.monotonic()))
        self._show(self._ranks.take((), time.monotonic(), last=True))

    def _show(self, texts: list[tuple[str, str]]) -> None:
        for stream, text in texts:
            self._screen.write(stream, text)
        if texts:
            self._screen.flush()

    def _state(self) -> str:
        job, wanted = self._gang.job, self._plan
        if self._ranks.is_running():
            return f"running on {self._nodes()}"
        gpus = wanted.workers * wanted.nproc_per_node
        if wanted.workers and job is None:
            return f"asking for {render.count(gpus, 'GPU')} on {render.count(wanted.workers, 'node')}"
        if job is not None and not self._gang.is_started():
            return render.job_text(job, gpus=gpus, workers=wanted.workers)
        return f"starting {render.count(self._ranks.total, 'rank')} on {self._nodes()}"

    def _nodes(self) -> str:
        return render.nodes_text(self._gang.job, self._checked.own_text)

    def _check_wait(self) -> None:
        limit_s, job = self._options.timeout_s, self._gang.job
        if limit_s is None or not self._plan.workers or (job is not None and job.state != "waiting"):
            return
        if time.monotonic() - self._began > limit_s:
            why = f": {job.waiting_for}" if job is not None and job.waiting_for else ""
            raise LaunchFailed(f"No GPUs were free within {limit_s:g} s (--timeout-s){why}. Nothing was started.")

    def _interrupt(self) -> None:
        """SIGINT to all ranks and a little time, then the end; a second interrupt ends them at once."""
        self._note = "interrupted, stopping · "
        self._ranks.hush()
        if self._spec is None:
            return
        try:
            self._fleet.signal(signal.SIGINT)
            self._pump_until_ended(_INTERRUPT_S)
        except KeyboardInterrupt:
            self._note = "interrupted twice, ending at once · "
        if not self._ranks.all_ended():
            self._fleet.kill()

    def _free(self, starting: list[threading.Thread]) -> None:
        """Give everything back, in threads that no further interrupt reaches."""
        problems: list[BaseException] = []
        freeing = [_start(self._gang.stop, problems.append), _start(lambda: self._down(starting), problems.append)]
        while any(thread.is_alive() for thread in freeing):
            try:
                self._screen.progress(
                    self._note + "freeing the GPUs" if self._plan.workers else self._note + "stopping"
                )
                for thread in freeing:
                    thread.join(_FLUSH_S)
            except KeyboardInterrupt:
                self._note = "already stopping · "
        self._sink.close()
        shutil.rmtree(self._run.profile, ignore_errors=True)
        for problem in problems:
            self._screen.write("stderr", f"gpu_launch: {problem}\n")

    def _down(self, starting: list[threading.Thread]) -> None:
        self._fleet.stop_waiting()
        for thread in starting:
            thread.join()
        self._fleet.down()

    def _fail(self, error: BaseException) -> None:
        self._problem = self._problem or error


def _start(target: Callable[[], None], on_error: Callable[[BaseException], None]) -> threading.Thread:
    def call() -> None:
        try:
            target()
        except GpuLaunchError as error:
            on_error(error)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the launch reports it
            failed = LaunchFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            on_error(failed)

    thread = threading.Thread(target=call, name="gpu_launch", daemon=True)
    thread.start()
    return thread
