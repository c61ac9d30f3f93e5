"""State of a launch's ranks, from the agents' messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gpu_launch.common.displays import parse_display
from gpu_launch.common.launch_spec import Membership, RankEnd
from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output import failure
from gpu_launch.output.display_order import DisplayOrder
from gpu_launch.output.display_tabs import RankDisplay
from gpu_launch.output.formatter import OutputFormatter
from gpu_launch.output.panel import PanelView, RankState
from gpu_launch.output.progress_bars import ProgressTracker
from gpu_launch.output.text import format_ranks
from gpu_launch.worker.gpu_monitor import GpuSample, parse_gpu_reading

#: A node is silent after this many seconds: its agent sends a heartbeat every second.
SILENCE_S = 10.0
#: A node that is silent for this many seconds is reported as lost if a peer's connection broke.
_LOST_AFTER_S = 2.5
#: Seconds after which a silent node whose engine still runs counts as stalled: its file accesses hang, such as those of
#: its home.
STALLED_S = 60.0
#: After a pause longer than this, seconds, this process cannot know which nodes were silent.
_MAX_PAUSE_S = 2.0
#: Seconds after which finished ranks are reported while others still run.
_WAITING_AFTER_S = 1.0
_MAX_STOP_TEXT = 500  # characters
_END_FIELDS = frozenset(item.name for item in fields(RankEnd))


@dataclass(frozen=True, kw_only=True)
class StoppedRank:
    """A rank that waits for a debugger; `detail` is the exception's last line, empty at a breakpoint."""

    rank: int
    node: str
    place: str
    detail: str


@dataclass
class _NodeStatus:
    name: str
    seen_at: float
    code: int | None = None
    failure_note: str = ""
    is_terminating: bool = False
    gpus: tuple[GpuSample, ...] = ()


class RankMonitor:
    """Processes the agents' messages."""

    def __init__(
        self,
        options: LaunchOptions,
        *,
        nnodes: int,
        nproc_per_node: int,
        shows_ranks: bool = True,
        on_report: Callable[[Any, Any], None] = lambda _step, _metrics: None,
    ) -> None:
        """`on_report` gets step and metrics of each report of rank 0, as they were sent."""
        self._on_report = on_report
        self._options = options
        #: Maximum number of nodes, and of ranks on each, that an attempt may have.
        self._nnodes, self._nproc_per_node = nnodes, nproc_per_node
        self.attempt = 0
        #: The nodes of this attempt; None until that is decided.
        self.membership: Membership | None = None
        self._nodes: dict[int, _NodeStatus] = {}
        self._ends: dict[int, RankEnd] = {}
        self._progress = ProgressTracker()
        #: Changes with every output, report and end of a rank.
        self.activity = 0
        self._shows_ranks = shows_ranks
        self._display_order = DisplayOrder()
        self._stops: list[StoppedRank] = []
        self._formatter = OutputFormatter(self._progress, shows_all=options.detach, shows_ranks=shows_ranks)
        self._now = 0.0
        #: Stays set if an interrupt ends `process`.
        self._is_processing = False
        #: Time at which the first rank of this attempt finished; None before that.
        self._finished_at: float | None = None

    def process(
        self, messages: Iterable[Mapping[str, Any]], now: float, *, last: bool = False
    ) -> list[tuple[str, str] | RankDisplay]:
        """Process messages and return what to show, in order of arrival: displays, and (stream, text) with neighbours
        of one stream joined.
        """
        if self._is_processing:
            self._formatter.reset()
        self._advance_clock(now)
        self._is_processing = True
        shown: list[tuple[str, str] | RankDisplay] = []
        for message in self._split_output(messages):
            if message["attempt"] == self.attempt:
                self._handle(message, now)
                if due := self._display_order.pop_due():
                    shown += [*self._formatter.drain(self._active_ranks(), now), *due]
        shown += self._formatter.drain(self._active_ranks(), now, last=last)
        if last:
            shown += self._display_order.pop_due(everything=True)
        if not self._is_single:
            shown += [
                RankDisplay(rank=rank, node=self._nodes[rank // self._per_node].name, bars=bars)
                for rank, bars in self._progress.pop_redrawn().items()
            ]
        self._is_processing = False
        return shown

    def _split_output(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Return the messages, those with output of a single rank in parts between which a display may come."""
        for message in messages:
            if message["kind"] != "output" or not self._is_single or message["attempt"] != self.attempt:
                yield message
                continue
            yield {**message, "entries": []}
            for entry in message["entries"]:
                for part in self._display_order.split(entry):
                    yield {**message, "entries": [part]}

    @property
    def _is_single(self) -> bool:
        """Return whether one rank alone shows something, as a notebook's kernel does."""
        return not self._shows_ranks or self.rank_count == 1

    def _add_display(self, message: Mapping[str, Any], node: str) -> None:
        with contextlib.suppress(UsageError):
            self._display_order.add(
                RankDisplay(
                    rank=int(message["rank"]),
                    node=node,
                    display=parse_display(message["display"]),
                    is_only_rank=self._is_single,
                )
            )

    def mute(self) -> None:
        """Show no more output: after an interrupt the ranks' own error messages are noise."""
        self._formatter.mute()

    @property
    def rank_count(self) -> int:
        """Return the number of ranks of this attempt; the most possible before that is decided."""
        return self._nnodes * self._nproc_per_node if self.membership is None else self.membership.ranks

    def pop_stops(self) -> list[StoppedRank]:
        """Return the ranks that have stopped for a debugger since the last call."""
        stops, self._stops = self._stops, []
        return stops

    def start_next_attempt(self) -> None:
        """Begin the next attempt, after showing why the current one failed, if it did."""
        first = self.find_first_failure()
        is_to_blame = first is not None and failure.grade_failure(first) < failure.VICTIM
        text = failure.describe_failure(self._all_ends(), lost=self._describe_silent_nodes()) if is_to_blame else ""
        self._formatter.restart(text, self._now)
        self.attempt += 1
        self.membership = None
        self._nodes.clear()
        self._ends.clear()
        self._progress.clear()
        self._stops.clear()
        self._display_order = DisplayOrder()
        self._finished_at = None

    def start_cell(self) -> None:
        """Forget the progress of the cell before."""
        self._progress.clear()

    def all_started(self) -> bool:
        """Return whether ranks were started on every node."""
        return self.membership is not None and len(self._nodes) == self.membership.nnodes

    def all_ended(self) -> bool:
        """Return whether the ranks of every node have ended."""
        return self.all_started() and all(node.code is not None for node in self._nodes.values())

    def has_failed(self) -> bool:
        """Return whether a rank, or a process that starts ranks, has failed."""
        return any(node.code for node in self._nodes.values()) or any(end.exit_code for end in self._ends.values())

    def find_first_failure(self) -> RankEnd | None:
        """Return the rank to blame among those that have ended so far; None if none has failed."""
        return failure.find_first_failure(end for end in self._ends.values() if end.exit_code is not None)

    def has_succeeded(self) -> bool:
        """Return whether every rank has ended well."""
        return self.all_ended() and not self.has_failed()

    def terminating_nodes(self) -> frozenset[int]:
        """Return node ranks whose containers got SIGTERM and reported it."""
        return frozenset(rank for rank, node in self._nodes.items() if node.is_terminating)

    def running_nodes(self) -> frozenset[int]:
        """Return node ranks whose ranks still run, as far as known."""
        return frozenset(rank for rank, node in self._nodes.items() if node.code is None)

    def ended_nodes(self) -> frozenset[int]:
        """Return node ranks that have reported the end of their ranks."""
        return frozenset(rank for rank, node in self._nodes.items() if node.code is not None)

    def silent_nodes(self, limit_s: float = SILENCE_S) -> frozenset[int]:
        """Return node ranks that have sent no message for longer than the limit, without having reported an end."""
        return frozenset(self._find_silent(limit_s))

    def node_names(self) -> tuple[str, ...]:
        """Return the nodes' names by node rank."""
        return tuple(node.name for _, node in sorted(self._nodes.items()))

    def check_alive(self, gone: Collection[int]) -> None:
        """Check the node ranks `gone`, whose engines are lost.

        Raises:
            LaunchFailed: One of them has been silent for too long.
        """
        if silent := [rank for rank in self._find_silent(SILENCE_S) if rank in gone]:
            names = " and ".join(self._nodes[rank].name for rank in silent)
            ranks = format_ranks([number for rank in silent for number in self._ranks_of(rank)])
            if not set(silent).isdisjoint(self._find_silent(STALLED_S)):
                raise LaunchFailed(
                    f"{names} sent no message about {ranks} for {STALLED_S:.0f} s, although the worker runs: its file "
                    "accesses hang, such as those to the home."
                )
            text = f"{'has' if len(silent) == 1 else 'have'} not sent a message for {SILENCE_S:.0f} s"
            raise LaunchFailed(f"{names} {text}: the worker or the node is gone, and with it {ranks}.")

    def describe_failure(self, *, logs: str) -> str:
        """Describe the failure, beginning with the first failing rank's own error."""
        if any(end.exit_code for end in self._ends.values()):
            return failure.describe_failure(self._all_ends(), logs=logs, lost=self._describe_silent_nodes())
        notes = [
            f"The ranks on {node.name} could not be run: {node.failure_note.strip()}"
            for node in self._nodes.values()
            if node.failure_note.strip()
        ]
        return "\n".join([*(notes or ["The ranks ended without an error message."]), f"Logs: {logs}"])

    def build_view(self) -> PanelView:
        """Build the view for the panel."""
        gpus = [gpu for _, node in sorted(self._nodes.items()) for gpu in node.gpus]
        return PanelView(bars=self._progress.bars(), gpus=tuple(gpus), ranks=self._group_by_state())

    def format_waiting(self) -> str:
        """Return `rank 0 has finished, waiting for ranks 1-2`, or an empty string if that is not worth a message."""
        if self._finished_at is None or self._now - self._finished_at < _WAITING_AFTER_S:
            return ""
        states = self._group_by_state()
        finished, running = states.get(RankState.FINISHED, ()), states.get(RankState.RUNNING, ())
        if not finished or not running:
            return ""
        verb = "has" if len(finished) == 1 else "have"
        return f"{format_ranks(finished)} {verb} finished, waiting for {format_ranks(running)}"

    @property
    def _per_node(self) -> int:
        return self._nproc_per_node if self.membership is None else self.membership.nproc_per_node

    def _ranks_of(self, node_rank: int) -> range:
        return range(node_rank * self._per_node, (node_rank + 1) * self._per_node)

    def _group_by_state(self) -> dict[RankState, tuple[int, ...]]:
        groups: dict[RankState, list[int]] = {}
        for rank in range(self.rank_count if self._nodes else 0):
            groups.setdefault(self._find_state(rank), []).append(rank)
        return {state: tuple(groups[state]) for state in RankState if state in groups}

    def _find_state(self, rank: int) -> RankState:
        end, node = self._ends.get(rank), self._nodes.get(rank // self._per_node)
        if end is not None and end.exit_code == 0:
            return RankState.FINISHED
        if end is not None:
            return RankState.STOPPED if failure.grade_failure(end) == failure.STOPPED else RankState.FAILED
        if node is None:
            return RankState.STARTING
        return RankState.RUNNING if node.code is None else RankState.STOPPED

    def _active_ranks(self) -> frozenset[int]:
        """Return the ranks that may still write output that is shown."""
        return frozenset(
            rank
            for rank in range(self.rank_count)
            if rank not in self._ends and any(self._shows(rank, stream) for stream in ("stdout", "stderr"))
        )

    def _shows(self, rank: int, stream: str) -> bool:
        return self._options.shows(rank % self._per_node, stream)

    def _find_silent(self, limit_s: float) -> list[int]:
        return [rank for rank, node in self._nodes.items() if node.code is None and self._now - node.seen_at > limit_s]

    def _advance_clock(self, now: float) -> None:
        """Advance the clock.

        The time of a blocked terminal, a slow home or a sleeping machine does not count as silence.
        """
        away_s = now - self._now
        if away_s > _MAX_PAUSE_S:
            for node in self._nodes.values():
                node.seen_at += away_s
        self._now = now

    def _describe_silent_nodes(self) -> list[str]:
        return [
            f"no message from {self._nodes[rank].name} ({format_ranks(self._ranks_of(rank))}) "
            f"for {self._now - self._nodes[rank].seen_at:.0f} s"
            for rank in self._find_silent(_LOST_AFTER_S)
        ]

    def _all_ends(self) -> list[RankEnd]:
        """Return the end of every rank, also of those that reported none."""
        names = {rank: node.name for rank, node in self._nodes.items()}
        return [
            self._ends.get(rank)
            or RankEnd(rank=rank, node=names.get(rank // self._per_node, "?"), exit_code=None, error="", at_ns=0)
            for rank in range(self.rank_count)
        ]

    def _handle(self, message: Mapping[str, Any], now: float) -> None:
        rank = message["node_rank"]
        node = self._nodes.setdefault(rank, _NodeStatus(name=message["node"], seen_at=now))
        node.seen_at = now
        # A heartbeat is an output without entries.
        self.activity += message["kind"] not in ("output", "gpus") or bool(message.get("entries"))
        match message["kind"]:
            case "output":
                for entry in message["entries"]:
                    self._feed_output(node.name, entry, now)
            case "display":
                self._add_display(message, node.name)
            case "gpus":
                node.gpus = tuple(parse_gpu_reading(node.name, reading) for reading in message["readings"])
            case "progress":
                self._progress.record_report(message["rank"], message, now)
                if message["rank"] == 0:
                    self._on_report(message.get("step"), message.get("metrics"))
            case "failed" | "ended":
                self._record_end(message["end"], now)
            case "stopped":
                place, detail = (str(message.get(name, ""))[:_MAX_STOP_TEXT] for name in ("place", "detail"))
                self._stops.append(StoppedRank(rank=int(message["rank"]), node=node.name, place=place, detail=detail))
            case "leaving":
                node.is_terminating = True
            case "exit":
                node.code, node.failure_note = message["code"], message["note"]
                for end in message["ends"]:
                    self._record_end(end, now)

    def _record_end(self, fields_by_name: Mapping[str, Any], now: float) -> None:
        end = RankEnd(**{name: value for name, value in fields_by_name.items() if name in _END_FIELDS})
        earlier = self._ends.get(end.rank)
        if earlier is not None and earlier.exit_code is not None:
            # The first report has the exit code; a later one may have the complete error.
            end = replace(earlier, error=end.error) if len(end.error) > len(earlier.error) else earlier
        self._ends[end.rank] = end
        if end.exit_code == 0 and self._finished_at is None:
            self._finished_at = now
        self._formatter.end_rank(end.rank, well=end.exit_code == 0, now=now)

    def _feed_output(self, node: str, entry: list[Any], now: float) -> None:
        rank, stream, _ns, text, *skipped = entry
        if not self._shows(rank, stream):
            return
        if text is None:
            self._formatter.skip(rank, stream, skipped[0])
        else:
            self._formatter.feed(rank, node, stream, text, now)
