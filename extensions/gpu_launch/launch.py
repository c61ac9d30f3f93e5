"""One launch: a crew, ranks, their output, and the crew given back at the end, whatever the end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_launch import agent, environment, network, order, render, runs, wire
from gpu_launch import exchange as exchanges
from gpu_launch.broker import Broker
from gpu_launch.changeover import Changeover
from gpu_launch.crew import Crew, crews
from gpu_launch.display import Screen
from gpu_launch.errors import GpuLaunchError, LaunchFailed, LaunchInterrupted, UsageError
from gpu_launch.exchange import Exchange
from gpu_launch.growth import Growth
from gpu_launch.options import Options
from gpu_launch.output import Sink
from gpu_launch.progress import Ranks
from gpu_launch.quantities import format_span
from gpu_launch.request import Checked, Request
from gpu_launch.starting import Starter, start_thread
from gpu_launch.watch import Watch

_STEP_S = 0.05  # seconds between looks at the thread that frees things
_QUICK_S = 0.3  # seconds it may take without a word
_INTERRUPT_S = 1.0  # seconds ranks have to end after the user's interrupt
_GIVEN_UP_S = 2.0  # seconds for a start that was given up to stop
_DOUBTFUL_S, _FINISHED_S = 5.0, 20.0  # seconds for agents to say that nothing of the run is left
_NETWORK_S = 2.0  # seconds for this container's network to be there
#: Held by the launch that runs.
_running = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """A launch that ended well."""

    run_id: str
    seconds: float
    ranks: int
    nodes: tuple[str, ...]
    #: Every rank's whole output.
    logs: Path
    #: What the function returned, by rank; empty for a script or a cell.
    results: list[Any] = field(default_factory=list)
    #: The ranks' variables that were asked for, by name, then rank.
    returned: dict[str, list[Any]] = field(default_factory=dict)


def launch(
    options: Options, *, cell: str | None = None, before: Mapping[str, str], exchange: Exchange | None = None
) -> LaunchResult:
    """Run one launch from this notebook. `before` is the environment when the notebook began.

    Raises UsageError before anything is asked for; LaunchFailed or LaunchInterrupted after all ranks have ended.
    """
    if not _running.acquire(blocking=False):
        raise UsageError("Another launch of this notebook is under way; one at a time.")
    try:
        checked, broker = prepare(options, cell=cell, before=before)
        crew = crews.take(checked, broker)
        try:
            return Launch(checked, crew=crew, exchange=exchange).run()
        finally:
            if crew.is_taken:
                # An interrupt came at a bad moment.
                crews.give_back(crew, keep_s=0)
    finally:
        _running.release()


def prepare(options: Options, *, cell: str | None, before: Mapping[str, str]) -> tuple[Checked, Broker | None]:
    """What this notebook asks for, checked, and whom it asks. Raises UsageError and BrokerError."""
    env = environment.read()
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise UsageError("This notebook's folder does not exist any more; use %cd to go to another.") from None
    user_set = environment.changed(before, os.environ)
    broker = Broker.inside(env) if env.broker_url and env.token else None
    return crews.check(Request(options=options, cell=cell, cwd=cwd, env=env, environ=user_set), broker), broker


class Launch:
    """One run of a checked request, on a crew that is its own until the end."""

    def __init__(
        self,
        checked: Checked,
        *,
        crew: Crew,
        screen: Screen | None = None,
        run: runs.RunFolder | None = None,
        exchange: Exchange | None = None,
        sink: Sink | None = None,
    ) -> None:
        self._checked, self._crew, self._exchange = checked, crew, exchange
        self._gang, self._fleet, self._options = crew.gang, crew.fleet, checked.request.options
        self._began = time.monotonic()
        env = checked.request.env
        self.run_folder = run or runs.create(env.home)
        self.run_folder.lived.touch()
        self._logs = runs.shown(self.run_folder.logs, env.home)
        self._ranks = Ranks(checked.plan, self._options)
        self._growth = Growth(crew.gang)
        self._sink = sink or Sink(network.own(env.subnet, wait_s=_NETWORK_S).address)
        self._watch = Watch(checked, crew.gang, self._ranks, self._sink, screen)
        self._starter = Starter(
            checked,
            self.run_folder,
            crew=crew,
            ranks=self._ranks,
            channel=self._sink.channel,
            exchange=str(self.run_folder.exchange) if exchange is not None else "",
        )
        self._changeover = Changeover(
            checked,
            run_id=self.run_folder.run_id,
            logs=self._logs,
            crew=crew,
            ranks=self._ranks,
            watch=self._watch,
            starter=self._starter,
        )
        self._has_ended = False

    @property
    def ranks(self) -> Ranks:
        """Where its ranks are."""
        return self._ranks

    def run(self) -> LaunchResult:
        """To its end; raises LaunchFailed, LaunchInterrupted."""
        outcome = "failed"
        try:
            self.begin()
            while self.step():
                pass
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            self._stop_all()
            raise LaunchInterrupted(f"every rank is stopped. Logs: {self._logs}") from None
        finally:
            self.end(outcome)
        return self.result()

    def result(self) -> LaunchResult:
        """Of a launch that ended well. Raises LaunchFailed where not all that was to come back did."""
        results: list[Any] = []
        returned: dict[str, list[Any]] = {}
        if self._exchange is not None:
            results, returned = exchanges.collect(self.run_folder.exchange, self._ranks.total)
        return LaunchResult(
            run_id=self.run_folder.run_id,
            seconds=self._seconds,
            ranks=self._ranks.total,
            nodes=self._ranks.nodes(),
            logs=self.run_folder.logs,
            results=results,
            returned=returned,
        )

    def begin(self) -> None:
        """Returns when every node has confirmed the start, or the ranks have ended already; raises as `run` does."""
        for note in crews.notes():
            self._watch.say(note)
        if self._checked.request.cell is not None:
            self.run_folder.cell.write_text(self._checked.request.cell)
        if self._exchange is not None:
            self._exchange.write(self.run_folder.exchange)
        self._starter.begin()
        while self._starter.spec is None and self.step():
            pass

    def step(self) -> bool:
        """Show what has come, waiting a moment for it, and act on it; False when all ranks have ended well.

        Raises LaunchFailed. Starts ranks again where that was asked for.
        """
        self._check()
        self._watch.pump()
        if self._ranks.ended_well():
            self._watch.drain()
            return False
        change = self._changeover
        # Before a failure is settled: ranks that were told to write checkpoints need longer than that.
        way = change.find_way()
        if way is None and (self._ranks.failed() or self._ranks.all_ended()):
            way = change.look_for_way()
            if way is None:
                change.settle()
                way = change.look_for_way()
            if way is None:
                change.restart()
        if way is not None:
            change.make_way(way)
        return True

    def drain(self) -> None:
        """Show what has come and waits to be shown, unended lines included; the ranks go on."""
        self._watch.drain()

    def interrupt(self) -> None:
        """SIGINT to all ranks."""
        self._fleet.tell(agent.signal, int(signal.SIGINT), self.run_folder.run_id)

    def end(self, outcome: str) -> None:
        """End what is left of the ranks, and give the crew back; `outcome` is for the closing line."""
        if self._has_ended:
            return
        self._has_ended = True
        nodes = self._watch.nodes()
        self._shielded(self._give_back, "stopping" if self._gang.is_alone else "freeing the GPUs")
        self._watch.prefix = ""
        self._sink.close()
        self._note(outcome)
        self.run_folder.lived.unlink(missing_ok=True)
        self._seconds = time.monotonic() - self._began
        ranks = f"{render.count(self._ranks.total, 'rank')} on {nodes}"
        self._watch.tell(f"{outcome} {'in' if outcome == 'done' else 'after'} {self._seconds:.1f} s · {ranks}")
        self._tell_of_crew()

    def _note(self, outcome: str) -> None:
        """For `%gpu_status` and `%gpu_logs`, in other notebooks too. A detached job tells of itself, and may go on."""
        if self.run_folder.order.exists():
            return
        if outcome != "done":
            exchanges.clear(self.run_folder.exchange)
        state = "done" if outcome == "done" else "failed"
        told = order.State(state=state, text="" if state == outcome else outcome, ended_at=time.time())
        with contextlib.suppress(OSError):
            runs.write_private(self.run_folder.state, order.dump(told).encode())

    def _give_back(self) -> None:
        is_doubtful = True
        try:
            self._finish()
            is_doubtful = self._changeover.is_doubtful or self._starter.is_busy()
        finally:
            asked_s, usual_s = self._options.keep_s, self._checked.request.env.keep_workers_s
            crews.give_back(self._crew, keep_s=0 if is_doubtful else usual_s if asked_s is None else asked_s)

    def _tell_of_crew(self) -> None:
        """Once for each crew: that it stays."""
        crew = self._crew
        if crew.is_freed or crew.is_told or crew.gang.is_alone:
            return
        crew.is_told = True
        workers = crew.gang.workers()
        stay = "stays" if len(workers) == 1 else "stay"
        nodes, span = render.nodes_text(workers, ""), format_span(crew.keep_s)
        self._watch.say(
            f"{nodes} {stay} with this notebook for {span} after a launch, or until others wait for GPUs; "
            "%gpu_release frees them now"
        )

    def _check(self) -> None:
        """Raise what went wrong beside the ranks."""
        while self._starter.notes:
            self._watch.say(self._starter.notes.pop(0))
        try:
            if self._starter.problem is not None:
                raise self._starter.problem
            self._gang.check()
            self._check_wait()
            if not self._ranks.failed() and self._changeover.find_way() is None:
                self._changeover.check_gone()
        except GpuLaunchError:
            if self._changeover.look_for_way() is None:
                raise
        if self._checked.plan.is_elastic and self._starter.spec is not None:
            self._growth.look()

    def _check_wait(self) -> None:
        limit_s, job = self._options.timeout_s, self._gang.job
        if limit_s is None or self._gang.is_alone or (job is not None and job.state != wire.WAITING):
            return
        if time.monotonic() - self._changeover.asked_at > limit_s:
            why = f": {job.waiting_for}" if job is not None and job.waiting_for else ""
            after = "It was not started again." if self._ranks.attempt else "Nothing was started."
            raise LaunchFailed(f"No GPUs were free within {limit_s:g} s (--timeout-s){why}. {after}")

    def _stop_all(self) -> None:
        """SIGINT to all ranks and a little time, then the end; a second interrupt ends them at once."""
        self._watch.prefix, self._watch.doing = "interrupted, stopping · ", ""
        self._ranks.hush()
        self._starter.give_up()
        try:
            self._starter.join(_INTERRUPT_S)
            if not self._starter.is_told:
                return
            self.interrupt()
            self._watch.pump_until(self._ranks.all_ended, _INTERRUPT_S)
        except KeyboardInterrupt:
            self._watch.prefix = "interrupted twice, ending at once · "

    def _finish(self) -> None:
        """Remove what is left of the ranks; the crew can be used again when every agent has said that it did."""
        self._starter.give_up()
        self._starter.join(_GIVEN_UP_S)
        run_id = self.run_folder.run_id
        if self._starter.is_told and not self._ranks.all_ended():
            self._fleet.tell(agent.kill, run_id)
        calls = self._fleet.tell(agent.finish, run_id)
        is_leaving = self._gang.job is not None and self._gang.job.state == wire.LEAVING
        if not self._starter.is_told or is_leaving:
            # An agent may be busy importing for long, or be gone: containers that are to end leave nothing.
            return
        # A crew that is not used again anyway is not worth a long wait.
        deadline = time.monotonic() + (_DOUBTFUL_S if self._changeover.is_doubtful else _FINISHED_S)
        for call in calls:
            call.wait(max(0.0, deadline - time.monotonic()))
        if not all(call.ready() for call in calls):
            self._changeover.is_doubtful = True

    def _shielded(self, target: Callable[[], None], doing: str) -> None:
        """Do something in a thread that no further interrupt reaches."""
        problems: list[BaseException] = []
        thread = start_thread(target, problems.append)
        is_quick = True
        while thread.is_alive():
            try:
                thread.join(_QUICK_S if is_quick else _STEP_S)
                is_quick = False
                if thread.is_alive():
                    self._watch.tell(doing)
            except KeyboardInterrupt:
                self._watch.prefix = "already stopping · "
        for problem in problems:
            self._watch.say(str(problem), stream="stderr")
