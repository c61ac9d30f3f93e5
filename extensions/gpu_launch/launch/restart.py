"""Between two starts of the ranks: notice that nodes leave, join or are lost, end the ranks, request further nodes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from gpu_launch.broker import models
from gpu_launch.common.launch_spec import Membership
from gpu_launch.errors import GpuLaunchError, LaunchFailed
from gpu_launch.launch.membership import (
    MembershipChange,
    checkpoint_seconds,
    describe_change,
    find_change,
    format_silent_nodes,
)
from gpu_launch.launch.request import ValidatedRequest
from gpu_launch.launch.startup import RankStarter
from gpu_launch.launch.view import LaunchView
from gpu_launch.launch.workers.worker_group import BrokerWorkerGroup, WorkerGroup
from gpu_launch.launch.workers.worker_pool import WorkerPool
from gpu_launch.output.rank_monitor import STALLED_S, RankMonitor
from gpu_launch.worker import agent

_VICTIMS_S = 1.0  # seconds other nodes have to fail by themselves after the first failure
_REASON_S = 10.0  # seconds from the end of workers that got SIGTERM until the broker reports the reason
_TERM_S = 3.0  # seconds from SIGTERM to SIGKILL
_KILLED_S = 3.0  # seconds until the end of killed ranks is reported
_LOST_S = 10.0  # seconds for checkpoints when a node was lost
#: Interval between requests for missing nodes, seconds; longer after one that brought nothing.
_REQUEST_S = 5.0
#: Maximum interval between such requests, seconds.
_MAX_REQUEST_S = 60.0


class RestartController:
    """Observes who takes part in a start of the ranks, and ends the ranks; `Launch` decides what follows."""

    def __init__(
        self,
        validated: ValidatedRequest,
        *,
        run_id: str,
        logs: str,
        pool: WorkerPool,
        ranks: RankMonitor,
        view: LaunchView,
        starter: RankStarter,
    ) -> None:
        self._validated, self._plan, self._run_id, self._logs = validated, validated.plan, run_id, logs
        self._pool, self._group, self._agents = pool, pool.group, pool.agents
        self._ranks, self._view, self._starter = ranks, view, starter

    def pending_change(self) -> MembershipChange | None:
        """Return the change of members that is due, as far as it is known; None for none."""
        membership = self._ranks.membership
        if membership is None or not self._validated.may_lose_gpus:
            return None
        terminating = [membership.participants[rank] for rank in self._ranks.terminating_nodes()]
        return find_change(
            self._group.job,
            membership,
            self._plan,
            workers=self._group.workers(),
            leaving=[worker for worker in terminating if worker is not None],
            gone=[worker for worker in self.find_silent() if worker is not None],
            joined=self._joined(membership),
        )

    def refresh_pending_change(self) -> MembershipChange | None:
        """Return the same after asking the broker: ranks may have ended because of a change before its news came."""
        if self._validated.may_lose_gpus and self._ranks.membership is not None:
            self._group.refresh()
        return self.pending_change()

    def find_silent(self) -> frozenset[int | None]:
        """Return the participants that report nothing any more, although they have not reported their end."""
        membership, ranks = self._ranks.membership, self._ranks
        if membership is None or not self._starter.all_connected:
            return frozenset()
        stalled = ranks.silent_nodes(STALLED_S)
        silent = {
            participant
            for rank in ranks.silent_nodes()
            if rank in stalled or not self._agents.is_connected(participant := membership.participants[rank])
        }
        ended = {membership.participants[rank] for rank in ranks.ended_nodes()}
        return frozenset(silent | (self._agents.missing(membership) - ended))

    def raise_silent(self, silent: frozenset[int | None]) -> None:
        """Raise the failure of these participants.

        Raises:
            LaunchFailed: naming their nodes.
        """
        membership = self._ranks.membership
        if membership is None:
            return
        self._ranks.check_alive([rank for rank, other in enumerate(membership.participants) if other in silent])
        notebook = self._validated.request.env.node
        nodes = [
            notebook if participant is None else membership.node_of(participant)
            for participant in membership.participants
            if participant in silent
        ]
        raise LaunchFailed(format_silent_nodes(nodes, logs=self._logs))

    def await_failures(self) -> None:
        """After the first failure: let the other nodes fail by themselves, then end them."""
        view, ranks = self._view, self._ranks
        if not view.pump_until(ranks.all_ended, _VICTIMS_S):
            if self._validated.may_lose_gpus:
                self._agents.broadcast(agent.signal_ranks, int(signal.SIGTERM), self._run_id)
                view.pump_until(ranks.all_ended, _TERM_S)
            if not ranks.all_ended():
                self._kill()
                view.pump_until(ranks.all_ended, _KILLED_S)
        view.drain()

    def await_reason(self) -> MembershipChange | None:
        """Return the change of members by which the ranks have failed; None where there is none.

        Workers that got SIGTERM end before the broker reports why; their ranks may end before their agents notice.
        """
        first = self._ranks.find_first_failure()
        was_terminated = first is not None and first.exit_code == -signal.SIGTERM
        if self._ranks.terminating_nodes() or (was_terminated and self._has_broker_news()):
            self._wait_until(lambda: self.pending_change() is not None, _REASON_S)
            return self.pending_change()
        return None

    def stop_starting(self) -> None:
        """Cancel the current start, and wait until it has stopped."""
        self._starter.cancel()
        self._view.pump_until(lambda: not self._starter.is_busy())

    def end_with_checkpoints(self, change: MembershipChange, membership: Membership) -> None:
        """Announce the change to the user and the ranks, and end the ranks after their checkpoints."""
        job = self._group.job
        # Ranks that wait for a lost one in a collective cannot continue; what can be saved is saved quickly.
        grace_s = _LOST_S if change.lost is not None else checkpoint_seconds(job, datetime.now(UTC))
        has_time = not change.is_complete or (job is not None and job.state == models.PREEMPTING)
        self._view.print_line(describe_change(change, membership, grace_s=grace_s if has_time else None))
        self._view.activity = "ranks write their checkpoints and end"
        self.stop_starting()
        self._agents.broadcast(agent.signal_ranks, int(signal.SIGTERM), self._run_id)
        self._await_checkpoints(change, membership, grace_s)
        self._kill()
        self._view.drain()

    def await_requeue(self, membership: Membership) -> int:
        """Wait until a preempted job has released all its GPUs; return how often it has been preempted."""
        self._view.activity = "preempted, the workers end"
        self._wait_until(lambda: self._is_requeued(membership))
        return self._group.job.preemptions if self._group.job else 0

    def _has_broker_news(self) -> bool:
        """Return whether the broker reports the job's state; a detached job's driver only gets a signal."""
        job = self._group.job
        return not self._group.is_notebook_only and job is not None and not job.detached

    def _kill(self) -> None:
        self._agents.broadcast(agent.kill_ranks, self._run_id)

    def _joined(self, membership: Membership) -> list[str]:
        """Return the nodes of workers that have come since the start, and whose engines are connected."""
        if not self._plan.is_elastic or not self._starter.is_confirmed:
            return []
        self._agents.discover()
        current = self._pool.membership(self._plan)
        if current is None:
            return []
        new = [index for index in current.workers if index not in membership.workers]
        return [current.node_of(index) for index in new if self._agents.is_connected(index)]

    def _await_checkpoints(self, change: MembershipChange, membership: Membership, grace_s: float) -> None:
        """Wait until the ranks have ended or their time is over. The broker kills those of workers that leave."""
        leaving = frozenset(membership.node_rank(worker) for worker in change.leaving)

        def find_running() -> frozenset[int]:
            lost, is_requeued = set(self.find_silent()), self._is_requeued(membership)
            if not is_requeued:
                lost |= {worker.index for worker in self._group.workers() if worker.state == models.EXITED}
            running = self._ranks.running_nodes()
            running = frozenset(rank for rank in running if membership.participants[rank] not in lost)
            return running - leaving if is_requeued else running

        if not change.is_complete:
            self._wait_until(lambda: not find_running() & leaving)
        self._wait_until(lambda: not find_running(), grace_s)

    def _is_requeued(self, membership: Membership) -> bool:
        """Return whether the job has released all its GPUs, and waits or has been granted again."""
        job = self._group.job
        return job is not None and job.state != models.PREEMPTING and job.preemptions != membership.preemptions

    def _wait_until(self, condition: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Show the launch until the condition is true or the time is over."""

        def is_over() -> bool:
            self._group.check()
            return condition()

        self._view.pump_until(is_over, limit_s)


class ScaleUp:
    """Requests for the missing nodes, in a thread, because the broker's answer may take long."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._thread: threading.Thread | None = None
        self._every_s = _REQUEST_S
        self._due_at = time.monotonic() + _REQUEST_S
        self._failure = ""
        self._notes: list[str] = []

    def pop_notes(self) -> list[str]:
        """Return why requests failed, each reason once in succession, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def poll(self) -> None:
        """Request nodes when it is time and some are missing."""
        group, now = self._group, time.monotonic()
        if (
            not isinstance(group, BrokerWorkerGroup)
            or now < self._due_at
            or (self._thread is not None and self._thread.is_alive())
        ):
            return
        membership = group.membership()
        if membership is None or membership.nnodes >= group.plan.nnodes:
            return
        self._due_at = now + self._every_s
        self._thread = threading.Thread(target=self._request, args=(group,), name="gpu_launch scale-up", daemon=True)
        self._thread.start()

    def _request(self, group: BrokerWorkerGroup) -> None:
        try:
            has_grown = group.scale_up()
            self._failure = ""
        except GpuLaunchError as error:
            has_grown = False
            if str(error) != self._failure:
                self._failure = str(error)
                self._notes.append(f"the missing nodes could not be requested, the launch continues without: {error}")
        self._every_s = _REQUEST_S if has_grown else min(_MAX_REQUEST_S, 1.5 * self._every_s)
