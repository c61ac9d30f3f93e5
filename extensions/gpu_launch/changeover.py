"""From one start of the ranks to the next: when others need GPUs, nodes come or are lost, or a rank has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime

from gpu_launch import agent, render, wire
from gpu_launch.crew import Crew
from gpu_launch.errors import LaunchFailed
from gpu_launch.progress import STALLED_S, Ranks
from gpu_launch.request import Checked
from gpu_launch.roster import Roster
from gpu_launch.starting import Starter
from gpu_launch.watch import Watch
from gpu_launch.way import Way, check_left, describe, find_way, gone_text, grace, lost_text

_VICTIMS_S = 1.0  # seconds other nodes have to fail by themselves after the first failure
_WORD_S = 10.0  # seconds from the end of workers that were told to the broker's word why
_TERM_S = 3.0  # seconds from SIGTERM to SIGKILL
_KILLED_S = 3.0  # seconds to hear of ranks that were killed
_LOST_S = 10.0  # seconds for checkpoints when a node was lost
_STARTED_S = 10.0  # seconds for all starts to be confirmed after the first failure


class Changeover:
    """Ends one start of the ranks and begins the next, or raises why there is none."""

    def __init__(
        self, checked: Checked, *, run_id: str, logs: str, crew: Crew, ranks: Ranks, watch: Watch, starter: Starter
    ) -> None:
        self._checked, self._plan, self._run_id, self._logs = checked, checked.plan, run_id, logs
        self._crew, self._gang, self._fleet = crew, crew.gang, crew.fleet
        self._ranks, self._watch, self._starter = ranks, watch, starter
        self._restarts = 0
        #: When GPUs were asked for last.
        self.asked_at = time.monotonic()
        #: Nodes did not tell of their end: what is on them is not known.
        self.is_doubtful = False

    def find_way(self) -> Way | None:
        """What is to change, as far as it is known; None for nothing."""
        roster = self._ranks.roster
        if roster is None or not self._checked.may_lose_gpus:
            return None
        told = [roster.members[rank] for rank in self._ranks.leaving()]
        return find_way(
            self._gang.job,
            roster,
            self._plan,
            workers=self._gang.workers(),
            leaving=[member for member in told if member is not None],
            gone=[member for member in self.find_gone() if member is not None],
            joined=self._joined(roster),
        )

    def look_for_way(self) -> Way | None:
        """As `find_way`, after asking the broker: ranks may have ended of it before its news came."""
        if self._checked.may_lose_gpus and self._ranks.roster is not None:
            self._gang.look()
        return self.find_way()

    def find_gone(self) -> frozenset[int | None]:
        """Members that are not heard of any more, though they have told no end."""
        roster, ranks = self._ranks.roster, self._ranks
        if roster is None or not self._starter.has_met:
            return frozenset()
        stalled = ranks.silent(STALLED_S)
        silent = {
            member for rank in ranks.silent() if rank in stalled or not self._fleet.has(member := roster.members[rank])
        }
        ended = {roster.members[rank] for rank in ranks.ended()}
        return frozenset(silent | (self._fleet.lost(roster) - ended))

    def check_gone(self) -> None:
        """Raise for nodes that are not heard of any more."""
        gone, roster = self.find_gone(), self._ranks.roster
        if not gone or roster is None:
            return
        self.is_doubtful = True
        self._ranks.check_alive([rank for rank, member in enumerate(roster.members) if member in gone])
        own = self._checked.request.env.node
        lost = [own if member is None else roster.node_of(member) for member in roster.members if member in gone]
        raise LaunchFailed(gone_text(lost, logs=self._logs))

    def settle(self) -> None:
        """After the first failure: let the other nodes fail by themselves, then end them."""
        watch, ranks = self._watch, self._ranks
        if not watch.pump_until(ranks.all_ended, _VICTIMS_S):
            if self._checked.may_lose_gpus:
                self._fleet.tell(agent.signal, int(signal.SIGTERM), self._run_id)
                watch.pump_until(ranks.all_ended, _TERM_S)
            if not ranks.all_ended():
                self._kill()
                watch.pump_until(ranks.all_ended, _KILLED_S)
        watch.drain()

    def restart(self) -> None:
        """Start all ranks again, where that was allowed; else raise the failure."""
        self._starter.join(_STARTED_S)
        if not self._ranks.all_ended():
            # A node that does not tell of its end may be what the others failed of.
            self.is_doubtful = True
            self._gang.check()
            self.check_gone()
        first = self._ranks.first_failed()
        was_ended = first is not None and first.exit_code == -signal.SIGTERM
        if self._ranks.leaving() or (was_ended and self._may_hear_why()):
            # Their workers were told to end, and they with them, some before their agents: why is the broker's to say.
            self._hold(lambda: self.find_way() is not None, _WORD_S)
            if (way := self.find_way()) is not None:
                self.make_way(way)
                return
        if self._restarts >= self._checked.request.options.max_restarts or self._starter.spec is None:
            raise LaunchFailed(self._ranks.describe(logs=self._logs))
        self._count_restart()
        self._again()

    def make_way(self, way: Way) -> None:
        """Tell the ranks, wait for their checkpoints, and start them again: when granted anew, or on what is there."""
        roster, job = self._ranks.roster, self._gang.job
        assert roster is not None  # noqa: S101 - there is no way without one
        # Ranks that wait for a lost one in a collective get no further; what can be saved is saved quickly.
        grace_s = _LOST_S if way.lost is not None else grace(job, datetime.now(UTC))
        has_time = not way.is_whole or (job is not None and job.state == wire.PREEMPTING)
        self._watch.say(describe(way, roster, grace_s=grace_s if has_time else None))
        self._watch.doing = "ranks write their checkpoints and end"
        self._stop_starting()
        self._fleet.tell(agent.signal, int(signal.SIGTERM), self._run_id)
        self._save(way, roster, grace_s)
        self._kill()
        self._watch.drain()
        if self._ranks.ended_well():
            return
        if way.is_last:
            raise LaunchFailed(f"told to end. Logs: {self._logs}")
        if way.is_whole:
            self._await_requeue(roster)
        else:
            self._shrink(way, roster)
        self._fleet.forget(way.workers)
        self._again()

    def _may_hear_why(self) -> bool:
        """Whether the broker tells this process of its job; a detached job's driver is told by a signal."""
        job = self._gang.job
        return not self._gang.is_alone and job is not None and not job.detached

    def _kill(self) -> None:
        self._fleet.tell(agent.kill, self._run_id)

    def _joined(self, roster: Roster) -> list[str]:
        """Nodes of workers that came while the ranks run, and whose engines are there."""
        if not self._plan.is_elastic or self._starter.spec is None:
            return []
        self._fleet.meet()
        there = self._crew.roster(self._plan)
        new = [] if there is None else [index for index in there.workers if index not in roster.workers]
        return [there.node_of(index) for index in new if self._fleet.has(index)] if there is not None else []

    def _save(self, way: Way, roster: Roster, grace_s: float) -> None:
        """Until the ranks have ended or their time is over. Those of workers that go are the broker's to kill."""
        going = frozenset(roster.node_rank(worker) for worker in way.workers)

        def busy() -> frozenset[int]:
            out, is_requeued = set(self.find_gone()), self._is_requeued(roster)
            if not is_requeued:
                out |= {worker.index for worker in self._gang.workers() if worker.state == wire.EXITED}
            found = frozenset(rank for rank in self._ranks.busy() if roster.members[rank] not in out)
            return found - going if is_requeued else found

        if not way.is_whole:
            self._hold(lambda: not busy() & going)
        self._hold(lambda: not busy(), grace_s)

    def _await_requeue(self, roster: Roster) -> None:
        self._watch.doing = "preempted, the workers end"
        self._hold(lambda: self._is_requeued(roster))
        number = self._gang.job.preemptions if self._gang.job else 0
        self._watch.prefix = f"preempted {render.times(number)} · "
        self.asked_at = time.monotonic()

    def _is_requeued(self, roster: Roster) -> bool:
        """Whether the job has given all its GPUs back, and waits or has been granted again."""
        job = self._gang.job
        return job is not None and job.state != wire.PREEMPTING and job.preemptions != roster.preemptions

    def _shrink(self, way: Way, roster: Roster) -> None:
        left = roster.without(way.workers)
        if len(left.members) + len(way.joined) < self._plan.least_nnodes:
            check_left(left, self._plan)
        if way.lost is not None:
            if self._restarts >= self._checked.request.options.max_restarts:
                raise LaunchFailed(lost_text(way.lost, logs=self._logs))
            self._count_restart()
        if way.workers:
            self._gang.go_without(way.workers)

    def _count_restart(self) -> None:
        self._restarts += 1
        self._watch.prefix = f"restart {self._restarts} of {self._checked.request.options.max_restarts} · "

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
        self._starter.again(restarts=self._restarts)

    def _stop_starting(self) -> None:
        self._starter.give_up()
        self._watch.pump_until(lambda: not self._starter.is_busy())
