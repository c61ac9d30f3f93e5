"""Turns the ranks' output into the text that is shown.

A chunk of a stream is split into lines (`LineBuffer`); drawn progress bars are taken out (`progress_bars`), output
above the rate limit is skipped (`RateCap`), tracebacks of a possible failure are held back (`tracebacks`), and equal
lines of several ranks are merged (`line_deduplicator`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass

from gpu_launch.output.line_deduplicator import LineDeduplicator, OutputLine
from gpu_launch.output.progress_bars import ProgressTracker, parse_bar
from gpu_launch.output.text import format_count, format_rank_prefix, format_ranks_prefix, format_size
from gpu_launch.output.tracebacks import TracebackFilter

#: Seconds between notes about skipped lines.
NOTE_PERIOD_S = 2.0
#: The last skipped lines of each rank are shown with the note.
_TAIL_LINES = 5
#: A line without its end is shown after PARTIAL_S, a bar that redraws itself every REDRAW_S, seconds.
PARTIAL_S = 0.5
REDRAW_S = 2.0
#: Longer lines are broken, characters.
MAX_LINE_LENGTH = 8192
#: Maximum text per second in the notebook after the burst: more than anyone can read, and the browser can hold an hour
#: of it. The log files have all of it.
CAP_BYTES_S = 100_000
CAP_BURST_BYTES = 1_000_000
#: Characters added to a line's own: its prefix.
LINE_COST = 24
#: Sequences that move a terminal's cursor, ring its bell or hide text. Colours are kept.
_CONTROLS = re.compile(
    r"\x1b\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)?|\x1b\[[0-9;:?<=>]*[ -/]*(?!m)[@-~]|\x1b(?!\[)"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)


class OutputFormatter:
    """Takes chunks of ranks' streams and returns text to show."""

    def __init__(self, progress: ProgressTracker, *, shows_all: bool = False, shows_ranks: bool = True) -> None:
        self._progress, self._shows_ranks = progress, shows_ranks
        self._line_buffer, self._traceback_filter, self._deduplicator = (
            LineBuffer(),
            TracebackFilter(),
            LineDeduplicator(),
        )
        # A file takes all output.
        self._rate_cap = RateCap(rate=0, burst=math.inf) if shows_all else RateCap()
        self._nodes: dict[int, str] = {}
        self._is_muted = False
        self._skipped_lines = self._skipped_bytes = 0
        self._skipped_tail: dict[tuple[int, str], list[str]] = {}
        self._noted_at = float("-inf")
        #: Shown before all other text.
        self._shown_first: list[tuple[str, str]] = []

    def feed(self, rank: int, node: str, stream: str, text: str, now: float) -> None:
        """Add a chunk of a rank's stream."""
        if self._is_muted:
            return
        self._nodes[rank] = node
        if held := self._traceback_filter.release_if_running(rank, now):
            self._deduplicator.feed(rank, "stderr", held, now)
        lines = self._line_buffer.feed(rank, stream, text, now)
        if stream == "stderr" and any("/s" in part or "s/" in part for part in (text, *lines)):
            # Every drawing of tqdm ends with its rate; the end of its line may come alone.
            lines = [rest for line in lines if (rest := self._without_bar(rank, line)) is not None]
            drawn = self._extract_bar(rank, self._line_buffer.pending(rank, stream))
            if drawn is not None and lines[-1:] == [""]:
                # A bar below others begins with a newline.
                lines.pop()
        if lines:
            self._feed_lines(rank, stream, lines, now)

    def skip(self, rank: int, stream: str, size: int) -> None:
        """Note that `size` bytes of a stream were skipped by the sender."""
        self._skipped_bytes += size
        self._line_buffer.skip(rank, stream)

    def end_rank(self, rank: int, *, well: bool, now: float) -> None:
        """Note that a rank has ended."""
        if well:
            self._deduplicator.feed(rank, "stderr", self._traceback_filter.release(rank), now)
        else:
            self._traceback_filter.is_failing = True

    def reset(self) -> None:
        """Drop lines that wait for their equals: an interrupt in the middle of a call left their state uncertain."""
        self._deduplicator = LineDeduplicator()

    def mute(self) -> None:
        """Show no more output."""
        self._is_muted = True

    def restart(self, text: str, now: float) -> None:
        """Prepare for the next attempt: pending output of the current one is shown first, then `text`."""
        self._shown_first += self.drain(frozenset(), now, last=True)
        if text:
            self._shown_first.append(("stderr", f"{text}\n"))
        self._line_buffer, self._traceback_filter, self._deduplicator = (
            LineBuffer(),
            TracebackFilter(),
            LineDeduplicator(),
        )

    def drain(self, active_ranks: Set[int], now: float, *, last: bool = False) -> list[tuple[str, str]]:
        """Return (stream, text) to show, neighbours of one stream joined; `active_ranks` may write more."""
        if self._is_muted:
            return []
        for rank, stream, line in self._line_buffer.take_overdue(now, everything=last):
            if (rest := self._without_bar(rank, line)) is not None:
                self._feed_lines(rank, stream, [rest], now)
        for rank, lines in self._traceback_filter.release_overdue(now, everything=last).items():
            self._deduplicator.feed(rank, "stderr", lines, now)
        is_note_due = bool(self._skipped_lines or self._skipped_bytes) and (
            last or now - self._noted_at >= NOTE_PERIOD_S
        )
        output_lines = self._deduplicator.drain(active_ranks, now, everything=last or is_note_due)
        for output_line in output_lines:
            self._rate_cap.refund((len(output_line.ranks) - 1) * (len(output_line.line) + LINE_COST))
        shown = [(output_line.stream, self._format_line(output_line)) for output_line in output_lines]
        if is_note_due:
            self._noted_at = now
            shown += self._format_skipped(now)
        before, self._shown_first = self._shown_first, []
        return _join_streams([*before, *shown])

    def _feed_lines(self, rank: int, stream: str, lines: list[str], now: float) -> None:
        allowed = self._rate_cap.consume(lines, now)
        if allowed < len(lines):
            self._skipped_lines += len(lines) - allowed
            self._skipped_tail[rank, stream] = lines[max(allowed, len(lines) - _TAIL_LINES) :]
            lines = lines[:allowed]
        elif self._skipped_tail:
            self._skipped_tail.pop((rank, stream), None)
        self._feed_deduplicator(rank, stream, lines, now)

    def _feed_deduplicator(self, rank: int, stream: str, lines: list[str], now: float) -> None:
        if stream == "stderr":
            lines = self._traceback_filter.feed(rank, lines, now)
        if lines:
            self._deduplicator.feed(rank, stream, strip_controls("\n".join(lines)).split("\n"), now)

    def _format_skipped(self, now: float) -> list[tuple[str, str]]:
        """Return a note about skipped output, and its last lines, which may show how the rank ended."""
        passed_last, self._skipped_tail = self._skipped_tail, {}
        for (rank, stream), lines in passed_last.items():
            self._skipped_lines -= len(lines)
            self._feed_deduplicator(rank, stream, lines, now)
        parts = [format_count(self._skipped_lines, "line")] if self._skipped_lines > 0 else []
        parts += [format_size(self._skipped_bytes)] if self._skipped_bytes else []
        self._skipped_lines = self._skipped_bytes = 0
        note = f"[gpu_launch] {' and '.join(parts)} not shown here; the log files have all of it\n"
        last = [
            (line.stream, self._format_line(line))
            for line in self._deduplicator.drain(frozenset(), now, everything=True)
        ]
        return [("stderr", note), *last] if parts else last

    def _extract_bar(self, rank: int, line: str) -> str | None:
        """Record the progress bar that a line draws and return the rest of the line; None if it draws none."""
        parsed = parse_bar(strip_controls(line)) if line else None
        if parsed is None:
            return None
        self._progress.record_bar(rank, parsed[0])
        return parsed[1].strip()

    def _without_bar(self, rank: int, line: str) -> str | None:
        """Return the line without its bar; None for a line that only draws, or erases a drawing."""
        rest = self._extract_bar(rank, line)
        if rest is None:
            return None if "\x1b" in line and not strip_controls(line).strip() else line
        return rest or None

    def _format_line(self, line: OutputLine) -> str:
        if not self._shows_ranks:
            return f"{line.line}\n"
        if len(line.ranks) == 1:
            return f"{format_rank_prefix(line.ranks[0], self._nodes[line.ranks[0]])}{line.line}\n"
        return f"{format_ranks_prefix(line.ranks)}{line.line}\n"


def _join_streams(texts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighbours of one stream."""
    joined: list[tuple[str, list[str]]] = []
    for stream, text in texts:
        if joined and joined[-1][0] == stream:
            joined[-1][1].append(text)
        else:
            joined.append((stream, [text]))
    return [(stream, "".join(parts)) for stream, parts in joined]


@dataclass
class _PartialLine:
    """A line that has not ended yet."""

    text: str = ""
    changed_at: float = 0.0
    shown_at: float = 0.0
    #: What came before `text` was taken as a line.
    is_rest: bool = False


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
        if complete:
            complete, pending.is_rest = complete[pending.is_rest and not complete[0] :], False
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
                pending.text, pending.shown_at, pending.is_rest = "", now, True
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
