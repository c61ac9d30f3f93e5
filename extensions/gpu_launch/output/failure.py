"""Finds the rank that failed first, and describes the failure by that rank's own error."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_launch.common.launch_spec import RankEnd
from gpu_launch.output.text import format_count, format_exact_span, format_ranks
from gpu_launch.output.tracebacks import HEADER, extract_own_error, find_exception_line
from gpu_launch.worker.gpu_monitor import format_gpu_name

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_GIB = {"bytes": 1024.0**-3, "KiB": 1024.0**-2, "MiB": 1024.0**-1, "GiB": 1.0, "TiB": 1024.0}
_OUT_OF_MEMORY = re.compile(rf"CUDA out of memory\. Tried to allocate {_SIZE}")
#: `GPU 0 has a total capacity of 31.36 GiB of which 419.06 MiB is free.`
_CAPACITY = re.compile(rf"GPU (\d+) has a total capacity of {_SIZE} of which {_SIZE} is free")
#: As torch wrote before 2.1: `(GPU 0; 31.36 GiB total capacity; 30.00 GiB already allocated; 419.06 MiB free; …`.
_OLD_CAPACITY = re.compile(rf"\(GPU (\d+); {_SIZE} total capacity;.*?{_SIZE} free")
#: `8.00 GiB allowed;`: torch's message on a GPU share.
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
#: Errors of a rank whose peer has gone.
_LOST_PEER = re.compile(
    r"Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|recvValue failed"
    r"|remote process exited|NCCL communicator was aborted|Gloo connectFullMesh failed"
)
#: Errors of a rank that waited for a peer in vain.
_PEER_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout.*?Timeout\(ms\)=(?P<nccl>\d+)"
    r"|Watchdog caught collective operation timeout"
    r"|Timed out waiting (?P<gloo>\d+)ms|[Ww]ait timeout after (?P<store>\d+)ms"
    r"|Timed out after (?P<clients>\d+) seconds"
    r"|failed to pass monitoredBarrier|Socket Timeout"
)
#: Errors that show neither, but that the rank did not fail on its own.
_COLLECTIVE_ERROR = re.compile(r"DistBackendError|DistNetworkError|DistStoreError")
#: CUDA's errors after which the driver may report a defect of the GPU; programs cause the last two as well.
_HARDWARE = re.compile(
    r"uncorrectable ECC|[Hh]ardware|GPU is lost|unspecified launch failure|CUDA error: unknown error"
    r"|busy or unavailable|no CUDA-capable device"
)
#: Grades of failed ranks, from the most to the least likely cause.
OWN_ERROR, KILLED, VICTIM, STOPPED = range(4)
#: Maximum length of an excerpt of another rank's error, characters.
_MAX_ERROR_LENGTH = 160
#: Signals with which torchrun or a launch ends the remaining ranks.
_STOP_SIGNALS = frozenset({-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT})


def find_first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the rank to blame: one with its own error before a victim or stopped one, then the earliest."""
    failed = [end for end in ends if end.exit_code != 0]
    return min(failed, key=lambda end: (grade_failure(end), end.at_ns or float("inf"), end.rank), default=None)


def is_victim(end: RankEnd) -> bool:
    """Return whether this rank failed because of another one."""
    error = extract_own_error(end.error)
    return any(pattern.search(error) for pattern in (_LOST_PEER, _PEER_TIMEOUT, _COLLECTIVE_ERROR))


def grade_failure(end: RankEnd) -> int:
    """Grade a failed rank as OWN_ERROR, KILLED, VICTIM or STOPPED."""
    if end.is_out_of_memory and end.exit_code == -signal.SIGKILL:
        return OWN_ERROR
    if is_victim(end):
        return VICTIM
    if end.exit_code in _STOP_SIGNALS or end.exit_code is None:
        # A SIGKILL that the launch did not send comes from the kernel's out-of-memory killer: more to blame than a
        # victim. The same holds for a rank that raised an exception and was stopped before its end was known.
        return KILLED if end.exit_code == -signal.SIGKILL or _has_raised(end) else STOPPED
    return OWN_ERROR


def _has_raised(end: RankEnd) -> bool:
    """Return whether a stopped rank's last output is a traceback; after one that it only logged, other lines follow."""
    _, header, rest = extract_own_error(end.error).rpartition(HEADER)
    lines = [line for line in rest.splitlines() if line.strip() and not line[0].isspace()]
    return end.exit_code is None and bool(header) and len(lines) == 1 and not lines[0].startswith("KeyboardInterrupt")


def describe_failure(ends: Iterable[RankEnd], *, logs: str = "", lost: Sequence[str] = ()) -> str:
    """Describe a failure: the first failing rank's error, a line for the others, the folder of the logs.

    Args:
        ends: Ends of the ranks.
        logs: Folder of the logs, empty to leave it out.
        lost: Descriptions of nodes that have gone silent.
    """
    where = [f"Logs: {logs}"] if logs else []
    ends = sorted(ends, key=lambda end: end.rank)
    first = find_first_failure(ends)
    if first is None:
        return "\n".join(["The launch failed before any rank ran.", *where])
    others = [end for end in ends if end is not first]
    error = extract_own_error(first.error) or "It wrote nothing to stderr."
    head = _format_headline(first, others, lost)
    return "\n".join([head, "", error, "", *_describe_others(first, others), *where])


def format_exit_code(code: int | None) -> str:
    """Describe how a process ended."""
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


@dataclass(frozen=True, kw_only=True)
class GpuShortage:
    """torch's message about a lack of GPU memory; sizes in GiB, None where the message lacks them."""

    #: As torch writes it, such as `2.00 GiB`.
    requested: str
    free: float | None = None
    total: float | None = None
    #: The most this process may have, if that is less than all.
    allowed: float | None = None
    #: Number of the GPU in the process.
    index: int | None = None


def find_gpu_shortage(error: str) -> GpuShortage | None:
    """Parse torch's out-of-memory error from an error's last lines; None for any other error."""
    matches = list(_OUT_OF_MEMORY.finditer(error))
    if not matches:
        return None
    message = error[matches[-1].start() :]
    capacity = _CAPACITY.search(message) or _OLD_CAPACITY.search(message)
    allowed = _ALLOWED.search(message)
    return GpuShortage(
        requested=f"{matches[-1][1]} {matches[-1][2]}",
        index=int(capacity[1]) if capacity else None,
        total=_convert_to_gib(capacity[2], capacity[3]) if capacity else None,
        free=_convert_to_gib(capacity[4], capacity[5]) if capacity else None,
        allowed=_convert_to_gib(allowed[1], allowed[2]) if allowed else None,
    )


def format_shortage(shortage: GpuShortage, gpu: str) -> str:
    """Format as `asked for 2.00 GiB, 0.41 GiB of 31.4 GiB free on RTX 5090 (GPU-1a2b…)`; `gpu` is empty if unknown."""
    name = gpu or (f"GPU {shortage.index}" if shortage.index is not None else "its GPU")
    text = f"asked for {shortage.requested}"
    if shortage.free is None or shortage.total is None:
        return f"{text} on {name}"
    text = f"{text}, {format_gib(shortage.free)} of {format_gib(shortage.total)} free on {name}"
    return text if shortage.allowed is None else f"{text}, of which it may use {format_gib(shortage.allowed)}"


def may_be_hardware(error: str) -> bool:
    """Return whether a failure looks like one of a GPU, which the driver reports a moment later."""
    return _HARDWARE.search(error) is not None


def add_gpu_problems(text: str, problems: Sequence[str]) -> str:
    """Return the description of a failure, below what the broker knows of defects of the GPUs."""
    return "\n".join([*problems, "", text]) if problems else text


def format_gib(size: float) -> str:
    """Format as `0.41 GiB`, `31.4 GiB`."""
    return f"{size:.1f} GiB" if size >= 10 else f"{size:.2f} GiB"


def _convert_to_gib(number: str, unit: str) -> float:
    try:
        return float(number) * _GIB[unit]
    except ValueError:
        return 0.0


def _format_headline(first: RankEnd, others: Sequence[RankEnd], lost: Sequence[str]) -> str:
    """Return one line with the failing rank and the cause."""
    rank_text = f"rank {first.rank} on {first.node}"
    error = extract_own_error(first.error)
    if shortage := find_gpu_shortage(error):
        return f"{rank_text} ran out of GPU memory: {format_shortage(shortage, format_gpu_name(first.gpu))}"
    if first.is_out_of_memory:
        limit = f" of {format_gib(first.memory_limit_mib / 1024)}" if first.memory_limit_mib else ""
        what = "was killed" if first.exit_code == -signal.SIGKILL else f"failed ({format_exit_code(first.exit_code)})"
        return f"{rank_text} {what}: its container reached its memory limit{limit}"
    if grade_failure(first) == VICTIM:
        if lost:
            return f"{rank_text} lost a peer: {'; '.join(lost)}"
        if timeout := _PEER_TIMEOUT.search(error):
            return f"{rank_text} waited for its peers{_format_wait(timeout)} without an answer{_format_absent(others)}"
        if _LOST_PEER.search(error):
            return f"{rank_text} lost a peer{_format_absent(others)}"
    return (
        f"{rank_text} failed" if first.exit_code is None else f"{rank_text} failed: {format_exit_code(first.exit_code)}"
    )


def _format_wait(timeout: re.Match[str]) -> str:
    parts = timeout.groupdict()
    waited_ms = parts["nccl"] or parts["gloo"] or parts["store"]
    seconds = float(waited_ms) / 1000 if waited_ms else float(parts["clients"] or 0)
    return f" for {format_exact_span(seconds)}" if seconds else ""


def _format_absent(others: Sequence[RankEnd]) -> str:
    """Return the ranks that did not come to a collective, as far as their ends show it."""
    done = [end for end in others if end.exit_code == 0]
    silent = [end for end in others if end.exit_code != 0 and not is_victim(end)]
    parts = [f"{_format_ranks_on_nodes(done)} had finished already"] if done else []
    parts += [f"{_format_ranks_on_nodes(silent)} did not answer"] if silent else []
    return f": {', '.join(parts)}" if parts else ""


def _describe_others(first: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """Return one line for each way in which the other ranks ended."""
    groups: dict[str, list[RankEnd]] = {}
    for end in others:
        groups.setdefault(_classify(end, first), []).append(end)
    lines = []
    for kind, ends in groups.items():
        match kind:
            case "finished":
                lines.append(f"{format_ranks([end.rank for end in ends])} had finished")
            case "stopped":
                verb = "was" if len(ends) == 1 else "were"
                lines.append(f"{format_ranks([end.rank for end in ends])} {verb} stopped")
            case "victim":
                lines.append(f"{_format_ranks_on_nodes(ends)}: lost a peer, {_shorten_error(ends[0])}")
            case _:
                lines.append(f"{_format_ranks_on_nodes(ends)}: {kind}")
    return lines


def _classify(end: RankEnd, first: RankEnd) -> str:
    """Return `finished`, `stopped`, `victim`, or a description of the failure."""
    if end.exit_code == 0:
        return "finished"
    # On the same node the launch killed the others after the first one, which looks the same.
    if end.is_out_of_memory and end.exit_code == -signal.SIGKILL and end.node != first.node:
        return "killed, its container reached its memory limit"
    if is_victim(end):
        return "victim"
    if end.exit_code is None or end.exit_code in _STOP_SIGNALS:
        return "stopped"
    short_error = _shorten_error(end)
    return f"{format_exit_code(end.exit_code)}{f', {short_error}' if short_error else ''}"


def _shorten_error(end: RankEnd) -> str:
    """Return the last line of its error, cut if too long."""
    line = find_exception_line(extract_own_error(end.error))
    return line if len(line) <= _MAX_ERROR_LENGTH else f"{line[: _MAX_ERROR_LENGTH - 1]}…"


def _format_ranks_on_nodes(ends: Sequence[RankEnd]) -> str:
    """Format as `rank 0 (rig1)`, `ranks 1-3 (rig2, rig3)`."""
    nodes = list(dict.fromkeys(end.node for end in ends))
    shown = ", ".join(nodes) if len(nodes) <= 4 else f"{format_count(len(nodes), 'node')}"
    return f"{format_ranks([end.rank for end in ends])} ({shown})"
