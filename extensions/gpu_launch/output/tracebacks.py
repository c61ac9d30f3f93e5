"""Tracebacks in the ranks' stderr: their own part, and a filter that holds them back from the live output."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: The first line of a traceback, and the lines between it and the traceback of its cause.
HEADER = "Traceback (most recent call last):"
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
#: torch.distributed prefixes a rank's own traceback with its rank.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
#: Lines of torch's C++ log, such as `[W1121 12:00:00.123 ProcessGroupNCCL.cpp:1538] …`.
NATIVE_LOG = re.compile(r"(?:\[rank\d+\]: ?)?\[[WEIF]\d{4} ")
#: Lines of that log with an error.
NATIVE_ERROR = re.compile(r"(?:\[rank\d+\]: ?)?\[[EF]\d{4} ")
#: C++ frames that torch adds to its messages.
NATIVE_FRAME = re.compile(
    r"(?:\[rank\d+\]: ?)?\s*(?:frame #\d+: |C\+\+ CapturedTraceback|Exception raised from \S+ at )"
)
#: Logged at nearly every start if addresses have no names; harmless.
_HARMLESS_LOG = re.compile(NATIVE_LOG.pattern + r".*\[c10d\] The hostname of the client socket cannot be retrieved")
#: May stand before a header. Other text there, such as an unfinished bar, is not part of the traceback.
_GROUP = re.compile(r"[ |]*\+ Exception Group ")
_FILE = re.compile(r'\s*File "(?P<path>[^"]+)", line \d+')
#: Files that run a script for torchrun or a launch.
_LAUNCHER_FILES = re.compile(
    r"<frozen runpy>$|/runpy\.py$|/gpu_launch/(?:worker/|common/memory_cap\.py$)"
    r"|/torch/distributed/(?:run\.py$|launcher/|elastic/multiprocessing/)"
)
#: Lines that are shown of an error without a traceback.
_TAIL_LINES = 20
#: Held lines are shown after this many seconds, unless a rank has failed.
MAX_HOLD_S = 5.0
#: Lines within this many seconds after a traceback belong to it, such as the rest of a message.
_TOGETHER_S = 0.1
#: A rank that writes this many seconds after a traceback does not end because of it.
_ENDING_S = 0.5
#: Lines of one rank that are held at most.
_MAX_LINES = 2000


def strip_rank_prefix(line: str) -> str:
    """Remove torch's rank prefix from a line."""
    return _RANK_PREFIX.sub("", line)


def extract_own_error(text: str) -> str:
    """Return the last traceback in a rank's stderr with its causes; its last lines if there is none.

    The traceback begins with the user's own frames, without those of the launcher and of C++.
    """
    lines = [line for line in text.splitlines() if not (NATIVE_FRAME.match(line) or _HARMLESS_LOG.match(line))]
    text = "\n".join(strip_rank_prefix(line) for line in lines if not NATIVE_LOG.match(line)).strip("\n")
    start = text.rfind(HEADER)
    if start < 0:
        # If NCCL's watchdog ends a rank, C++'s log is the only message.
        return "\n".join([strip_rank_prefix(line) for line in lines if line.strip()][-_TAIL_LINES:])
    while (earlier := text.rfind(HEADER, 0, start)) >= 0 and any(phrase in text[earlier:start] for phrase in CHAINED):
        start = earlier
    line = text.rfind("\n", 0, start) + 1
    if _GROUP.fullmatch(text, line, start):
        start = line
    return "\n".join(_strip_launcher_frames(text[start:].splitlines()))


def find_exception_line(error: str) -> str:
    """Return the line that names the exception: the last one that is not indented."""
    lines = [line for line in error.splitlines() if line.strip()]
    named = [line for line in lines if not line[0].isspace() and line not in CHAINED and line != HEADER]
    return (named or lines or [""])[-1].strip()


def _strip_launcher_frames(lines: list[str]) -> list[str]:
    """Remove the first frames of every traceback that only started the script, but never all."""
    kept: list[str] = []
    index = 0
    while index < len(lines):
        kept.append(lines[index])
        index += 1
        if HEADER in lines[index - 1]:
            end = _find_first_user_frame(lines, index)
            index = index if end < len(lines) and not _FILE.match(lines[end]) else end
    return kept


def _find_first_user_frame(lines: list[str], index: int) -> int:
    """Return the index of the user's first frame, or of the end of the frames."""
    while index < len(lines) and (frame := _FILE.match(lines[index])) and _LAUNCHER_FILES.search(frame["path"]):
        index += 1
        while index < len(lines) and lines[index].startswith(" ") and not _FILE.match(lines[index]):
            index += 1
    return index


@dataclass
class _HeldLines:
    lines: list[str] = field(default_factory=list)
    since: float = 0.0
    #: Arrival of the line that names the exception; None before that.
    named_at: float | None = None


class TracebackFilter:
    """Filters every rank's stderr.

    A failing launch shows the first failing rank's traceback once, at its end. The other ranks' tracebacks and C++
    messages about a lost peer (twenty lines from NCCL's watchdog) are consequences. A traceback that a script only logs
    is shown when the script continues or after a few seconds; so are C++ errors.
    """

    def __init__(self) -> None:
        self._held: dict[int, _HeldLines] = {}
        #: A rank has failed: held lines and C++ messages about lost peers are not shown any more.
        self.is_failing = False

    def feed(self, rank: int, lines: list[str], now: float) -> list[str]:
        """Add lines of a rank and return those to show now."""
        held = self._held.get(rank)
        if held is None and not self.is_failing and not any(map(_starts_failure, lines)):
            return lines
        shown: list[str] = []
        for line in lines:
            held = self._held.get(rank)
            if held is None and _starts_failure(line):
                named_at = None if HEADER in line else now
                self._held[rank] = _HeldLines(lines=[line], since=now, named_at=named_at)
            elif held is not None and _continues_failure(held, strip_rank_prefix(line), now):
                held.lines.append(line)
            elif held is not None and not self.is_failing:
                shown += [*self._held.pop(rank).lines, line]
            elif not (self.is_failing and _is_native(line)):
                shown.append(line)
        return shown

    def release(self, rank: int) -> list[str]:
        """Return the held lines of a rank that did not fail."""
        held = self._held.pop(rank, None)
        return held.lines if held is not None else []

    def release_if_running(self, rank: int, now: float) -> list[str]:
        """Return the held lines of a rank that still writes output: they were not a failure."""
        held = self._held.get(rank)
        if held is None or self.is_failing or held.named_at is None or now - held.named_at < _ENDING_S:
            return []
        return self.release(rank)

    def release_overdue(self, now: float, *, everything: bool = False) -> dict[int, list[str]]:
        """Return lines by rank that were held long enough; none while a rank is failing."""
        if self.is_failing:
            return {}
        due = [rank for rank, held in self._held.items() if everything or now - held.since >= MAX_HOLD_S]
        return {rank: self._held.pop(rank).lines for rank in due}


def _starts_failure(line: str) -> bool:
    return HEADER in line or NATIVE_ERROR.match(line) is not None


def _is_native(line: str) -> bool:
    return NATIVE_LOG.match(line) is not None or NATIVE_FRAME.match(line) is not None


def _continues_failure(held: _HeldLines, line: str, now: float) -> bool:
    if len(held.lines) >= _MAX_LINES:
        return False
    if not line.strip() or line[0].isspace() or _is_native(line):
        return True
    if HEADER in line or line in CHAINED:
        held.named_at = None
        return True
    if held.named_at is None:
        held.named_at = now
        return True
    return now - held.named_at <= _TOGETHER_S
