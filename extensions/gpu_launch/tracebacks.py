"""Python's tracebacks in what ranks wrote to stderr. Pure."""

from __future__ import annotations

import re

HEADER = "Traceback (most recent call last):"
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
#: torch.distributed prefixes a rank's own traceback with its rank.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
#: Lines of torch's C++ log, such as `[W1121 12:00:00.123 ProcessGroupNCCL.cpp:1538] …`.
NATIVE_LOG = re.compile(r"(?:\[rank\d+\]: ?)?\[[WEIF]\d{4} ")
#: Those of them that tell an error.
NATIVE_ERROR = re.compile(r"(?:\[rank\d+\]: ?)?\[[EF]\d{4} ")
#: Frames of C++ that torch adds to its messages.
NATIVE_FRAME = re.compile(
    r"(?:\[rank\d+\]: ?)?\s*(?:frame #\d+: |C\+\+ CapturedTraceback|Exception raised from \S+ at )"
)
#: Said at nearly every start where addresses have no names, and no reason for anything.
_IDLE = re.compile(NATIVE_LOG.pattern + r".*\[c10d\] The hostname of the client socket cannot be retrieved")
#: Before a header; anything else there, such as a bar that was not ended, is none of the traceback's.
_GROUP = re.compile(r"[ |]*\+ Exception Group ")
_FILE = re.compile(r'\s*File "(?P<path>[^"]+)", line \d+')
#: What runs a script on behalf of torchrun or a launch.
_STARTING = re.compile(
    r"<frozen runpy>$|/runpy\.py$|/gpu_launch/(?:ranks/|memory_cap\.py$|torchrun\.py$)"
    r"|/torch/distributed/(?:run\.py$|launcher/|elastic/multiprocessing/)"
)
_TAIL_LINES = 20


def plain(line: str) -> str:
    """The line without torch's rank before it."""
    return _RANK_PREFIX.sub("", line)


def own_error(text: str) -> str:
    """The last traceback in a rank's stderr with those it was raised from; its last lines where there is none.

    It begins with the user's own frames: those that started the script, and C++'s, are left out.
    """
    told = [line for line in text.splitlines() if not (NATIVE_FRAME.match(line) or _IDLE.match(line))]
    text = "\n".join(plain(line) for line in told if not NATIVE_LOG.match(line)).strip("\n")
    start = text.rfind(HEADER)
    if start < 0:
        # C++'s log is all there is when a watchdog of NCCL ends a rank.
        return "\n".join([plain(line) for line in told if line.strip()][-_TAIL_LINES:])
    while (earlier := text.rfind(HEADER, 0, start)) >= 0 and any(phrase in text[earlier:start] for phrase in CHAINED):
        start = earlier
    line = text.rfind("\n", 0, start) + 1
    if _GROUP.fullmatch(text, line, start):
        start = line
    return "\n".join(_without_starting(text[start:].splitlines()))


def last_line(error: str) -> str:
    """The line that names the exception: the last one that is not indented."""
    lines = [line for line in error.splitlines() if line.strip()]
    named = [line for line in lines if not line[0].isspace() and line not in CHAINED and line != HEADER]
    return (named or lines or [""])[-1].strip()


def _without_starting(lines: list[str]) -> list[str]:
    """Without the first frames of every traceback, as far as they only started the script; never without all."""
    kept: list[str] = []
    at = 0
    while at < len(lines):
        kept.append(lines[at])
        at += 1
        if HEADER in lines[at - 1]:
            end = _skip(lines, at)
            at = at if end < len(lines) and not _FILE.match(lines[end]) else end
    return kept


def _skip(lines: list[str], at: int) -> int:
    """Where the first frame of the user's own begins, or the frames end."""
    while at < len(lines) and (frame := _FILE.match(lines[at])) and _STARTING.search(frame["path"]):
        at += 1
        while at < len(lines) and lines[at].startswith(" ") and not _FILE.match(lines[at]):
            at += 1
    return at
