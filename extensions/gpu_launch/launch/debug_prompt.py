"""The debugger's prompt in the cell of a launch: for one rank at a time, and the launch continues between the prompts.

Where nobody can type, such as in a detached job, a line says how to reach the rank, which waits.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from gpu_launch.errors import GpuLaunchError
from gpu_launch.output.rank_monitor import StoppedRank
from gpu_launch.output.text import format_ranks
from gpu_launch.worker import agent
from gpu_launch.worker.debugger_client import USAGE, DebuggerAnswer

if TYPE_CHECKING:
    from gpu_launch.launch.workers.agent_client import AgentClient
    from gpu_launch.output.rank_monitor import RankMonitor
    from gpu_launch.output.screens import Screen

#: Ranks that reach the same breakpoint() do so within this time, seconds; one of them is debugged.
_GATHER_S = 0.5
_CALL_S = 10.0  # seconds for an agent to answer
_POLL_S = 0.02
_ENDS_SOON = (
    "The other ranks wait in their next collective until its timeout (torch's own: 10 min with NCCL, 30 min with "
    "gloo); with --debug {rank} they wait for a day."
)
_WAIT = "The other ranks wait in their next collective."


class DebugPrompt:
    """Debugs the ranks of one launch. For the thread that leads the launch."""

    def __init__(
        self,
        run_id: str,
        shown_run_id: str,
        *,
        agents: AgentClient,
        ranks: RankMonitor,
        screen: Screen,
        show_output: Callable[[], None],
        chosen: int | None,
    ) -> None:
        """`shown_run_id` is the run whose id the broker's job has; `show_output` shows what ranks have printed."""
        self._run_id, self._shown_run_id = run_id, shown_run_id
        self._agents, self._ranks, self._screen, self._show_output = agents, ranks, screen, show_output
        self._chosen = chosen
        self._stops: dict[int, StoppedRank] = {}
        self._gather_until = 0.0
        #: The rank that is debugged, and the call that asks its agent.
        self._rank: int | None = None
        self._call: Any = None
        self._has_explained = False

    def poll(self, now: float) -> None:
        """Ask the user for a line if a debugged rank waits for one; else return at once."""
        for stop in self._ranks.pop_stops():
            self._gather_until = self._gather_until if self._stops else now + _GATHER_S
            self._stops[stop.rank] = stop
        if self._rank is not None:
            self._poll_debugger()
        if self._stops and now >= self._gather_until:
            self._choose(self._stops)
            self._stops = {}

    def debug(self, rank: int) -> None:
        """Stop a rank and debug it until the user lets it run.

        Raises:
            GpuLaunchError: It cannot be stopped.
        """
        if reason := self._ask(rank, agent.stop_rank, self._run_id, rank):
            raise GpuLaunchError(str(reason))
        self._print(USAGE)
        deadline = time.monotonic() + _CALL_S
        while (answer := self._exchange(rank, None)).is_over:
            if time.monotonic() > deadline:
                raise GpuLaunchError(
                    f"Rank {rank} has not stopped within {_CALL_S:.0f} s: it is in native code such as a collective, "
                    "or another debugger is connected. %gpu_stacks shows where it is."
                )
            time.sleep(_POLL_S)
        try:
            while not answer.is_over:
                self._write(answer.text)
                line = _read_line(f"(rank {rank}) ") if answer.is_ready else None
                answer = self._exchange(rank, line)
                if not answer.is_ready:
                    self._show_output()
            self._write(answer.text)
        finally:
            self._leave(rank)

    def _choose(self, stops: dict[int, StoppedRank]) -> None:
        """Debug one of the ranks that have stopped, and let the others run on."""
        rank = self._rank if self._rank in stops else min(stops)
        others = sorted(stops.keys() - {rank})
        self._continue(others)
        stop = stops[rank]
        also = f"; {format_ranks(others)}, which stopped as well, continue{'s' if len(others) == 1 else ''}"
        what = f"failed at {stop.place}: {stop.detail}" if stop.detail else f"stopped at {stop.place}"
        self._print(f"rank {rank} on {stop.node} {what}{also if others else ''}")
        if can_type():
            if self._rank is not None and self._rank != rank:
                self._print(f"the debugger of rank {self._rank} is left")
                self._leave(self._rank)
            self._rank, self._call = rank, None
            if not self._has_explained:
                self._has_explained = True
                self._print(_WAIT if self._chosen is not None else _ENDS_SOON.format(rank=rank))
                self._write(f"{USAGE}\n")
            return
        self._print(f"it waits for the debugger: gpu-launch debug {self._shown_run_id} --rank {rank}")

    def _poll_debugger(self) -> None:
        rank = self._rank
        assert rank is not None  # noqa: S101 - the caller's check
        try:
            if self._call is None:
                self._call = self._start_call(rank, agent.exchange_with_debugger, self._run_id, rank, None)
            if not self._call.ready():
                return
            answer = DebuggerAnswer(**self._agents.wait(self._participant(rank), self._call, limit_s=_CALL_S))
        except (GpuLaunchError, LookupError):
            # The launch itself notices that a node is gone.
            self._rank = self._call = None
            return
        self._call = None
        if answer.is_ready:
            # What the rank printed before.
            self._show_output()
        self._write(answer.text)
        if answer.is_over:
            self._rank = None
        elif answer.is_ready and (line := _read_line(f"(rank {rank}) ")) is not None:
            with contextlib.suppress(GpuLaunchError, LookupError):
                self._call = self._start_call(rank, agent.exchange_with_debugger, self._run_id, rank, line)

    def _continue(self, ranks: Collection[int]) -> None:
        membership = self._ranks.membership
        if membership is None:
            return
        for number, participant in enumerate(membership.participants):
            first = number * membership.nproc_per_node
            own = tuple(rank for rank in ranks if first <= rank < first + membership.nproc_per_node)
            if own:
                with contextlib.suppress(GpuLaunchError, LookupError):
                    self._agents.call(participant, agent.continue_ranks, self._run_id, own)

    def _leave(self, rank: int) -> None:
        with contextlib.suppress(GpuLaunchError, LookupError):
            self._start_call(rank, agent.leave_debugger, self._run_id, rank)

    def _exchange(self, rank: int, line: str | None) -> DebuggerAnswer:
        return DebuggerAnswer(**self._ask(rank, agent.exchange_with_debugger, self._run_id, rank, line))

    def _ask(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._agents.wait(self._participant(rank), self._start_call(rank, function, *arguments), limit_s=_CALL_S)

    def _start_call(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._agents.call(self._participant(rank), function, *arguments)

    def _participant(self, rank: int) -> int | None:
        membership = self._ranks.membership
        if membership is None or rank >= membership.ranks:
            raise GpuLaunchError(f"Rank {rank} does not run.")
        return membership.participants[rank // membership.nproc_per_node]

    def _print(self, text: str) -> None:
        self._write("".join(f"gpu_launch: {line}\n" for line in text.splitlines()))

    def _write(self, text: str) -> None:
        if text:
            self._screen.write("stdout", text)
            self._screen.flush()


def can_type() -> bool:
    """Return whether the user can answer `input()` here: in a notebook that a person runs, or in a terminal."""
    if threading.current_thread() is not threading.main_thread():
        return False
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is not None:
        return bool(getattr(kernel, "_allow_stdin", False))
    return sys.stdin is not None and sys.stdin.isatty()


def _read_line(prompt: str) -> str | None:
    """Return what the user types; None after an interrupt, which whoever leads the launch handles as any other."""
    was_interrupted, line = False, None
    with _default_interrupts():
        try:
            line = input(prompt)
        except EOFError:
            line = "q"
        except KeyboardInterrupt:
            was_interrupted = True
    if was_interrupted:
        signal.raise_signal(signal.SIGINT)
    return line


@contextlib.contextmanager
def _default_interrupts() -> Iterator[None]:
    """Let interrupts end `input()`, also where they are counted otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
