"""The display of a running launch: its progress, and the output of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from gpu_launch.broker.holdings import format_holdings
from gpu_launch.broker.models import WAITING
from gpu_launch.common.launch_spec import Membership
from gpu_launch.common.secure_channel import OutputReceiver
from gpu_launch.launch import plan as plan_module
from gpu_launch.launch.request import ValidatedRequest
from gpu_launch.launch.workers.worker_group import WorkerGroup
from gpu_launch.launch.workers.worker_pool import WorkerPool
from gpu_launch.output import text as render
from gpu_launch.output.display_tabs import RankDisplay
from gpu_launch.output.panel import PanelView
from gpu_launch.output.rank_monitor import RankMonitor
from gpu_launch.output.screens import Screen, find_screen
from gpu_launch.units import format_span

_FLUSH_S = 0.05  # seconds between flushes to the notebook
_PANEL_S = 0.5  # seconds between updates of the panel


class LaunchView:
    """The display of the broker's job and the agents' messages on a screen."""

    def __init__(
        self,
        validated: ValidatedRequest,
        group: WorkerGroup,
        ranks: RankMonitor,
        sink: OutputReceiver,
        screen: Screen | None = None,
    ) -> None:
        self._validated, self._group, self._ranks, self._sink = validated, group, ranks, sink
        self._screen = screen or find_screen()
        #: Shown before every progress line, such as `restart 1 of 3 · `.
        self.prefix = ""
        #: The current activity of the launch, where job and ranks do not show it.
        self.activity = ""
        #: The grant that was announced last: the number of preemptions, and the members.
        self._announced: tuple[int, Membership] | None = None
        self._has_announced_holdings = False
        self._view_at = float("-inf")

    @property
    def screen(self) -> Screen:
        return self._screen

    def pump(self) -> None:
        """Show the progress, and new output, waiting a moment for it."""
        self._announce_holdings()
        self._announce_grant()
        self._show_state(time.monotonic())
        messages = self._sink.receive(int(_FLUSH_S * 1000))
        now = time.monotonic()
        texts, until = self._ranks.process(messages, now), now + _FLUSH_S
        # A browser cannot draw more often; the end is shown at once.
        while messages and now < until and not self._ranks.all_ended():
            messages = self._sink.receive(max(1, int((until - now) * 1000)))
            now = time.monotonic()
            texts += self._ranks.process(messages, now)
        self._show(texts)
        self._screen.show_displays(())

    def pump_until(self, condition: Callable[[], bool], limit_s: float = float("inf")) -> bool:
        """Pump until the condition is true or the time is over; return whether it is true."""
        deadline = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline:
            self.pump()
        return condition()

    def drain(self) -> None:
        """Show all output that has come, unended lines included."""
        while messages := self._sink.receive(0):
            self._show(self._ranks.process(messages, time.monotonic()))
        self._show(self._ranks.process((), time.monotonic(), last=True))
        self._screen.show_displays((), last=True)

    def show_progress(self, text: str) -> None:
        """Show the progress line alone, at once."""
        self._screen.show_progress(self.prefix + text)
        self._screen.show_panel(PanelView(is_closing=True))

    def print_line(self, text: str, *, stream: str = "stdout") -> None:
        """Print a line that stays."""
        self._screen.write(stream, f"gpu_launch: {text}\n")
        self._screen.flush()

    def describe_nodes(self) -> str:
        """Return who takes part, for a person."""
        membership = self._ranks.membership
        workers = [
            worker for worker in self._group.workers() if membership is None or worker.index in membership.workers
        ]
        return render.format_nodes(workers, self._validated.notebook_text)

    def announce_pool(self, pool: WorkerPool) -> None:
        """Print what the GPUs of a freed pool were used for, or once for each other pool that its workers stay."""
        job = pool.group.job
        if pool.is_freed and job is not None and job.costs:
            self.print_line(job.costs)
        if pool.is_freed or pool.was_announced or pool.group.is_notebook_only:
            return
        pool.was_announced = True
        workers = pool.group.workers()
        stay = "stays" if len(workers) == 1 else "stay"
        nodes, span = render.format_nodes(workers, ""), format_span(pool.keep_s)
        self.print_line(
            f"{nodes} {stay} with this notebook for {span} after a launch, or until others wait for GPUs; "
            "%gpu_release frees them now"
        )

    def _show(self, texts: list[tuple[str, str] | RankDisplay]) -> None:
        for shown in texts:
            if isinstance(shown, RankDisplay):
                self._screen.flush()
                self._screen.show_displays((shown,))
            else:
                self._screen.write(*shown)
        if texts:
            self._screen.flush()

    def _announce_holdings(self) -> None:
        """Announce once what the user holds, if the launch waits."""
        job = self._group.job
        if self._has_announced_holdings or job is None or job.state != WAITING:
            return
        self._has_announced_holdings = True
        for line in format_holdings(self._group.holdings, cancel="%gpu_cancel"):
            self.print_line(line)

    def _announce_grant(self) -> None:
        """Announce each grant once."""
        membership, job, plan = self._ranks.membership, self._group.job, self._validated.plan
        if membership is None or (grant := (job.preemptions if job else 0, membership)) == self._announced:
            return
        self._announced = grant
        if text := render.format_grant_note(job, self._group.workers(), plan.notebook_gpus):
            self.print_line(text)
        if plan.is_elastic:
            self.print_line(
                f"{membership.nnodes} of up to {render.format_count(plan.nnodes, 'node')}: {self.describe_nodes()}"
            )

    def _show_state(self, now: float) -> None:
        self._screen.show_progress(self.prefix + (self.activity or self._state()), phase=self._phase())
        if now - self._view_at >= _PANEL_S:
            self._view_at = now
            self._screen.show_panel(self._ranks.build_view())

    def _phase(self) -> str:
        """Return the phase whose time is shown; the text of one may change, with the place in the queue."""
        job = self._group.job
        if self.activity:
            return ""
        if self._ranks.all_started():
            return "running"
        return job.state if job is not None else ""

    def _state(self) -> str:
        job, plan = self._group.job, self._validated.plan
        if self._ranks.all_started():
            return self._ranks.format_waiting() or f"running on {self.describe_nodes()}"
        if not self._group.is_notebook_only and job is None:
            return f"asking for {plan_module.format_requested_gpus(plan)}"
        if job is not None and not self._group.is_started():
            return plan_module.format_job_state(job, plan, datetime.now(UTC))
        return f"starting {render.format_count(self._ranks.rank_count, 'rank')} on {self.describe_nodes()}"
