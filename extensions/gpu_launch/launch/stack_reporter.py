"""Shows where all ranks are: when the user asks for it, and once when no rank has made progress for a while.

Who asks writes `stacks.request` into the run's folder, from any notebook, terminal or laptop of the same user, and
reads `stacks.json`, see `output.stack_request`: the notebook of a running cell runs nothing else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpu_launch.common.launch_spec import Membership
from gpu_launch.errors import LaunchFailed
from gpu_launch.output import stack_request, stacks
from gpu_launch.output.stacks import RankStacks
from gpu_launch.output.text import format_exact_span
from gpu_launch.worker import agent

if TYPE_CHECKING:
    from gpu_launch.common.run_folder import RunFolder
    from gpu_launch.launch.workers.agent_client import AgentClient
    from gpu_launch.output.rank_monitor import RankMonitor

_CHECK_S = 1.0  # seconds between checks for a request
_ANSWER_S = 5.0  # seconds for the agents to answer
#: After a pause longer than this, seconds, the ranks were not watched, and their silence counts from its end.
_MAX_PAUSE_S = 2.0


class StallWatch:
    """Finds out that no rank makes progress; reports each silence once."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is the length of a silence, seconds; 0 for never."""
        self._limit_s = limit_s
        self._since: float | None = None
        self._polled_at = 0.0
        self._activity = -1
        self._was_reported = False

    def is_stalled(self, activity: int, now: float) -> bool:
        """Return True once for each silence that lasts for the limit.

        Args:
            activity: A number that changes with every sign of progress.
            now: Monotonic time, seconds.
        """
        if self._since is None or activity != self._activity or now - self._polled_at > _MAX_PAUSE_S:
            self._since, self._activity, self._was_reported = now, activity, False
        self._polled_at = now
        if not self._limit_s or self._was_reported or now - self._since < self._limit_s:
            return False
        self._was_reported = True
        return True


class StackReporter:
    """Collects the stacks of one launch; `poll` is called while its ranks run."""

    def __init__(
        self,
        run: RunFolder,
        *,
        pool: RunFolder,
        agents: AgentClient,
        ranks: RankMonitor,
        after_s: float,
        print_line: Callable[[str], None],
    ) -> None:
        """`pool` is the folder of the run whose id the broker's job has; it differs for a notebook's launches."""
        self._folders = (run,) if pool.root == run.root else (run, pool)
        self._run, self._agents, self._ranks, self._print = run, agents, ranks, print_line
        self._after_s, self._watch = after_s, StallWatch(after_s)
        self._thread: threading.Thread | None = None
        #: Set to wake the thread before its next check, and to end it.
        self._wake, self._is_closed = threading.Event(), threading.Event()
        self._is_stalled = False
        self._is_idle = False
        #: Texts to print, from the thread.
        self._texts: list[str] = []
        self._has_explained = False

    def set_idle(self, is_idle: bool) -> None:
        """Expect no progress of ranks that wait for a cell; from the end of that on, a silence counts as a new one."""
        self._is_idle, self._watch = is_idle, StallWatch(self._after_s)

    def poll(self, now: float) -> None:
        """Print what was collected, and have stacks collected if no rank makes progress; returns at once."""
        while self._texts:
            self._print(self._texts.pop(0))
        if self._thread is None:
            # File accesses of the home may hang, and agents may not answer.
            self._thread = threading.Thread(target=self._serve, name="gpu_launch stacks", daemon=True)
            self._thread.start()
        if not self._is_idle and self._watch.is_stalled(self._ranks.activity, now):
            self._is_stalled = True
            self._wake.set()

    def close(self) -> None:
        """Answer no more requests."""
        self._is_closed.set()
        self._wake.set()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            self._wake.wait(_CHECK_S)
            self._wake.clear()
            is_stalled, self._is_stalled = self._is_stalled, False
            taken = ((folder, stack_request.pop(folder)) for folder in self._folders)
            requests = {folder: request for folder, request in taken if request is not None}
            membership = self._ranks.membership
            if membership is not None and (requests or is_stalled) and not self._is_closed.is_set():
                self._report(membership, requests, is_stalled=is_stalled)

    def _report(self, membership: Membership, requests: Mapping[RunFolder, str], *, is_stalled: bool) -> None:
        found = self._collect(membership)
        if is_stalled:
            self._texts.append(self._explain_stall() + stacks.format_stacks(found).rstrip())
        for folder, request in requests.items():
            # A full disk must not end the launch; who asks gets no answer in time.
            with contextlib.suppress(OSError):
                stack_request.answer(folder, request, found)

    def _explain_stall(self) -> str:
        text = f"no rank has written or reported anything for {format_exact_span(self._after_s)}"
        if not self._has_explained:
            self._has_explained = True
            text += " (--stacks-after sets the time, 0s for never)"
        return f"{text}; "

    def _collect(self, membership: Membership) -> list[RankStacks]:
        """Return the stacks of all ranks; an agent that does not answer is the problem of its ranks."""
        nodes = [info.node for info in self._agents.node_infos(membership)]
        problems: dict[int, str] = {}
        calls = {}
        for number, participant in enumerate(membership.participants):
            try:
                calls[number] = self._agents.call(participant, agent.collect_stacks, self._run.run_id)
            except LaunchFailed as error:
                problems[number] = str(error)
        found: dict[int, RankStacks] = {}
        deadline = time.monotonic() + _ANSWER_S
        for number, call in calls.items():
            try:
                answers = self._agents.wait(
                    membership.participants[number], call, limit_s=max(0.1, deadline - time.monotonic())
                )
            except LaunchFailed:
                problems[number] = f"the agent did not answer within {_ANSWER_S:.0f} s"
                continue
            found |= {answer["rank"]: stacks.parse_answer(answer, nodes[number]) for answer in answers}
            problems.setdefault(number, "its processes have ended")
        per_node = membership.nproc_per_node
        return [
            found.get(rank)
            or RankStacks(rank=rank, node=nodes[rank // per_node], problem=problems.get(rank // per_node, ""))
            for rank in range(membership.ranks)
        ]
