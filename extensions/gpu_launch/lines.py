"""Chunks of ranks' streams become whole lines, as many as somebody can read. Pure: time is passed in."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: A line without its end is shown after this long, a progress bar that redraws itself this often.
PARTIAL_S = 0.5
REDRAW_S = 2.0
#: Characters after which a line that never ends is broken.
LONGEST = 8192
#: Most text a second in the notebook, once the burst is used up: more than anybody reads, and an hour of it does not
#: choke the browser. All of it is in the log files.
CAP_BYTES_S = 100_000
CAP_BURST_BYTES = 1_000_000
#: What a line costs besides its own characters: its prefix.
LINE_COST = 24

#: What would move a terminal's cursor, ring, or hide text. Colours stay.
_CONTROLS = re.compile(
    r"\x1b\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)?|\x1b\[[0-9;:?<=>]*[ -/]*(?!m)[@-~]|\x1b(?!\[)"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)


@dataclass
class _Pending:
    """A line that has not ended yet."""

    text: str = ""
    changed_at: float = 0.0
    shown_at: float = 0.0


class Lines:
    """What of every rank's streams has ended with a newline, and what has not yet."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, str], _Pending] = {}

    def feed(self, rank: int, stream: str, text: str, now: float) -> list[str]:
        """The lines that `text` completes."""
        pending = self._pending.get((rank, stream))
        if pending is None:
            pending = self._pending[rank, stream] = _Pending(shown_at=now)
        pending.changed_at = now
        if "\r" not in text and "\r" not in pending.text:
            *whole, rest = (pending.text + text).split("\n")
        else:
            *whole, rest = (pending.text + text).replace("\r\n", "\n").split("\n")
            whole, rest = [collapse(line) for line in whole], collapse(rest, keep_end=True)
        if len(rest) > LONGEST:
            whole.append(rest.lstrip("\r"))
            rest = ""
        pending.text = rest
        return whole

    def skip(self, rank: int, stream: str) -> None:
        """What is fed next is not the end of what was fed before."""
        self._pending.pop((rank, stream), None)

    def pending(self, rank: int, stream: str) -> str:
        """The line that has not ended, as a terminal shows it."""
        pending = self._pending.get((rank, stream))
        return collapse(pending.text) if pending is not None else ""

    def overdue(self, now: float, *, everything: bool = False) -> list[tuple[int, str, str]]:
        """(rank, stream, line) of unended lines that have waited long enough; with `everything` all of them."""
        found = []
        for (rank, stream), pending in self._pending.items():
            redraws = "\r" in pending.text
            is_due = now - pending.shown_at >= REDRAW_S if redraws else now - pending.changed_at >= PARTIAL_S
            if (is_due or everything) and (shown := collapse(pending.text)):
                found.append((rank, stream, shown))
                pending.text, pending.shown_at = "", now
        return found


def collapse(line: str, *, keep_end: bool = False) -> str:
    """What a terminal shows of a line that redraws itself with carriage returns.

    With `keep_end` the last return stays, as what follows may still redraw.
    """
    if "\r" not in line:
        return line
    drawn = line.rstrip("\r")
    last = drawn[drawn.rfind("\r") + 1 :]
    return f"\r{last}" if keep_end else last


def clean(text: str) -> str:
    """Without what would do something to a terminal other than write in colours."""
    return text if _CONTROLS.search(text) is None else _CONTROLS.sub("", text)


class Cap:
    """Lets CAP_BYTES_S through."""

    def __init__(self, *, rate: float = CAP_BYTES_S, burst: float = CAP_BURST_BYTES, now: float = 0.0) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, now

    def take(self, lines: list[str], now: float) -> int:
        """How many of the lines, from the first one on, may be shown now."""
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

    def give_back(self, size: int) -> None:
        """These characters were not shown after all."""
        self._left = min(self._burst, self._left + size)
