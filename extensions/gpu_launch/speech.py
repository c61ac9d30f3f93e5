"""What of the ranks' output is shown, and how. No I/O; time is passed in.

A chunk of a rank's stream becomes lines (`lines`), loses the bars that it draws (`steps`), is cut where there is too
much (`lines.Cap`) and where it belongs to a failure (`hold`), and meets its equals of other ranks (`fold`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from gpu_launch.fold import Fold, Said
from gpu_launch.hold import Hold
from gpu_launch.lines import LINE_COST, Cap, Lines, clean
from gpu_launch.render import count, prefix, ranks_prefix, size_text
from gpu_launch.steps import Steps, find_bar

#: Seconds between notes of lines not shown.
TELL_S = 2.0
#: Of lines that were passed over, the last ones of each rank are shown with the note.
_LAST_LINES = 5


class Speech:
    """Takes chunks of ranks' streams."""

    def __init__(self, steps: Steps, *, is_whole: bool = False) -> None:
        self._steps = steps
        self._lines, self._hold, self._fold = Lines(), Hold(), Fold()
        # A file takes everything.
        self._cap = Cap(rate=0, burst=math.inf) if is_whole else Cap()
        self._nodes: dict[int, str] = {}
        self._hushed = False
        self._passed_lines = self._passed_bytes = 0
        self._passed_last: dict[tuple[int, str], list[str]] = {}
        self._told_at = float("-inf")
        #: To be shown before anything else.
        self._before: list[tuple[str, str]] = []

    def hear(self, rank: int, node: str, stream: str, text: str, now: float) -> None:
        """A chunk of a rank's stream."""
        if self._hushed:
            return
        self._nodes[rank] = node
        if held := self._hold.go_on(rank, now):
            self._fold.feed(rank, "stderr", held, now)
        lines = self._lines.feed(rank, stream, text, now)
        if stream == "stderr" and ("/s" in text or "s/" in text):
            # Every drawing of tqdm ends with its rate.
            lines = [rest for line in lines if (rest := self._without_bar(rank, line)) is not None]
            self._draw(rank, self._lines.pending(rank, stream))
        if lines:
            self._say(rank, stream, lines, now)

    def pass_over(self, rank: int, stream: str, size: int) -> None:
        """So many bytes of a stream did not even come here."""
        self._passed_bytes += size
        self._lines.skip(rank, stream)

    def end(self, rank: int, *, well: bool, now: float) -> None:
        """A rank has ended."""
        if well:
            self._fold.feed(rank, "stderr", self._hold.release(rank), now)
        else:
            self._hold.is_failing = True

    def mend(self) -> None:
        """An interrupt has come in the middle of a call: what waited for its equals is not certain any more."""
        self._fold = Fold()

    def hush(self) -> None:
        """Show nothing more."""
        self._hushed = True

    def renew(self, text: str, now: float) -> None:
        """The ranks start again: what is not shown yet of the present ones is shown first, then `text`."""
        self._before += self.take(frozenset(), now, last=True)
        if text:
            self._before.append(("stderr", f"{text}\n"))
        self._lines, self._hold, self._fold = Lines(), Hold(), Fold()

    def take(self, speaking: Set[int], now: float, *, last: bool = False) -> list[tuple[str, str]]:
        """(stream, text) to show, neighbours of one stream joined. `speaking` are ranks that may say more."""
        if self._hushed:
            return []
        for rank, stream, line in self._lines.overdue(now, everything=last):
            if (rest := self._without_bar(rank, line)) is not None:
                self._say(rank, stream, [rest], now)
        for rank, lines in self._hold.overdue(now, everything=last).items():
            self._fold.feed(rank, "stderr", lines, now)
        is_telling = bool(self._passed_lines or self._passed_bytes) and (last or now - self._told_at >= TELL_S)
        said = self._fold.take(speaking, now, everything=last or is_telling)
        for one in said:
            self._cap.give_back((len(one.ranks) - 1) * (len(one.line) + LINE_COST))
        shown = [(one.stream, self._shown(one)) for one in said]
        if is_telling:
            self._told_at = now
            shown += self._note(now)
        before, self._before = self._before, []
        return _joined([*before, *shown])

    def _say(self, rank: int, stream: str, lines: list[str], now: float) -> None:
        allowed = self._cap.take(lines, now)
        if allowed < len(lines):
            self._passed_lines += len(lines) - allowed
            self._passed_last[rank, stream] = lines[max(allowed, len(lines) - _LAST_LINES) :]
            lines = lines[:allowed]
        elif self._passed_last:
            self._passed_last.pop((rank, stream), None)
        self._put(rank, stream, lines, now)

    def _put(self, rank: int, stream: str, lines: list[str], now: float) -> None:
        if stream == "stderr":
            lines = self._hold.feed(rank, lines, now)
        if lines:
            self._fold.feed(rank, stream, clean("\n".join(lines)).split("\n"), now)

    def _note(self, now: float) -> list[tuple[str, str]]:
        """How much was passed over, and the last lines of it, as these may be what everything ended with."""
        passed_last, self._passed_last = self._passed_last, {}
        for (rank, stream), lines in passed_last.items():
            self._passed_lines -= len(lines)
            self._put(rank, stream, lines, now)
        parts = [count(self._passed_lines, "line")] if self._passed_lines > 0 else []
        parts += [size_text(self._passed_bytes)] if self._passed_bytes else []
        self._passed_lines = self._passed_bytes = 0
        note = f"[gpu_launch] {' and '.join(parts)} not shown here; the log files have all of it\n"
        last = [(one.stream, self._shown(one)) for one in self._fold.take(frozenset(), now, everything=True)]
        return [("stderr", note), *last] if parts else last

    def _draw(self, rank: int, line: str) -> str | None:
        """What a line says besides the bar that it draws; None where it draws none."""
        found = find_bar(clean(line)) if line else None
        if found is None:
            return None
        self._steps.draw(rank, found[0])
        return found[1].strip()

    def _without_bar(self, rank: int, line: str) -> str | None:
        """None for a line that only draws, or erases what was drawn."""
        rest = self._draw(rank, line)
        if rest is None:
            return None if "\x1b" in line and not clean(line).strip() else line
        return rest or None

    def _shown(self, said: Said) -> str:
        if len(said.ranks) == 1:
            return f"{prefix(said.ranks[0], self._nodes[said.ranks[0]])}{said.line}\n"
        return f"{ranks_prefix(said.ranks)}{said.line}\n"


def _joined(texts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one stream as one text."""
    joined: list[tuple[str, list[str]]] = []
    for stream, text in texts:
        if joined and joined[-1][0] == stream:
            joined[-1][1].append(text)
        else:
            joined.append((stream, [text]))
    return [(stream, "".join(parts)) for stream, parts in joined]
