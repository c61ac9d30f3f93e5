"""Which rank failed first, and what to say about it. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

from gpu_launch.cards import name_text
from gpu_launch.render import count, ranks_text, span_text
from gpu_launch.shortage import find_gpu_shortage, gib_text, shortage_text
from gpu_launch.spec import RankEnd
from gpu_launch.tracebacks import HEADER, last_line, own_error

#: How a rank ends when another one has left it.
_LEFT = re.compile(
    r"Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|recvValue failed"
    r"|remote process exited|NCCL communicator was aborted|Gloo connectFullMesh failed"
)
#: How it ends when another one does not come.
_IN_VAIN = re.compile(
    r"Watchdog caught collective operation timeout.*?Timeout\(ms\)=(?P<nccl>\d+)"
    r"|Watchdog caught collective operation timeout"
    r"|Timed out waiting (?P<gloo>\d+)ms|[Ww]ait timeout after (?P<store>\d+)ms"
    r"|Timed out after (?P<clients>\d+) seconds"
    r"|failed to pass monitoredBarrier|Socket Timeout"
)
#: Errors that are no proof of either, but of a rank that did not fail by itself.
_OTHERS = re.compile(r"DistBackendError|DistNetworkError|DistStoreError")
#: How likely a rank that failed is not the one to blame.
OWN_ERROR, KILLED, VICTIM, STOPPED = range(4)
#: Characters of another rank's error.
_LONGEST = 160
#: Signals by which torchrun or a launch ends the ranks that are left.
_ENDING = frozenset({-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT})


def is_victim(end: RankEnd) -> bool:
    """Whether this rank ended because another one did, or did not come."""
    error = own_error(end.error)
    return any(pattern.search(error) for pattern in (_LEFT, _IN_VAIN, _OTHERS))


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank to blame: one with an error of its own before one that was left or stopped; then the earliest."""
    failed = [end for end in ends if end.exit_code != 0]
    return min(failed, key=lambda end: (grade(end), end.at_ns or float("inf"), end.rank), default=None)


def grade(end: RankEnd) -> int:
    """OWN_ERROR, KILLED, VICTIM or STOPPED."""
    if end.is_out_of_memory and end.exit_code == -signal.SIGKILL:
        return OWN_ERROR
    if is_victim(end):
        return VICTIM
    if end.exit_code in _ENDING or end.exit_code is None:
        # SIGKILL without our doing is the kernel's for want of memory: still to blame before a rank that was left. So
        # is one that had failed by itself, and was stopped before its end was known.
        return KILLED if end.exit_code == -signal.SIGKILL or _has_raised(end) else STOPPED
    return OWN_ERROR


def _has_raised(end: RankEnd) -> bool:
    """A traceback is the last that a stopped rank wrote; one that it logged and went on is followed by other lines."""
    _, header, rest = own_error(end.error).rpartition(HEADER)
    told = [line for line in rest.splitlines() if line.strip() and not line[0].isspace()]
    return end.exit_code is None and bool(header) and len(told) == 1 and not told[0].startswith("KeyboardInterrupt")


def describe(ends: Iterable[RankEnd], *, logs: str = "", lost: Sequence[str] = ()) -> str:
    """The text of a failure: the first failing rank's error, a line for the others, where the logs are (if told).

    `lost` are nodes that have gone silent, in words for a person.
    """
    where = [f"Logs: {logs}"] if logs else []
    ends = sorted(ends, key=lambda end: end.rank)
    first = first_failure(ends)
    if first is None:
        return "\n".join(["The launch failed before any rank ran.", *where])
    others = [end for end in ends if end is not first]
    error = own_error(first.error) or "It wrote nothing to stderr."
    head = _headline(first, others, lost)
    return "\n".join([head, "", error, "", *_others_text(first, others), *where])


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


def _headline(first: RankEnd, others: Sequence[RankEnd], lost: Sequence[str]) -> str:
    """Who failed of what, in one line."""
    who = f"rank {first.rank} on {first.node}"
    error = own_error(first.error)
    if shortage := find_gpu_shortage(error):
        return f"{who} ran out of GPU memory: {shortage_text(shortage, name_text(first.gpu))}"
    if first.is_out_of_memory:
        limit = f" of {gib_text(first.memory_limit_mib / 1024)}" if first.memory_limit_mib else ""
        how = "was killed" if first.exit_code == -signal.SIGKILL else f"failed ({exit_text(first.exit_code)})"
        return f"{who} {how}: its container reached its memory limit{limit}"
    if grade(first) == VICTIM:
        if lost:
            return f"{who} lost a peer: {'; '.join(lost)}"
        if found := _IN_VAIN.search(error):
            return f"{who} waited for its peers{_waited_text(found)} in vain{_absent_text(others)}"
        if _LEFT.search(error):
            return f"{who} lost a peer{_absent_text(others)}"
    return f"{who} failed" if first.exit_code is None else f"{who} failed: {exit_text(first.exit_code)}"


def _waited_text(found: re.Match[str]) -> str:
    parts = found.groupdict()
    waited_ms = parts["nccl"] or parts["gloo"] or parts["store"]
    seconds = float(waited_ms) / 1000 if waited_ms else float(parts["clients"] or 0)
    return f" for {span_text(seconds)}" if seconds else ""


def _absent_text(others: Sequence[RankEnd]) -> str:
    """The ranks that did not come, as far as that can be told from how they ended."""
    done = [end for end in others if end.exit_code == 0]
    silent = [end for end in others if end.exit_code != 0 and not is_victim(end)]
    parts = [f"{_who(done)} had finished already"] if done else []
    parts += [f"{_who(silent)} did not answer"] if silent else []
    return f": {', '.join(parts)}" if parts else ""


def _others_text(first: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """A line for every way in which other ranks ended."""
    groups: dict[str, list[RankEnd]] = {}
    for end in others:
        groups.setdefault(_kind(end, first), []).append(end)
    lines = []
    for kind, ends in groups.items():
        match kind:
            case "finished":
                lines.append(f"{ranks_text([end.rank for end in ends])} had finished")
            case "stopped":
                verb = "was" if len(ends) == 1 else "were"
                lines.append(f"{ranks_text([end.rank for end in ends])} {verb} stopped")
            case "victim":
                lines.append(f"{_who(ends)}: lost a peer, {_said(ends[0])}")
            case _:
                lines.append(f"{_who(ends)}: {kind}")
    return lines


def _kind(end: RankEnd, first: RankEnd) -> str:
    """`finished`, `stopped`, `victim`, or how it failed in words."""
    if end.exit_code == 0:
        return "finished"
    # After the first one of a container the others were killed by the launch, which looks the same.
    if end.is_out_of_memory and end.exit_code == -signal.SIGKILL and end.node != first.node:
        return "killed, its container reached its memory limit"
    if is_victim(end):
        return "victim"
    if end.exit_code is None or end.exit_code in _ENDING:
        return "stopped"
    said = _said(end)
    return f"{exit_text(end.exit_code)}{f', {said}' if said else ''}"


def _said(end: RankEnd) -> str:
    """The last line of its error, not too long."""
    line = last_line(own_error(end.error))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _who(ends: Sequence[RankEnd]) -> str:
    """`rank 0 (rig1)`, `ranks 1-3 (rig2, rig3)`."""
    nodes = list(dict.fromkeys(end.node for end in ends))
    shown = ", ".join(nodes) if len(nodes) <= 4 else f"{count(len(nodes), 'node')}"
    return f"{ranks_text([end.rank for end in ends])} ({shown})"
