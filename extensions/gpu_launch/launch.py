"""One launch: containers, ranks, their output, and everything given back at the end, whatever the end."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpu_launch import environment, network, render, runs, wire
from gpu_launch.broker import Broker
from gpu_launch.errors import GpuLaunchError, LaunchFailed, LaunchInterrupted, UsageError
from gpu_launch.fleet import Fleet
from gpu_launch.gang import Gang
from gpu_launch.options import Options
from gpu_launch.output import Sink
from gpu_launch.progress import Ranks
from gpu_launch.request import Checked, Request, check
from gpu_launch.roster import Roster
from gpu_launch.starting import Starter, start_thread
from gpu_launch.watch import Watch
from gpu_launch.way import Way, check_left, describe, find_way, grace, lost_text

_STEP_S = 0.05  # seconds between looks at threads that free things
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
        self._began = self._asked_at = time.monotonic()
        self._own = network.own(checked.request.env.subnet, wait_s=2.0)
        self._run = runs.create(checked.request.env.home)
        self._logs = runs.shown(self._run.logs, checked.request.env.home)
        self._gang = Gang(self._plan, self._run, env=checked.request.env, broker=broker)
        self._fleet = Fleet(self._gang, self._own.address)
        self._ranks = Ranks(self._plan, self._options)
        self._restarts = 0

    def run(self) -> LaunchResult:
        """To its end; raises LaunchFailed, LaunchInterrupted."""
        self._sink = Sink(self._own.address)
        self._watch = Watch(self._checked, self._gang, self._ranks, self._sink)
        channel = self._sink.channel
        self._starter = Starter(
            self._checked, self._run, gang=self._gang, fleet=self._fleet, ranks=self._ranks, channel=channel
        )
        outcome = "failed"
        try:
            self._starter.begin()
            self._until_done()
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            self._interrupt()
            raise LaunchInterrupted(f"every rank is stopped. Logs: {self._logs}") from None
        finally:
            nodes = self._watch.nodes()
            self._free()
            seconds = time.monotonic() - self._began
            ranks = f"{render.count(self._ranks.total, 'rank')} on {nodes}"
            self._watch.tell(f"{outcome} {'in' if outcome == 'done' else 'after'} {seconds:.1f} s · {ranks}")
        return LaunchResult(
            run_id=self._run.run_id,
            seconds=seconds,
            ranks=self._ranks.total,
            nodes=self._ranks.nodes(),
            logs=self._run.logs,
        )

    def _until_done(self) -> None:
        """One start of the ranks after another."""
        while not self._ranks.ended_well():
            self._wait_for_news()
            if self._ranks.ended_well():
                break
            # Before a failure is settled: ranks that were told to write checkpoints need longer than that.
            way = self._find_way() or self._look_for_way()
            if way is None:
                self._settle()
                way = self._look_for_way()
            if way is None:
                self._restart()
            else:
                self._make_way(way)
        self._watch.drain()

    def _wait_for_news(self) -> None:
        """Until all have ended, one has failed, or others need the GPUs."""
        while not self._ranks.all_ended() and not self._ranks.failed() and self._find_way() is None:
            try:
                self._check()
            except GpuLaunchError:
                if self._look_for_way() is None:
                    raise
            self._watch.pump()

    def _check(self) -> None:
        """Raise what went wrong beside the ranks."""
        if self._starter.problem is not None:
            raise self._starter.problem
        self._gang.check()
        self._check_wait()
        self._ranks.check_alive(time.monotonic())

    def _find_way(self) -> Way | None:
        roster = self._ranks.roster
        if roster is None or not self._checked.may_lose_gpus:
            return None
        told = [roster.members[rank] for rank in self._ranks.leaving()]
        leaving = [member for member in told if member is not None]
        return find_way(self._gang.job, roster, self._plan, leaving=leaving)

    def _look_for_way(self) -> Way | None:
        """As `_find_way`, after asking the broker: ranks may have ended of it before its news came."""
        if self._checked.may_lose_gpus and self._ranks.roster is not None:
            self._gang.look()
        return self._find_way()

    def _settle(self) -> None:
        """After the first failure: let the other nodes fail by themselves, then end them."""
        if not self._watch.pump_until(self._ranks.all_ended, _VICTIMS_S):
            self._fleet.signal(signal.SIGTERM)
            if not self._watch.pump_until(self._ranks.all_ended, _TERM_S):
                self._fleet.kill()
                self._watch.pump_until(self._ranks.all_ended, _KILLED_S)
        self._watch.drain()

    def _restart(self) -> None:
        self._starter.join(_STARTED_S)
        if self._restarts >= self._options.max_restarts or self._starter.spec is None:
            raise LaunchFailed(self._ranks.describe(logs=self._logs))
        self._restarts += 1
        self._watch.prefix = f"restart {self._restarts} of {self._options.max_restarts} · "
        self._again()

    def _make_way(self, way: Way) -> None:
        """Tell the ranks, wait for their checkpoints, and start them again: when granted anew, or on what is left."""
        roster, job = self._ranks.roster, self._gang.job
        assert roster is not None  # noqa: S101 - there is no way without one
        grace_s = grace(job, datetime.now(UTC))
        has_time = not way.is_whole or (job is not None and job.state == wire.PREEMPTING)
        self._watch.say(describe(way, roster, grace_s=grace_s if has_time else None))
        self._watch.doing = "ranks write their checkpoints and end"
        self._stop_starting()
        self._fleet.signal(signal.SIGTERM)
        self._save(way, roster, grace_s)
        self._fleet.kill()
        self._watch.drain()
        if self._ranks.ended_well():
            return
        if way.is_whole:
            self._await_requeue(roster)
        else:
            self._shrink(way, roster)
        self._fleet.forget(way.workers)
        self._again()

    def _save(self, way: Way, roster: Roster, grace_s: float) -> None:
        """Until the ranks have ended or their time is over. Those of workers that go are the broker's to kill."""
        going = frozenset(roster.node_rank(worker) for worker in way.workers)

        def busy() -> frozenset[int]:
            found = self._ranks.busy(time.monotonic())
            if self._is_requeued(roster):
                return found - going
            exited = {worker.index for worker in self._gang.workers() if worker.state == wire.EXITED}
            return frozenset(rank for rank in found if roster.members[rank] not in exited)

        if not way.is_whole:
            self._hold(lambda: not busy() & going)
        self._hold(lambda: not busy(), grace_s)

    def _await_requeue(self, roster: Roster) -> None:
        self._watch.doing = "preempted, the workers end"
        self._hold(lambda: self._is_requeued(roster))
        number = self._gang.job.preemptions if self._gang.job else 0
        self._watch.prefix = f"preempted {render.times(number)} · "
        self._asked_at = time.monotonic()

    def _is_requeued(self, roster: Roster) -> bool:
        """Whether the job has given all its GPUs back, and waits or has been granted again."""
        job = self._gang.job
        return job is not None and job.state != wire.PREEMPTING and job.preemptions != roster.preemptions

    def _shrink(self, way: Way, roster: Roster) -> None:
        check_left(roster.without(way.workers), self._plan)
        if way.lost is not None:
            if self._restarts >= self._options.max_restarts:
                raise LaunchFailed(lost_text(way.lost, logs=self._logs))
            self._restarts += 1
        self._gang.go_without(way.workers)

    def _hold(self, condition: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Show what comes until the condition is true or the time over."""

        def is_over() -> bool:
            self._gang.check()
            return condition()

        self._watch.pump_until(is_over, limit_s)

    def _again(self) -> None:
        self._stop_starting()
        self._ranks.restart()
        self._watch.doing = ""
        self._starter.again()

    def _stop_starting(self) -> None:
        self._starter.give_up()
        self._watch.pump_until(lambda: not self._starter.is_busy())

    def _check_wait(self) -> None:
        limit_s, job = self._options.timeout_s, self._gang.job
        if limit_s is None or self._gang.is_alone or (job is not None and job.state != wire.WAITING):
            return
        if time.monotonic() - self._asked_at > limit_s:
            why = f": {job.waiting_for}" if job is not None and job.waiting_for else ""
            after = "It was not started again." if self._ranks.attempt else "Nothing was started."
            raise LaunchFailed(f"No GPUs were free within {limit_s:g} s (--timeout-s){why}. {after}")

    def _interrupt(self) -> None:
        """SIGINT to all ranks and a little time, then the end; a second interrupt ends them at once."""
        self._watch.prefix, self._watch.doing = "interrupted, stopping · ", ""
        self._ranks.hush()
        if self._starter.spec is None:
            return
        try:
            self._fleet.signal(signal.SIGINT)
            self._watch.pump_until(self._ranks.all_ended, _INTERRUPT_S)
        except KeyboardInterrupt:
            self._watch.prefix = "interrupted twice, ending at once · "
        if not self._ranks.all_ended():
            self._fleet.kill()

    def _free(self) -> None:
        """Give everything back, in threads that no further interrupt reaches."""
        problems: list[BaseException] = []
        freeing = [start_thread(self._gang.stop, problems.append), start_thread(self._down, problems.append)]
        doing = "stopping" if self._gang.is_alone else "freeing the GPUs"
        while any(thread.is_alive() for thread in freeing):
            try:
                self._watch.tell(doing)
                for thread in freeing:
                    thread.join(_STEP_S)
            except KeyboardInterrupt:
                self._watch.prefix = "already stopping · "
        self._watch.prefix = ""
        self._sink.close()
        shutil.rmtree(self._run.profile, ignore_errors=True)
        for problem in problems:
            self._watch.say(str(problem), stream="stderr")

    def _down(self) -> None:
        self._starter.give_up()
        self._starter.join()
        self._fleet.down()
