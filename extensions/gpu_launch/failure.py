"""Which rank failed first, and what to say about it. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from gpu_launch.spec import RankEnd

_HEADER = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
#: torch.distributed prefixes a rank's own traceback with its rank.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
#: How a rank ends when another one has left it.
_VICTIM = re.compile(
    r"Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|DistBackendError|DistNetworkError"
    r"|DistStoreError|Socket Timeout|NCCL communicator was aborted|Watchdog caught collective operation timeout"
    r"|recvValue failed|Gloo connectFullMesh failed",
)
#: Signals by which torchrun or a launch ends the ranks that are left.
_STOPPED = frozenset({-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT})
_TAIL_LINES = 20


def own_error(text: str) -> str:
    """The last traceback in a rank's stderr with those it was raised from; its last lines where there is none."""
    text = _RANK_PREFIX.sub("", text).strip("\n")
    start = text.rfind(_HEADER)
    if start < 0:
        return "\n".join(text.splitlines()[-_TAIL_LINES:])
    while (earlier := text.rfind(_HEADER, 0, start)) >= 0 and any(phrase in text[earlier:start] for phrase in _CHAINED):
        start = earlier
    return text[start:]


def last_line(error: str) -> str:
    """The line that names the exception: the last one that is not indented."""
    lines = [line for line in error.splitlines() if line.strip()]
    named = [line for line in lines if not line[0].isspace() and line not in _CHAINED and line != _HEADER]
    return (named or lines or [""])[-1].strip()


def is_victim(end: RankEnd) -> bool:
    """Whether this rank ended because another one did."""
    return bool(_VICTIM.search(own_error(end.error)))


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank to blame: one with an error of its own before one that was left or stopped; then the earliest."""
    failed = [end for end in ends if end.exit_code != 0]
    return min(failed, key=lambda end: (_grade(end), end.at_ns or float("inf"), end.rank), default=None)


def describe(ends: Iterable[RankEnd], *, logs: str) -> str:
    """The text of a failure: the first failing rank's error, one line for every other rank, where the logs are."""
    ends = sorted(ends, key=lambda end: end.rank)
    first = first_failure(ends)
    if first is None:
        return f"The launch failed before any rank ran.\nLogs: {logs}"
    error = own_error(first.error) or "It wrote nothing to stderr."
    others = [f"rank {end.rank} ({end.node}): {_short(end)}" for end in ends if end is not first]
    head = f"rank {first.rank} on {first.node} failed: {exit_text(first.exit_code)}"
    return "\n".join([head, "", error, "", *others, f"Logs: {logs}"])


def exit_text(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "stopped"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {"SIGKILL": " (killed; out of memory is the usual reason)", "SIGSEGV": " (crashed in native code)"}
    return name + hint.get(name, "")


def _grade(end: RankEnd) -> int:
    if is_victim(end):
        return 2
    if end.exit_code in _STOPPED or end.exit_code is None:
        # SIGKILL without our doing is the kernel's for want of memory: still to blame before a rank that was left.
        return 1 if end.exit_code == -signal.SIGKILL else 3
    return 0


def _short(end: RankEnd) -> str:
    if end.exit_code == 0:
        return "finished"
    if end.exit_code is None or end.exit_code == -signal.SIGTERM:
        return "stopped"
    said = last_line(own_error(end.error))
    return f"{exit_text(end.exit_code)}{f', {said}' if said else ''}"
