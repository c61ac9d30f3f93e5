"""One cell on the ranks of a session: sent, followed, its ends and values collected."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_launch import pickles
from gpu_launch.errors import LaunchFailed
from gpu_launch.exchange import CellText
from gpu_launch.standing.control import Message
from gpu_launch.standing.course import Course
from gpu_launch.standing.executor import How
from gpu_launch.standing.said import Ended
from gpu_launch.standing.session import Session

_CHECK_S = 10.0  # seconds ranks have to add up one number
_CHECKED_S = _CHECK_S + 2.0  # seconds for all to have told the sum


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell that is to run."""

    text: CellText
    body: str
    #: Empty for all.
    ranks: tuple[int, ...] = ()
    #: Names and values, pickled together; None for none.
    send: bytes | None = None
    #: Other cells' text by label, for tracebacks through what was sent.
    sources: Mapping[str, str] = field(default_factory=dict)
    returns: tuple[str, ...] = ()


class CellRun:
    """For one thread."""

    def __init__(self, session: Session, cell: Cell, *, number: int) -> None:
        self._session, self._cell, self._number = session, cell, number
        self._ranks = cell.ranks or tuple(sorted(session.devices))
        self._ended: dict[int, Message] = {}
        self._checked: dict[int, str] = {}
        self.course = Course(self._ranks)
        #: What ranks had written to stdout and stderr when they came back.
        self.written: dict[int, Sequence[int]] = {}

    def begin(self) -> None:
        """Send it."""
        cell = self._cell
        header = {
            "kind": "cell",
            "cell": self._number,
            "body": cell.body,
            "label": cell.text.label,
            "source": cell.text.source,
            "skipped": cell.text.skipped,
            "sources": dict(cell.sources),
            "returns": list(cell.returns),
        }
        for rank in self._ranks:
            self._session.send(rank, header, () if cell.send is None else (cell.send,))

    def interrupt(self) -> None:
        """Interrupt the ranks that still run it."""
        for rank in self.course.running:
            self._session.send(rank, {"kind": "interrupt", "cell": self._number})

    def look(self, asked: int) -> None:
        """Take what has come; `asked` is how often the user has interrupted. Raises LaunchFailed for a lost rank."""
        while self.course.asked < asked:
            self.course.interrupt()
        for message in self._session.look():
            self._take(message)

    def find_problem(self) -> str:
        """Why the group is not usable, found by all its ranks together; empty when it is."""
        for rank in self._session.devices:
            self._session.send(rank, {"kind": "check", "number": self._number, "limit_s": _CHECK_S})
        deadline = time.monotonic() + _CHECKED_S
        while len(self._checked) < len(self._session.devices):
            if time.monotonic() > deadline:
                missing = sorted(self._session.devices.keys() - self._checked.keys())
                return f"The process group is broken: ranks {missing} do not answer."
            self.look(0)
        broken = {rank: problem for rank, problem in sorted(self._checked.items()) if problem}
        return next((f"The process group is broken: on rank {rank} {text}." for rank, text in broken.items()), "")

    @property
    def has_news(self) -> bool:
        """Whether a rank has failed or did not come back."""
        return any(end.how is not How.DONE for end in self.ends())

    def ends(self) -> list[Ended]:
        """How it ended on its ranks."""
        return [self._end(rank) for rank in self._ranks]

    def collect(self) -> dict[str, list[Any]]:
        """The values that came back. Raises LaunchFailed where some did not, or cannot be read here."""
        returned: dict[str, list[Any]] = {name: [] for name in self._cell.returns}
        problems: list[str] = []
        for rank in self._ranks:
            message = self._ended[rank]
            problems += [f"rank {rank}: {text}" for text in message.header["problems"]]
            for name, data in zip(self._cell.returns, message.frames, strict=True):
                returned[name].append(pickles.load_told(data, f"rank {rank}: {name}", problems))
        if problems:
            text = "\n".join(problems)
            raise LaunchFailed(f"The cell ended well, but not everything came back:\n{text}")
        return returned

    def _take(self, message: Message) -> None:
        header = message.header
        if header["kind"] == "ended" and header["cell"] == self._number:
            self._ended[message.rank] = message
            self.written[message.rank] = header["written"]
            self.course.end(message.rank, How(header["how"]), time.monotonic())
        elif header["kind"] == "checked" and header["number"] == self._number:
            self._checked[message.rank] = header["problem"]

    def _end(self, rank: int) -> Ended:
        node, message = self._session.nodes[rank], self._ended.get(rank)
        if message is None:
            return Ended(rank=rank, node=node, how=None)
        header = message.header
        return Ended(
            rank=rank,
            node=node,
            how=How(header["how"]),
            error=header["error"],
            at_ns=header["at_ns"],
            gpu=self._session.devices[rank],
        )
