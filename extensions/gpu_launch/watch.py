"""What a launch shows while it goes on: where it is, and what its ranks say."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from gpu_launch import render
from gpu_launch.containers import Containers
from gpu_launch.display import Screen, find_screen
from gpu_launch.output import Sink
from gpu_launch.panel import View
from gpu_launch.progress import Ranks
from gpu_launch.request import Checked
from gpu_launch.roster import Roster

_FLUSH_S = 0.05  # seconds between flushes to the notebook
_VIEW_S = 0.5  # seconds between looks at what the panel shows


class Watch:
    """Shows the broker's job and the agents' messages."""

    def __init__(
        self, checked: Checked, gang: Containers, ranks: Ranks, sink: Sink, screen: Screen | None = None
    ) -> None:
        self._checked, self._gang, self._ranks, self._sink = checked, gang, ranks, sink
        self._screen = screen or find_screen()
        #: Before every progress line, such as `restart 1 of 3 · `.
        self.prefix = ""
        #: What the launch does, where that is not seen from job and ranks.
        self.doing = ""
        #: The grant that has been told of: how often the job had been preempted, and with whom it goes on.
        self._noted: tuple[int, Roster] | None = None
        self._view_at = float("-inf")

    def pump(self) -> None:
        """Show what the launch does, and what has come, waiting a moment for it."""
        self._note()
        self._show_state(time.monotonic())
        messages = self._sink.receive(int(_FLUSH_S * 1000))
        now = time.monotonic()
        texts, until = self._ranks.take(messages, now), now + _FLUSH_S
        # Shown not more often than a browser can draw; the end is waited for no longer than it takes.
        while messages and now < until and not self._ranks.all_ended():
            messages = self._sink.receive(max(1, int((until - now) * 1000)))
            now = time.monotonic()
            texts += self._ranks.take(messages, now)
        self._show(texts)

    def pump_until(self, condition: Callable[[], bool], limit_s: float = float("inf")) -> bool:
        """Go on showing until the condition is true, or the time over; whether it is true."""
        deadline = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline:
            self.pump()
        return condition()

    def drain(self) -> None:
        """Show the rest, unended lines included."""
        while messages := self._sink.receive(0):
            self._show(self._ranks.take(messages, time.monotonic()))
        self._show(self._ranks.take((), time.monotonic(), last=True))

    def tell(self, text: str) -> None:
        """Show the progress line alone, at once."""
        self._screen.progress(self.prefix + text)
        self._screen.panel(View(is_closing=True))

    def say(self, text: str, *, stream: str = "stdout") -> None:
        """Show a line that stays."""
        self._screen.write(stream, f"gpu_launch: {text}\n")
        self._screen.flush()

    def nodes(self) -> str:
        """Who takes part, for a person."""
        roster = self._ranks.roster
        workers = [one for one in self._gang.workers() if roster is None or one.index in roster.workers]
        return render.nodes_text(workers, self._checked.own_text)

    def _show(self, texts: list[tuple[str, str]]) -> None:
        for stream, text in texts:
            self._screen.write(stream, text)
        if texts:
            self._screen.flush()

    def _note(self) -> None:
        """Once for each grant: what is to be said of it."""
        roster, job, plan = self._ranks.roster, self._gang.job, self._checked.plan
        if roster is None or (grant := (job.preemptions if job else 0, roster)) == self._noted:
            return
        self._noted = grant
        if text := render.note_text(job, self._gang.workers(), plan.own_cards):
            self.say(text)
        if plan.is_elastic:
            self.say(f"{roster.nnodes} of up to {render.count(plan.nnodes, 'node')}: {self.nodes()}")

    def _show_state(self, now: float) -> None:
        self._screen.progress(self.prefix + (self.doing or self._state()), phase=self._phase())
        if now - self._view_at >= _VIEW_S:
            self._view_at = now
            self._screen.panel(self._ranks.view())

    def _phase(self) -> str:
        """What a time is counted for: the text of a place in the queue changes while one waits."""
        job = self._gang.job
        if self.doing:
            return ""
        if self._ranks.is_running():
            return "running"
        return job.state if job is not None else ""

    def _state(self) -> str:
        job, plan = self._gang.job, self._checked.plan
        if self._ranks.is_running():
            return self._ranks.waiting_text() or f"running on {self.nodes()}"
        if not self._gang.is_alone and job is None:
            return f"asking for {render.asked_text(plan)}"
        if job is not None and not self._gang.is_started():
            return render.job_text(job, plan, datetime.now(UTC))
        return f"starting {render.count(self._ranks.total, 'rank')} on {self.nodes()}"
