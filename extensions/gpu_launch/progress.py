"""Where the ranks of a launch are, as the agents tell it. No I/O; time is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gpu_launch import failure
from gpu_launch.cards import Card, parse_card
from gpu_launch.errors import LaunchFailed
from gpu_launch.options import Options
from gpu_launch.panel import RankState, View
from gpu_launch.plan import Plan
from gpu_launch.render import ranks_text
from gpu_launch.roster import Roster
from gpu_launch.spec import RankEnd
from gpu_launch.speech import Speech
from gpu_launch.steps import Steps

#: An agent that runs says so every second.
SILENCE_S = 10.0
#: A node that lets a peer's connection break and then says nothing for so long is named as lost.
_LOST_S = 2.5
#: One whose engine is still there, and that says nothing: what it reads and writes hangs, such as its home.
STALLED_S = 60.0
#: Who did not listen for so long does not know who was silent.
_AWAY_S = 2.0
#: Ranks that have finished while others go on are told of after this.
_WAITING_S = 1.0
_END_FIELDS = frozenset(item.name for item in fields(RankEnd))


@dataclass
class _Node:
    name: str
    seen_at: float
    code: int | None = None
    said: str = ""
    is_leaving: bool = False
    cards: tuple[Card, ...] = ()


class Ranks:
    """Takes the agents' messages."""

    def __init__(self, plan: Plan, options: Options) -> None:
        self._plan, self._options = plan, options
        self.attempt = 0
        #: Who takes part in this attempt; None until that is decided.
        self.roster: Roster | None = None
        self._nodes: dict[int, _Node] = {}
        self._ends: dict[int, RankEnd] = {}
        self._steps = Steps()
        self._speech = Speech(self._steps, is_whole=options.detach)
        self._now = 0.0
        #: An interrupt may end `take` anywhere.
        self._is_taking = False
        #: When the first rank of this attempt finished; None for none yet.
        self._finished_at: float | None = None

    def take(self, messages: Iterable[Mapping[str, Any]], now: float, *, last: bool = False) -> list[tuple[str, str]]:
        """(stream, text) to show, in the order of arrival, neighbours of one stream joined."""
        if self._is_taking:
            self._speech.mend()
        self._listen(now)
        self._is_taking = True
        for message in messages:
            if message["attempt"] == self.attempt:
                self._note(message, now)
        shown = self._speech.take(self._speaking(), now, last=last)
        self._is_taking = False
        return shown

    def hush(self) -> None:
        """Show nothing more: after an interrupt every rank's own complaint of it is noise."""
        self._speech.hush()

    @property
    def total(self) -> int:
        """Ranks of this attempt; the most there may be while that is not decided."""
        return self._plan.nnodes * self._plan.nproc_per_node if self.roster is None else self.roster.ranks

    def restart(self) -> None:
        """Begin the next attempt. Why the present one failed, if it did, is shown."""
        first = self.first_failed()
        is_to_blame = first is not None and failure.grade(first) < failure.VICTIM
        text = failure.describe(self._all_ends(), lost=self._lost()) if is_to_blame else ""
        self._speech.renew(text, self._now)
        self.attempt += 1
        self.roster = None
        self._nodes.clear()
        self._ends.clear()
        self._steps.clear()
        self._finished_at = None

    def is_running(self) -> bool:
        """Whether ranks were started on every node."""
        return self.roster is not None and len(self._nodes) == self.roster.nnodes

    def all_ended(self) -> bool:
        """Whether the ranks of every node have ended."""
        return self.is_running() and all(node.code is not None for node in self._nodes.values())

    def failed(self) -> bool:
        """Whether a rank, or what starts ranks on a node, has failed."""
        return any(node.code for node in self._nodes.values()) or any(end.exit_code for end in self._ends.values())

    def first_failed(self) -> RankEnd | None:
        """The rank to blame, of those that have ended so far; None while none has failed."""
        return failure.first_failure(end for end in self._ends.values() if end.exit_code is not None)

    def ended_well(self) -> bool:
        """Whether every rank has done its work."""
        return self.all_ended() and not self.failed()

    def leaving(self) -> frozenset[int]:
        """Node ranks whose containers were told to end, and tell so."""
        return frozenset(rank for rank, node in self._nodes.items() if node.is_leaving)

    def busy(self) -> frozenset[int]:
        """Node ranks whose ranks still run, as far as is heard of them."""
        return frozenset(rank for rank, node in self._nodes.items() if node.code is None)

    def ended(self) -> frozenset[int]:
        """Node ranks that have told the end of their ranks."""
        return frozenset(rank for rank, node in self._nodes.items() if node.code is not None)

    def silent(self, limit_s: float = SILENCE_S) -> frozenset[int]:
        """Node ranks that have told no end, and nothing else for longer than this while somebody listened."""
        return frozenset(self._silent(limit_s))

    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, by node rank."""
        return tuple(node.name for _, node in sorted(self._nodes.items()))

    def check_alive(self, gone: Collection[int]) -> None:
        """Raise for those of the node ranks `gone` that have said nothing for too long."""
        if silent := [rank for rank in self._silent(SILENCE_S) if rank in gone]:
            names = " and ".join(self._nodes[rank].name for rank in silent)
            ranks = ranks_text([number for rank in silent for number in self._ranks_of(rank)])
            if not set(silent).isdisjoint(self._silent(STALLED_S)):
                raise LaunchFailed(
                    f"{names} said nothing of {ranks} for {STALLED_S:.0f} s, though the worker is there: what it reads "
                    "and writes hangs, such as the home."
                )
            text = f"{'has' if len(silent) == 1 else 'have'} not been heard of for {SILENCE_S:.0f} s"
            raise LaunchFailed(f"{names} {text}: the worker or the node is gone, and with it {ranks}.")

    def describe(self, *, logs: str) -> str:
        """The failure, the first failing rank's own error first."""
        if any(end.exit_code for end in self._ends.values()):
            return failure.describe(self._all_ends(), logs=logs, lost=self._lost())
        said = [
            f"The ranks on {node.name} could not be run: {node.said.strip()}"
            for node in self._nodes.values()
            if node.said.strip()
        ]
        return "\n".join([*(said or ["The ranks ended without a word."]), f"Logs: {logs}"])

    def view(self) -> View:
        """What the panel shows of them."""
        cards = [card for _, node in sorted(self._nodes.items()) for card in node.cards]
        return View(bars=self._steps.bars(), cards=tuple(cards), ranks=self._states())

    def waiting_text(self) -> str:
        """`rank 0 has finished, waiting for ranks 1-2`; empty while that is not worth a word."""
        if self._finished_at is None or self._now - self._finished_at < _WAITING_S:
            return ""
        states = self._states()
        done, going = states.get(RankState.FINISHED, ()), states.get(RankState.RUNNING, ())
        if not done or not going:
            return ""
        return f"{ranks_text(done)} {'has' if len(done) == 1 else 'have'} finished, waiting for {ranks_text(going)}"

    @property
    def _per_node(self) -> int:
        return self._plan.nproc_per_node if self.roster is None else self.roster.nproc_per_node

    def _ranks_of(self, node_rank: int) -> range:
        return range(node_rank * self._per_node, (node_rank + 1) * self._per_node)

    def _states(self) -> dict[RankState, tuple[int, ...]]:
        found: dict[RankState, list[int]] = {}
        for rank in range(self.total if self._nodes else 0):
            found.setdefault(self._state(rank), []).append(rank)
        return {state: tuple(found[state]) for state in RankState if state in found}

    def _state(self, rank: int) -> RankState:
        end, node = self._ends.get(rank), self._nodes.get(rank // self._per_node)
        if end is not None and end.exit_code == 0:
            return RankState.FINISHED
        if end is not None:
            return RankState.STOPPED if failure.grade(end) == failure.STOPPED else RankState.FAILED
        if node is None:
            return RankState.STARTING
        return RankState.RUNNING if node.code is None else RankState.STOPPED

    def _speaking(self) -> frozenset[int]:
        """Ranks that may still say something that is shown."""
        return frozenset(
            rank
            for rank in range(self.total)
            if rank not in self._ends and any(self._shows(rank, stream) for stream in ("stdout", "stderr"))
        )

    def _shows(self, rank: int, stream: str) -> bool:
        return self._options.shows(rank % self._per_node, stream)

    def _silent(self, limit_s: float) -> list[int]:
        return [rank for rank, node in self._nodes.items() if node.code is None and self._now - node.seen_at > limit_s]

    def _listen(self, now: float) -> None:
        """A blocked terminal, a slow home or a machine that slept is no silence of the nodes'."""
        away_s = now - self._now
        if away_s > _AWAY_S:
            for node in self._nodes.values():
                node.seen_at += away_s
        self._now = now

    def _lost(self) -> list[str]:
        return [
            f"nothing was heard of {self._nodes[rank].name} ({ranks_text(self._ranks_of(rank))}) "
            f"for {self._now - self._nodes[rank].seen_at:.0f} s"
            for rank in self._silent(_LOST_S)
        ]

    def _all_ends(self) -> list[RankEnd]:
        """How every rank has ended, those too of which nothing was heard."""
        names = {rank: node.name for rank, node in self._nodes.items()}
        return [
            self._ends.get(rank)
            or RankEnd(rank=rank, node=names.get(rank // self._per_node, "?"), exit_code=None, error="", at_ns=0)
            for rank in range(self.total)
        ]

    def _note(self, message: Mapping[str, Any], now: float) -> None:
        rank = message["node_rank"]
        node = self._nodes.setdefault(rank, _Node(name=message["node"], seen_at=now))
        node.seen_at = now
        match message["kind"]:
            case "output":
                for entry in message["entries"]:
                    self._hear(node.name, entry, now)
            case "gpus":
                node.cards = tuple(parse_card(node.name, reading) for reading in message["readings"])
            case "progress":
                self._steps.report(message["rank"], message, now)
            case "failed" | "ended":
                self._end(message["end"], now)
            case "leaving":
                node.is_leaving = True
            case "exit":
                node.code, node.said = message["code"], message["said"]
                for end in message["ends"]:
                    self._end(end, now)

    def _end(self, told: Mapping[str, Any], now: float) -> None:
        end = RankEnd(**{name: value for name, value in told.items() if name in _END_FIELDS})
        known = self._ends.get(end.rank)
        if known is not None and known.exit_code is not None:
            # What was told first is how it ended; its error may have been read in full only later.
            end = replace(known, error=end.error) if len(end.error) > len(known.error) else known
        self._ends[end.rank] = end
        if end.exit_code == 0 and self._finished_at is None:
            self._finished_at = now
        self._speech.end(end.rank, well=end.exit_code == 0, now=now)

    def _hear(self, node: str, entry: list[Any], now: float) -> None:
        rank, stream, _ns, text, *passed = entry
        if not self._shows(rank, stream):
            return
        if text is None:
            self._speech.pass_over(rank, stream, passed[0])
        else:
            self._speech.hear(rank, node, stream, text, now)
