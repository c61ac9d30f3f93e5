"""Where the ranks of a launch are, and what of their output is to be shown. No I/O; time is passed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_launch import failure
from gpu_launch.errors import LaunchFailed
from gpu_launch.options import Options
from gpu_launch.plan import Plan
from gpu_launch.render import Cap, Lines, count
from gpu_launch.roster import Roster
from gpu_launch.spec import RankEnd

#: An agent that runs says so every second.
SILENCE_S = 20.0
#: Seconds between notes of lines not shown.
TELL_S = 2.0


@dataclass
class _Node:
    name: str
    seen_at: float
    code: int | None = None
    said: str = ""
    is_leaving: bool = False


class Ranks:
    """Takes the agents' messages."""

    def __init__(self, plan: Plan, options: Options) -> None:
        self._plan, self._options = plan, options
        self.attempt = 0
        #: Who takes part in this attempt; None until that is decided.
        self.roster: Roster | None = None
        self._nodes: dict[int, _Node] = {}
        self._ends: list[RankEnd] = []
        self._lines, self._cap = Lines(), Cap()
        self._hushed = False
        self._told_at = 0.0

    def take(self, messages: Iterable[Mapping[str, Any]], now: float, *, last: bool = False) -> list[tuple[str, str]]:
        """(stream, text) to show, in the order of arrival, neighbours of one stream joined."""
        shown: list[tuple[str, str]] = []
        for message in messages:
            if message["attempt"] == self.attempt:
                shown += self._note(message, now)
        shown += self._lines.overdue(now, everything=last)
        allowed = [(stream, line) for stream, line in shown if not self._hushed and self._cap.take(len(line), now)]
        if (last or now - self._told_at >= TELL_S) and (skipped := self._cap.skipped()):
            self._told_at = now
            allowed.append(
                ("stderr", f"[gpu_launch] {count(skipped, 'line')} not shown here; the log files have all of it\n")
            )
        return _joined(allowed)

    def hush(self) -> None:
        """Show nothing more: after an interrupt every rank's own complaint of it is noise."""
        self._hushed = True

    @property
    def total(self) -> int:
        """Ranks of this attempt; the most there may be while that is not decided."""
        return self._plan.nnodes * self._plan.nproc_per_node if self.roster is None else self.roster.ranks

    def restart(self) -> None:
        """Begin the next attempt."""
        self.attempt += 1
        self.roster = None
        self._nodes.clear()
        self._ends.clear()

    def is_running(self) -> bool:
        """Whether every node's torchrun has started."""
        return self.roster is not None and len(self._nodes) == self.roster.nnodes

    def all_ended(self) -> bool:
        """Whether every node's torchrun has ended."""
        return self.is_running() and all(node.code is not None for node in self._nodes.values())

    def failed(self) -> bool:
        """Whether a node's torchrun has failed."""
        return any(node.code for node in self._nodes.values())

    def ended_well(self) -> bool:
        """Whether every rank has done its work."""
        return self.all_ended() and not self.failed()

    def leaving(self) -> frozenset[int]:
        """Node ranks whose containers were told to end, and tell so."""
        return frozenset(rank for rank, node in self._nodes.items() if node.is_leaving)

    def busy(self, now: float) -> frozenset[int]:
        """Node ranks whose ranks still run, as far as is heard of them."""
        return frozenset(
            rank for rank, node in self._nodes.items() if node.code is None and now - node.seen_at <= SILENCE_S
        )

    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, by node rank."""
        return tuple(node.name for _, node in sorted(self._nodes.items()))

    def check_alive(self, now: float) -> None:
        """Raise for a node that has said nothing for too long."""
        for node in self._nodes.values():
            if node.code is None and now - node.seen_at > SILENCE_S:
                raise LaunchFailed(
                    f"{node.name} has not been heard of for {SILENCE_S:.0f} s: its worker or the node is gone."
                )

    def describe(self, *, logs: str) -> str:
        """The failure, the first failing rank's own error first."""
        if failure.first_failure(self._ends) is not None and any(end.exit_code for end in self._ends):
            missing = self._unheard()
            return failure.describe([*self._ends, *missing], logs=logs)
        said = [
            f"torchrun on {node.name} failed: {node.said.strip()}" for node in self._nodes.values() if node.said.strip()
        ]
        return "\n".join([*(said or ["torchrun failed without a word."]), f"Logs: {logs}"])

    def _unheard(self) -> list[RankEnd]:
        known = {end.rank for end in self._ends}
        per_node = self._plan.nproc_per_node
        return [
            RankEnd(rank=rank, node=self._nodes[rank // per_node].name if rank // per_node in self._nodes else "?",
                    exit_code=None, error="", at_ns=0)
            for rank in range(self.total) if rank not in known
        ]  # fmt: skip

    def _note(self, message: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
        node = self._nodes.setdefault(message["node_rank"], _Node(name=message["node"], seen_at=now))
        node.seen_at = now
        if message["kind"] == "leaving":
            node.is_leaving = True
            return []
        if message["kind"] == "exit":
            node.code, node.said = message["code"], message["said"]
            self._ends += [RankEnd(**end) for end in message["ends"]]
            return []
        return [line for entry in message["entries"] for line in self._entry(node.name, entry, now)]

    def _entry(self, node: str, entry: list[Any], now: float) -> list[tuple[str, str]]:
        rank, stream, _ns, text, *passed = entry
        if not self._options.shows(rank % self._plan.nproc_per_node, stream):
            return []
        if text is None:
            text = f"\n… {passed[0]} bytes passed over; the log file has them …\n"
        return [(stream, line) for line in self._lines.feed(rank, node, stream, text, now)]


def _joined(lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for stream, text in lines:
        if joined and joined[-1][0] == stream:
            joined[-1] = (stream, joined[-1][1] + text)
        else:
            joined.append((stream, text))
    return joined
