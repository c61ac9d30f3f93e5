"""Runs one cell on the ranks of a session: sends it, follows it, collects ends and values, and describes a failure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from gpu_launch.common import exchange
from gpu_launch.common.exchange import CellSource
from gpu_launch.common.launch_spec import RankEnd
from gpu_launch.errors import LaunchFailed
from gpu_launch.output.failure import (
    find_first_failure,
    find_gpu_shortage,
    format_shortage,
    is_victim,
)
from gpu_launch.output.text import format_ranks
from gpu_launch.output.tracebacks import find_exception_line
from gpu_launch.sessions.channel import ControlMessage
from gpu_launch.sessions.executor import CellOutcome
from gpu_launch.sessions.session import RankSession
from gpu_launch.worker.gpu_monitor import format_gpu_name

#: Seconds for ranks to end after one has failed; ranks that wait for it in a collective never do.
PEER_TIMEOUT_S = 5.0
#: Seconds for ranks to return after an interrupt, which native code ignores; killed ones have ended within two seconds.
INTERRUPT_TIMEOUT_S = 1.5
_CHECK_TIMEOUT_S = 10.0  # seconds for ranks to add up one number
_CHECK_ANSWER_S = _CHECK_TIMEOUT_S + 2.0  # seconds for all ranks to report the sum
#: Describes a rank that did not return.
_KILLED = "did not return from the interrupt and was killed"


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """A cell to run."""

    source: CellSource
    body: str
    #: Empty for all.
    ranks: tuple[int, ...] = ()
    #: Names and values, pickled together; None if there are none.
    send: bytes | None = None
    #: Source of other cells by label, for tracebacks through functions that were sent.
    sources: Mapping[str, str] = field(default_factory=dict)
    returns: tuple[str, ...] = ()
    #: What a rank that exchanges variables must know of them, see `RankVariables.take`.
    variables: Mapping[str, Any] = field(default_factory=dict)


class CellRun:
    """One run of a cell. Not thread-safe."""

    def __init__(self, session: RankSession, cell: CellRequest, *, number: int) -> None:
        self._session, self._cell, self._number = session, cell, number
        self._ranks = cell.ranks or tuple(sorted(session.devices))
        self._end_messages: dict[int, ControlMessage] = {}
        self._check_results: dict[int, str] = {}
        #: What a rank sent of its variables after the cell.
        self.variables: ControlMessage | None = None
        self.state_machine = CellStateMachine(self._ranks)
        #: Sizes in bytes of the ranks' stdout and stderr, and the number of their displays, when they returned.
        self.written: dict[int, Sequence[int]] = {}

    def send(self) -> None:
        """Send the cell to its ranks."""
        cell = self._cell
        header = {
            "kind": "cell",
            "cell": self._number,
            "body": cell.body,
            "label": cell.source.label,
            "source": cell.source.source,
            "skipped": cell.source.skipped,
            "sources": dict(cell.sources),
            "returns": list(cell.returns),
            "variables": dict(cell.variables),
        }
        for rank in self._ranks:
            self._session.send(rank, header, () if cell.send is None else (cell.send,))

    def interrupt(self) -> None:
        """Interrupt the ranks that still run the cell."""
        for rank in self.state_machine.running:
            self._session.send(rank, {"kind": "interrupt", "cell": self._number})

    def poll(self, asked: int) -> None:
        """Process messages of the ranks; `asked` counts the user's interrupts.

        Raises:
            LaunchFailed: A rank is gone.
        """
        while self.state_machine.interrupt_count < asked:
            self.state_machine.request_interrupt()
        for message in self._session.poll():
            self._handle(message)

    def check_group(self) -> str:
        """Let all ranks check the process group; return its problem, empty if it is usable."""
        for rank in self._session.devices:
            self._session.send(rank, {"kind": "check", "number": self._number, "limit_s": _CHECK_TIMEOUT_S})
        deadline = time.monotonic() + _CHECK_ANSWER_S
        while len(self._check_results) < len(self._session.devices):
            if time.monotonic() > deadline:
                missing = sorted(self._session.devices.keys() - self._check_results.keys())
                return f"The process group is broken: ranks {missing} do not answer."
            self.poll(0)
        broken = {rank: problem for rank, problem in sorted(self._check_results.items()) if problem}
        return next((f"The process group is broken: on rank {rank} {text}." for rank, text in broken.items()), "")

    @property
    def has_failures(self) -> bool:
        """Return whether a rank has failed or did not return."""
        return any(end.outcome is not CellOutcome.DONE for end in self.ends())

    def ends(self) -> list[CellEnd]:
        """Return the end of the cell on each rank."""
        return [self._build_end(rank) for rank in self._ranks]

    def collect(self) -> dict[str, list[Any]]:
        """Return the values of the cell by name, in the order of the ranks.

        Raises:
            LaunchFailed: A value did not come back, or cannot be read here.
        """
        returned: dict[str, list[Any]] = {name: [] for name in self._cell.returns}
        problems: list[str] = []
        for rank in self._ranks:
            message = self._end_messages[rank]
            problems += [f"rank {rank}: {text}" for text in message.header["problems"]]
            for name, data in zip(self._cell.returns, message.frames, strict=True):
                returned[name].append(exchange.load_result(data, f"rank {rank}: {name}", problems))
        if problems:
            text = "\n".join(problems)
            raise LaunchFailed(f"The cell ended well, but not all variables were copied back:\n{text}")
        return returned

    def _handle(self, message: ControlMessage) -> None:
        header = message.header
        if header["kind"] == "ended" and header["cell"] == self._number:
            self._end_messages[message.rank] = message
            self.written[message.rank] = (*header["written"], header.get("displays", 0))
            self.state_machine.record_end(message.rank, CellOutcome(header["how"]), time.monotonic())
        elif header["kind"] == "checked" and header["number"] == self._number:
            self._check_results[message.rank] = header["problem"]
        elif header["kind"] == "variables" and header["cell"] == self._number:
            self.variables = message

    def _build_end(self, rank: int) -> CellEnd:
        node, message = self._session.nodes[rank], self._end_messages.get(rank)
        if message is None:
            return CellEnd(rank=rank, node=node, outcome=None)
        header = message.header
        return CellEnd(
            rank=rank,
            node=node,
            outcome=CellOutcome(header["how"]),
            error=header["error"],
            at_ns=header["at_ns"],
            gpu=self._session.devices[rank],
        )


class CellStep(Enum):
    """The next action for a cell."""

    WAIT = auto()
    #: Interrupt the ranks that still run; returned once.
    INTERRUPT = auto()
    #: All ranks have returned, not all without an error: check whether the group is still usable.
    CHECK = auto()
    #: The group is lost: a rank is dead or does not return.
    RESTART = auto()
    #: All ranks have ended without an error.
    DONE = auto()


class CellStateMachine:
    """State of one cell on the ranks."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ends: dict[int, CellOutcome] = {}
        self._ranks = frozenset(ranks)
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        self._is_dead = False
        #: Interrupts by the user.
        self.interrupt_count = 0

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ranks that have not returned."""
        return tuple(sorted(self._ranks - self._ends.keys()))

    def record_end(self, rank: int, how: CellOutcome, now: float) -> None:
        """Record that a rank has returned."""
        self._ends[rank] = how
        if how is not CellOutcome.DONE and self._failed_at is None:
            self._failed_at = now

    def mark_lost(self) -> None:
        """Record that a rank or a node is gone, whether it ran the cell or not."""
        self._is_dead = True

    def request_interrupt(self) -> None:
        """Record an interrupt by the user; a second one ends the wait for the ranks."""
        self.interrupt_count += 1

    def next_step(self, now: float) -> CellStep:
        """Return the next action; `now` never decreases."""
        if self._is_dead:
            return CellStep.RESTART
        if not self.running:
            is_well = all(how is CellOutcome.DONE for how in self._ends.values())
            return CellStep.DONE if is_well else CellStep.CHECK
        if self._interrupted_at is not None:
            is_over = now - self._interrupted_at >= INTERRUPT_TIMEOUT_S or self.interrupt_count > 1
            return CellStep.RESTART if is_over else CellStep.WAIT
        was_left = self._failed_at is not None and now - self._failed_at >= PEER_TIMEOUT_S
        if self.interrupt_count or was_left:
            self._interrupted_at = now
            return CellStep.INTERRUPT
        return CellStep.WAIT


@dataclass(frozen=True, kw_only=True)
class CellEnd:
    """The end of a cell on a rank; `outcome` is None if the rank did not return."""

    rank: int
    node: str
    outcome: CellOutcome | None
    error: str = ""
    at_ns: int = 0
    #: Name of the rank's GPU, empty if unknown.
    gpu: str = ""


def format_failure(ends: Sequence[CellEnd]) -> str:
    """Format the first failing rank's traceback, then one line for each way in which others ended."""
    first = _find_first_failure(ends)
    if first is None:
        return _describe_others(ends)
    shortage = find_gpu_shortage(first.error)
    rank_text = f"rank {first.rank} on {first.node}"
    head = (
        f"{rank_text} ran out of GPU memory: {format_shortage(shortage, format_gpu_name(first.gpu))}"
        if shortage
        else f"{rank_text} failed{' first' if sum(end.outcome is CellOutcome.FAILED for end in ends) > 1 else ''}"
    )
    others = _describe_others([end for end in ends if end is not first])
    return "\n".join([f"{head}:\n\n{first.error}\n", *([others] if others else [])])


def _find_first_failure(ends: Sequence[CellEnd]) -> CellEnd | None:
    """Return the rank to blame, by the rules for ranks of a launch."""
    failed = {end.rank: end for end in ends if end.outcome is CellOutcome.FAILED}
    first = find_first_failure(
        RankEnd(rank=end.rank, node=end.node, exit_code=1, error=end.error, at_ns=end.at_ns) for end in failed.values()
    )
    return None if first is None else failed[first.rank]


def _describe_others(ends: Sequence[CellEnd]) -> str:
    groups: dict[str, list[int]] = {}
    for end in ends:
        if text := _describe_end(end):
            groups.setdefault(text, []).append(end.rank)
    return "\n".join(f"{format_ranks(ranks)}: {_pluralize(text, ranks)}" for text, ranks in groups.items())


def _describe_end(end: CellEnd) -> str:
    match end.outcome:
        case CellOutcome.DONE:
            return ""
        case CellOutcome.INTERRUPTED:
            return "interrupted"
        case CellOutcome.FAILED:
            lost = is_victim(RankEnd(rank=end.rank, node=end.node, exit_code=1, error=end.error, at_ns=end.at_ns))
            return f"{'lost a peer, ' if lost else ''}{find_exception_line(end.error)}"
        case None:
            return _KILLED


def _pluralize(text: str, ranks: Sequence[int]) -> str:
    return text.replace("was", "were") if text == _KILLED and len(ranks) > 1 else text
