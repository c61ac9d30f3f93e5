"""The end of a launch: interrupts its ranks, removes what is left of them, and releases the workers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from gpu_launch.broker import models
from gpu_launch.launch.request import ValidatedRequest
from gpu_launch.launch.startup import RankStarter, start_thread
from gpu_launch.launch.view import LaunchView
from gpu_launch.launch.workers.worker_pool import WorkerPool, choose_keep_s, worker_pools
from gpu_launch.output.rank_monitor import RankMonitor
from gpu_launch.worker import agent

_STEP_S = 0.05  # seconds between polls of the thread that releases the workers
_QUICK_S = 0.3  # seconds that the end may take before its progress is shown
_INTERRUPT_S = 1.0  # seconds that ranks have to end after the user's interrupt
_CANCELLED_S = 2.0  # seconds for a cancelled start to stop
#: Time limit for agents to confirm that nothing of the run is left, if the workers will not be used again; seconds.
_UNPROVEN_S = 5.0
#: Time limit for that confirmation if the workers will be used again, seconds.
_FINISHED_S = 20.0


class LaunchShutdown:
    """Ends the ranks of a launch and releases its workers, for another launch if the end of their ranks is known."""

    def __init__(
        self,
        validated: ValidatedRequest,
        run_id: str,
        *,
        pool: WorkerPool,
        ranks: RankMonitor,
        view: LaunchView,
        starter: RankStarter,
    ) -> None:
        self._request, self._run_id, self._pool = validated.request, run_id, pool
        self._ranks, self._view, self._starter = ranks, view, starter
        #: Some nodes did not report their ranks' end, so that the workers cannot be used again.
        self.is_unproven = False

    def interrupt(self) -> None:
        """Send SIGINT to all ranks."""
        self._pool.agents.broadcast(agent.signal_ranks, int(signal.SIGINT), self._run_id)

    def stop_ranks(self) -> None:
        """Send SIGINT to all ranks and wait a little; a second interrupt ends them at once."""
        self._view.prefix, self._view.activity = "interrupted, stopping · ", ""
        self._ranks.mute()
        self._starter.cancel()
        try:
            self._starter.join(_INTERRUPT_S)
            if not self._starter.was_sent:
                return
            self.interrupt()
            self._view.pump_until(self._ranks.all_ended, _INTERRUPT_S)
        except KeyboardInterrupt:
            self._view.prefix = "interrupted twice, ending at once · "

    def release(self) -> None:
        """Remove what is left of the ranks, and release the workers."""
        can_keep = False
        try:
            self._finish()
            can_keep = not (self.is_unproven or self._starter.is_busy())
        finally:
            keep_s = choose_keep_s(self._request.options, self._request.env)
            worker_pools.release(self._pool, keep_s=keep_s if can_keep else 0)

    def run_shielded(self, target: Callable[[], None], activity: str) -> None:
        """Run something in a thread that no further interrupt reaches."""
        problems: list[BaseException] = []
        thread = start_thread(target, problems.append)
        is_quick = True
        while thread.is_alive():
            try:
                thread.join(_QUICK_S if is_quick else _STEP_S)
                is_quick = False
                if thread.is_alive():
                    self._view.show_progress(activity)
            except KeyboardInterrupt:
                self._view.prefix = "already stopping · "
        for problem in problems:
            self._view.print_line(str(problem), stream="stderr")

    def _finish(self) -> None:
        """Remove what is left of the ranks; the workers can be used again when every agent has confirmed it."""
        self._starter.cancel()
        self._starter.join(_CANCELLED_S)
        agents = self._pool.agents
        if self._starter.was_sent and not self._ranks.all_ended():
            agents.broadcast(agent.kill_ranks, self._run_id)
        calls = agents.broadcast(agent.finish_run, self._run_id)
        job = self._pool.group.job
        is_leaving = job is not None and job.state == models.LEAVING
        if not self._starter.was_sent or is_leaving:
            # An agent may import for a long time, or be gone; and containers that end leave nothing behind.
            return
        # Workers that are not used again are not worth a long wait.
        deadline = time.monotonic() + (_UNPROVEN_S if self.is_unproven else _FINISHED_S)
        for call in calls:
            call.wait(max(0.0, deadline - time.monotonic()))
        if not all(call.ready() for call in calls):
            self.is_unproven = True
