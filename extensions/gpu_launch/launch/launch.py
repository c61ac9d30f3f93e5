"""One launch, from the request for its workers to their release.

`Launch` owns the state machine of `state`; the other modules are parts that it calls: `startup` starts the ranks,
`restart` notices changes of members, ends the ranks and asks for missing nodes, `view` shows all of it, and `shutdown`
ends what is left and releases the workers.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from gpu_launch.broker import models
from gpu_launch.common import exchange as exchanges
from gpu_launch.common import network, run_folder
from gpu_launch.common.exchange import ExchangeFiles
from gpu_launch.common.launch_spec import Membership
from gpu_launch.common.secure_channel import OutputReceiver
from gpu_launch.errors import GpuLaunchError, LaunchFailed, LaunchInterrupted
from gpu_launch.launch.debug_prompt import DebugPrompt
from gpu_launch.launch.experiment_log import ExperimentLog, find_settings
from gpu_launch.launch.membership import MembershipChange, check_enough_nodes, format_lost_worker
from gpu_launch.launch.request import ValidatedRequest
from gpu_launch.launch.restart import RestartController, ScaleUp
from gpu_launch.launch.shutdown import LaunchShutdown
from gpu_launch.launch.stack_reporter import StackReporter
from gpu_launch.launch.startup import RankStarter
from gpu_launch.launch.state import LaunchResult, LaunchState, check_transition, write_status
from gpu_launch.launch.view import LaunchView
from gpu_launch.launch.workers.worker_pool import WorkerPool, worker_pools
from gpu_launch.output import failure, text
from gpu_launch.output.rank_monitor import RankMonitor
from gpu_launch.output.screens import Screen

_STARTED_S = 10.0  # seconds for all starts to be confirmed after the first failure
_HARDWARE_S = 6.0  # seconds until the broker knows what the driver reports of a GPU
_NETWORK_S = 2.0  # seconds for this container's network to be there


class Launch:
    """One run of a checked request, on a worker pool that no other launch uses until the end."""

    def __init__(
        self,
        validated: ValidatedRequest,
        *,
        pool: WorkerPool,
        screen: Screen | None = None,
        run: run_folder.RunFolder | None = None,
        exchange: ExchangeFiles | None = None,
        sink: OutputReceiver | None = None,
        shows_ranks: bool = True,
        is_logged: bool = False,
    ) -> None:
        """`is_logged`: in MLflow too, where the environment names its server."""
        self._validated, self._pool, self._exchange = validated, pool, exchange
        self._group, self._agents, self._options = pool.group, pool.agents, validated.request.options
        self._began = time.monotonic()
        env = validated.request.env
        self.run_folder = run or run_folder.create_run(env.home)
        self.run_folder.heartbeat.touch()
        self._logs = run_folder.shorten_path(self.run_folder.logs, env.home)
        plan = validated.plan
        self._experiment = ExperimentLog(
            find_settings(validated, os.environ, self.run_folder.run_id) if is_logged else None
        )
        self._ranks = RankMonitor(
            self._options,
            nnodes=plan.nnodes,
            nproc_per_node=plan.nproc_per_node,
            shows_ranks=shows_ranks,
            on_report=self._experiment.report,
        )
        self._scale_up = ScaleUp(pool.group)
        self._sink = sink or OutputReceiver(network.find_own_interface(env.subnet, wait_s=_NETWORK_S).address)
        self._view = LaunchView(validated, pool.group, self._ranks, self._sink, screen)
        self._starter = RankStarter(
            validated,
            self.run_folder,
            pool=pool,
            ranks=self._ranks,
            channel=self._sink.channel,
            exchange=str(self.run_folder.exchange) if exchange is not None else "",
            build_environ=self._experiment.build_rank_environ,
        )
        self._controller = RestartController(
            validated,
            run_id=self.run_folder.run_id,
            logs=self._logs,
            pool=pool,
            ranks=self._ranks,
            view=self._view,
            starter=self._starter,
        )
        self._stacks = StackReporter(
            self.run_folder,
            pool=pool.group.run,
            agents=self._agents,
            ranks=self._ranks,
            after_s=self._options.stacks_after_s,
            print_line=self._view.print_line,
        )
        self._debugger = DebugPrompt(
            self.run_folder.run_id,
            pool.group.run.run_id,
            agents=self._agents,
            ranks=self._ranks,
            screen=self._view.screen,
            show_output=self._view.pump,
            chosen=self._options.debug,
        )
        self._shutdown = LaunchShutdown(
            validated, self.run_folder.run_id, pool=pool, ranks=self._ranks, view=self._view, starter=self._starter
        )
        self._state = LaunchState.STARTING
        self._restarts = 0
        #: When GPUs were requested last, by the monotonic clock.
        self._requested_at = time.monotonic()

    @property
    def ranks(self) -> RankMonitor:
        """The observed state of the ranks."""
        return self._ranks

    @property
    def state(self) -> LaunchState:
        return self._state

    def run(self) -> LaunchResult:
        """Run to the end.

        Raises:
            LaunchFailed, LaunchInterrupted: after all ranks have ended and the workers are released.
        """
        outcome = "failed"
        try:
            self.begin()
            while self.step():
                pass
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            self._shutdown.stop_ranks()
            raise LaunchInterrupted(f"every rank is stopped. Logs: {self._logs}") from None
        finally:
            self.end(outcome)
        return self.result()

    def result(self) -> LaunchResult:
        """Return the result of a launch that ended well.

        Raises:
            LaunchFailed: where a requested value did not come back.
        """
        results: list[Any] = []
        returned: dict[str, list[Any]] = {}
        if self._exchange is not None:
            results, returned = exchanges.collect_results(self.run_folder.exchange, self._ranks.rank_count)
        return LaunchResult(
            run_id=self.run_folder.run_id,
            seconds=self._seconds,
            ranks=self._ranks.rank_count,
            nodes=self._ranks.node_names(),
            logs=self.run_folder.logs,
            results=results,
            returned=returned,
        )

    def begin(self) -> None:
        """Start the ranks; return when every node has confirmed the start, or the ranks have ended already.

        Raises:
            LaunchFailed: as `run` does.
        """
        for note in worker_pools.pop_notes():
            self._view.print_line(note)
        self._experiment.start()
        if self._validated.request.cell is not None:
            self.run_folder.cell.write_text(self._validated.request.cell)
        if self._exchange is not None:
            self._exchange.write(self.run_folder.exchange)
        self._starter.start()
        while self._observe_start() is not LaunchState.RUNNING and self.step():
            pass

    def step(self) -> bool:
        """Show new output, waiting a moment for it, and act on events; return False when all ranks have ended well.

        Raises:
            LaunchFailed: for a failure after which the ranks are not started again.
        """
        self._check()
        self._view.pump()
        if self._ranks.has_succeeded():
            self._view.drain()
            return False
        # A change comes before a failure: ranks that write checkpoints need more time than failing ones get.
        change = self._controller.pending_change()
        if change is None and (self._ranks.has_failed() or self._ranks.all_ended()):
            change = self._controller.refresh_pending_change()
            if change is None:
                change = self._handle_failure()
            if change is None:
                self._restart_after_failure()
        if change is not None:
            self._change_members(change)
        return True

    def drain(self) -> None:
        """Show all output that has come, unended lines included; the ranks continue."""
        self._view.drain()

    def debug(self, rank: int) -> None:
        """Stop a rank and debug it in this cell, until the user lets it run.

        Raises:
            GpuLaunchError: It cannot be stopped.
        """
        self._debugger.debug(rank)

    def set_idle(self, is_idle: bool) -> None:
        """Note whether the ranks wait for a cell: those that do are not expected to make progress."""
        self._stacks.set_idle(is_idle)

    def interrupt(self) -> None:
        """Send SIGINT to all ranks."""
        self._shutdown.interrupt()

    def end(self, outcome: str) -> None:
        """End what is left of the ranks, and release the workers; `outcome` is for the closing line."""
        if self._state is LaunchState.ENDED:
            return
        self._enter(LaunchState.ENDED)
        self._stacks.close()
        nodes = self._view.describe_nodes()
        self._shutdown.run_shielded(
            self._shutdown.release, "stopping" if self._group.is_notebook_only else "freeing the GPUs"
        )
        self._shutdown.run_shielded(partial(self._experiment.finish, outcome, nodes), "logging in MLflow")
        self._print_notes()
        self._view.prefix = ""
        self._sink.close()
        write_status(self.run_folder, outcome)
        self.run_folder.heartbeat.unlink(missing_ok=True)
        self._seconds = time.monotonic() - self._began
        ranks = f"{text.format_count(self._ranks.rank_count, 'rank')} on {nodes}"
        self._view.show_progress(f"{outcome} {'in' if outcome == 'done' else 'after'} {self._seconds:.1f} s · {ranks}")
        self._view.announce_pool(self._pool)

    # -- the state machine ----------------------------------------------------------------------------------------

    def _enter(self, state: LaunchState) -> None:
        """Change the state; nothing else does."""
        check_transition(self._state, state)
        self._state = state

    def _observe_start(self) -> LaunchState:
        """Return the state, which is RUNNING as soon as every node has confirmed the start."""
        if self._state in (LaunchState.STARTING, LaunchState.RESTARTING) and self._starter.is_confirmed:
            self._enter(LaunchState.RUNNING)
        return self._state

    def _handle_failure(self) -> MembershipChange | None:
        """End the other ranks after a failure; return the change of members that was its cause, None for no change.

        Raises:
            LaunchFailed: for nodes that do not report their end.
        """
        self._enter(LaunchState.RESTARTING)
        self._controller.await_failures()
        change = self._controller.refresh_pending_change()
        if change is not None:
            return change
        self._starter.join(_STARTED_S)
        if not self._ranks.all_ended():
            # A node that does not report its end may be the reason why the others failed.
            self._shutdown.is_unproven = True
            self._group.check()
            self._check_silent()
        return self._controller.await_reason()

    def _restart_after_failure(self) -> None:
        """Start all ranks again.

        Raises:
            LaunchFailed: where no restart is left, or the failed start was never confirmed.
        """
        if self._restarts >= self._options.max_restarts or not self._starter.is_confirmed:
            raise LaunchFailed(self._describe_failure())
        self._count_restart()
        self._start_again()

    def _describe_failure(self) -> str:
        """Describe the failure of the ranks, and defects of their GPUs, which the driver may report after it."""
        failure_text = self._ranks.describe_failure(logs=self._logs)
        nodes = self._ranks.node_names()
        problems = self._group.list_gpu_problems(nodes)
        deadline = time.monotonic() + (_HARDWARE_S if failure.may_be_hardware(failure_text) else 0.0)
        while not problems and time.monotonic() < deadline:
            self._view.pump_until(lambda: False, 1.0)
            problems = self._group.list_gpu_problems(nodes)
        return failure.add_gpu_problems(failure_text, problems)

    def _change_members(self, change: MembershipChange) -> None:
        """End the ranks with checkpoints, and start them again: when granted again, or on the nodes that are there.

        Raises:
            LaunchFailed: where this job ends, too few nodes are left, or a lost one was one too many.
        """
        membership = self._ranks.membership
        assert membership is not None  # noqa: S101 - without members none can change
        self._enter(LaunchState.CHANGING_MEMBERS)
        self._controller.end_with_checkpoints(change, membership)
        if self._ranks.has_succeeded():
            return
        if change.is_final:
            raise LaunchFailed(f"the job was ended. Logs: {self._logs}")
        if change.is_complete:
            preemptions = self._controller.await_requeue(membership)
            self._view.prefix = f"preempted {text.format_times(preemptions)} · "
            self._requested_at = time.monotonic()
        else:
            self._drop_members(change, membership)
        self._agents.forget(change.leaving)
        self._enter(LaunchState.RESTARTING)
        self._start_again()

    def _drop_members(self, change: MembershipChange, membership: Membership) -> None:
        remaining, plan = membership.without(change.leaving), self._validated.plan
        if len(remaining.participants) + len(change.joined) < plan.least_nnodes:
            check_enough_nodes(remaining, plan)
        if change.lost is not None:
            if self._restarts >= self._options.max_restarts:
                raise LaunchFailed(format_lost_worker(change.lost, logs=self._logs))
            self._count_restart()
        if change.leaving:
            self._group.drop_workers(change.leaving)

    def _count_restart(self) -> None:
        self._restarts += 1
        self._view.prefix = f"restart {self._restarts} of {self._options.max_restarts} · "

    def _start_again(self) -> None:
        self._controller.stop_starting()
        self._ranks.start_next_attempt()
        self._view.activity = ""
        self._starter.restart(restarts=self._restarts)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise the failure of a start, a worker or the request, unless a change of members explains it."""
        self._print_notes()
        try:
            self._starter.raise_error()
            self._group.check()
            self._check_wait()
            if not self._ranks.has_failed() and self._controller.pending_change() is None:
                self._check_silent()
        except GpuLaunchError:
            if self._controller.refresh_pending_change() is None:
                raise
        is_running = self._observe_start() is LaunchState.RUNNING
        if is_running:
            self._stacks.poll(time.monotonic())
            self._debugger.poll(time.monotonic())
        if is_running and self._validated.plan.is_elastic:
            self._scale_up.poll()

    def _print_notes(self) -> None:
        for part in (self._starter, self._scale_up, self._experiment):
            for note in part.pop_notes():
                self._view.print_line(note)

    def _check_silent(self) -> None:
        if silent := self._controller.find_silent():
            self._shutdown.is_unproven = True
            self._controller.raise_silent(silent)

    def _check_wait(self) -> None:
        limit_s, job = self._options.timeout_s, self._group.job
        if limit_s is None or self._group.is_notebook_only or (job is not None and job.state != models.WAITING):
            return
        if time.monotonic() - self._requested_at > limit_s:
            reason = f": {job.waiting_for}" if job is not None and job.waiting_for else ""
            after = "It was not started again." if self._ranks.attempt else "Nothing was started."
            raise LaunchFailed(f"No GPUs were free within {limit_s:g} s (--timeout-s){reason}. {after}")
