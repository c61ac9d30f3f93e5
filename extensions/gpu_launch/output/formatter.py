"""Turns the ranks' output into the text that is shown.

A chunk of a stream is split into lines (`lines.LineBuffer`); drawn progress bars are taken out (`progress_bars`),
output above the rate limit is skipped (`lines.RateCap`), tracebacks of a possible failure are held back (`tracebacks`),
and equal lines of several ranks are merged (`dedup`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from gpu_launch.output.dedup import LineDeduplicator, OutputLine
from gpu_launch.output.lines import LINE_COST, LineBuffer, RateCap, strip_controls
from gpu_launch.output.progress_bars import ProgressTracker, parse_bar
from gpu_launch.output.text import format_count, format_rank_prefix, format_ranks_prefix, format_size
from gpu_launch.output.tracebacks import TracebackFilter

#: Seconds between notes about skipped lines.
NOTE_PERIOD_S = 2.0
#: The last skipped lines of each rank are shown with the note.
_TAIL_LINES = 5


class OutputFormatter:
    """Takes chunks of ranks' streams and returns text to show."""

    def __init__(self, progress: ProgressTracker, *, shows_all: bool = False) -> None:
        self._progress = progress
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
        if stream == "stderr" and ("/s" in text or "s/" in text):
            # Every drawing of tqdm ends with its rate.
            lines = [rest for line in lines if (rest := self._without_bar(rank, line)) is not None]
            self._extract_bar(rank, self._line_buffer.pending(rank, stream))
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
