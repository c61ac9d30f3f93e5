"""Splits ranks' streams into lines and limits their rate."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: A line without its end is shown after PARTIAL_S, a bar that redraws itself every REDRAW_S, seconds.
PARTIAL_S = 0.5
REDRAW_S = 2.0
#: Longer lines are broken, characters.
MAX_LINE_LENGTH = 8192
#: Most text per second in the notebook after the burst: more than anyone can read, and the browser can hold an hour of
#: it. The log files have all of it.
CAP_BYTES_S = 100_000
CAP_BURST_BYTES = 1_000_000
#: Characters added to a line's own: its prefix.
LINE_COST = 24

#: Sequences that move a terminal's cursor, ring its bell or hide text. Colours are kept.
_CONTROLS = re.compile(
    r"\x1b\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)?|\x1b\[[0-9;:?<=>]*[ -/]*(?!m)[@-~]|\x1b(?!\[)"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)


@dataclass
class _PartialLine:
    """A line that has not ended yet."""

    text: str = ""
    changed_at: float = 0.0
    shown_at: float = 0.0


class LineBuffer:
    """Splits every rank's streams into lines and keeps the incomplete ones."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, str], _PartialLine] = {}

    def feed(self, rank: int, stream: str, text: str, now: float) -> list[str]:
        """Add text and return the lines that it completes."""
        pending = self._pending.get((rank, stream))
        if pending is None:
            pending = self._pending[rank, stream] = _PartialLine(shown_at=now)
        pending.changed_at = now
        if "\r" not in text and "\r" not in pending.text:
            *complete, rest = (pending.text + text).split("\n")
        else:
            *complete, rest = (pending.text + text).replace("\r\n", "\n").split("\n")
            complete, rest = [collapse_redraws(line) for line in complete], collapse_redraws(rest, keep_end=True)
        if len(rest) > MAX_LINE_LENGTH:
            complete.append(rest.lstrip("\r"))
            rest = ""
        pending.text = rest
        return complete

    def skip(self, rank: int, stream: str) -> None:
        """Forget the incomplete line: the next text does not continue it."""
        self._pending.pop((rank, stream), None)

    def pending(self, rank: int, stream: str) -> str:
        """Return the incomplete line as a terminal shows it."""
        pending = self._pending.get((rank, stream))
        return collapse_redraws(pending.text) if pending is not None else ""

    def take_overdue(self, now: float, *, everything: bool = False) -> list[tuple[int, str, str]]:
        """Return (rank, stream, line) of incomplete lines that are due, or with `everything` of all."""
        overdue = []
        for (rank, stream), pending in self._pending.items():
            redraws = "\r" in pending.text
            is_due = now - pending.shown_at >= REDRAW_S if redraws else now - pending.changed_at >= PARTIAL_S
            if (is_due or everything) and (shown := collapse_redraws(pending.text)):
                overdue.append((rank, stream, shown))
                pending.text, pending.shown_at = "", now
        return overdue


def collapse_redraws(line: str, *, keep_end: bool = False) -> str:
    """Return the visible part of a line that redraws itself with carriage returns.

    With `keep_end` the last return stays, because later text may redraw the line.
    """
    if "\r" not in line:
        return line
    drawn = line.rstrip("\r")
    last = drawn[drawn.rfind("\r") + 1 :]
    return f"\r{last}" if keep_end else last


def strip_controls(text: str) -> str:
    """Remove terminal control sequences other than colours."""
    return text if _CONTROLS.search(text) is None else _CONTROLS.sub("", text)


class RateCap:
    """Limits output to CAP_BYTES_S."""

    def __init__(self, *, rate: float = CAP_BYTES_S, burst: float = CAP_BURST_BYTES, now: float = 0.0) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, now

    def consume(self, lines: list[str], now: float) -> int:
        """Return how many of the first lines may be shown now, and charge for them."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        cost = sum(map(len, lines)) + LINE_COST * len(lines)
        if cost <= self._left:
            self._left -= cost
            return len(lines)
        allowed = 0
        for line in lines:
            cost = len(line) + LINE_COST
            if cost > self._left:
                break
            self._left -= cost
            allowed += 1
        return allowed

    def refund(self, size: int) -> None:
        """Return the charge for characters that were not shown after all."""
        self._left = min(self._burst, self._left + size)
