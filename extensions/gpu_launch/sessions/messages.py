"""Texts about failed cells and the state of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_launch.common.gpu_reading import format_gpu_name
from gpu_launch.common.launch_spec import RankEnd
from gpu_launch.output.failure import find_first_failure, find_gpu_shortage, format_shortage, is_victim
from gpu_launch.output.text import format_count, format_ranks
from gpu_launch.output.tracebacks import find_exception_line
from gpu_launch.sessions.executor import CellOutcome
from gpu_launch.sessions.idle import NOTICE_S
from gpu_launch.units import format_span

USABLE = "The process group is usable, and all variables are kept."
RESTARTED = (
    "The ranks were restarted with a new process group: all their variables are gone. "
    "Run the cells that make them again."
)
RELEASED = "The ranks were ended because others waited for GPUs and no cell ran: their variables are gone."
_KILLED = "did not return from the interrupt and was killed"
NO_SESSION = "There is no rank session. %%gpu_ranks over a cell starts one; %gpu_ranks --help lists the flags.\n"


@dataclass(frozen=True, kw_only=True)
class CellEnd:
    """The end of a cell on a rank; `outcome` is None if the rank did not return."""

    rank: int
    node: str
    outcome: CellOutcome | None
    error: str = ""
    at_ns: int = 0
    #: Name of the rank's GPU, empty if unknown.
    gpu: str = ""


def format_failure(ends: Sequence[CellEnd]) -> str:
    """Format the first failing rank's traceback, then one line for each way in which others ended."""
    first = _find_first_failure(ends)
    if first is None:
        return _describe_others(ends)
    shortage = find_gpu_shortage(first.error)
    rank_text = f"rank {first.rank} on {first.node}"
    head = (
        f"{rank_text} ran out of GPU memory: {format_shortage(shortage, format_gpu_name(first.gpu))}"
        if shortage
        else f"{rank_text} failed{' first' if sum(end.outcome is CellOutcome.FAILED for end in ends) > 1 else ''}"
    )
    others = _describe_others([end for end in ends if end is not first])
    return "\n".join([f"{head}:\n\n{first.error}\n", *([others] if others else [])])


def _find_first_failure(ends: Sequence[CellEnd]) -> CellEnd | None:
    """Return the rank to blame, by the rules for ranks of a launch."""
    failed = {end.rank: end for end in ends if end.outcome is CellOutcome.FAILED}
    first = find_first_failure(
        RankEnd(rank=end.rank, node=end.node, exit_code=1, error=end.error, at_ns=end.at_ns) for end in failed.values()
    )
    return None if first is None else failed[first.rank]


def _describe_others(ends: Sequence[CellEnd]) -> str:
    groups: dict[str, list[int]] = {}
    for end in ends:
        if text := _describe_end(end):
            groups.setdefault(text, []).append(end.rank)
    return "\n".join(f"{format_ranks(ranks)}: {_pluralize(text, ranks)}" for text, ranks in groups.items())


def _describe_end(end: CellEnd) -> str:
    match end.outcome:
        case CellOutcome.DONE:
            return ""
        case CellOutcome.INTERRUPTED:
            return "interrupted"
        case CellOutcome.FAILED:
            lost = is_victim(RankEnd(rank=end.rank, node=end.node, exit_code=1, error=end.error, at_ns=end.at_ns))
            return f"{'lost a peer, ' if lost else ''}{find_exception_line(end.error)}"
        case None:
            return _KILLED


def _pluralize(text: str, ranks: Sequence[int]) -> str:
    return text.replace("was", "were") if text == _KILLED and len(ranks) > 1 else text


def format_started(ranks: int, nodes: str) -> str:
    """Format the message about started ranks."""
    verb = "runs" if ranks == 1 else "run"
    held = _format_held_gpus(ranks)
    return f"{format_count(ranks, 'rank')} {verb} on {nodes}, and {held} until %gpu_ranks --stop or the kernel's end"


def format_state(ranks: int, nodes: str, *, age_s: float, idle_s: float | None, flags: str, logs: str) -> str:
    """Format the state for `%gpu_ranks` alone; `idle_s` is None while a cell runs."""
    now = "a cell runs" if idle_s is None else f"idle for {format_span(idle_s)}"
    started = f"Started with: %gpu_ranks {flags}".rstrip()
    return (
        f"{format_count(ranks, 'rank')} on {nodes} for {format_span(age_s)}, {now}. {started}\n"
        f"The GPUs are held until %gpu_ranks --stop or the kernel's end. Logs: {logs}\n"
    )


def format_idle_warning(idle_s: float) -> str:
    """Format the warning before idle ranks end because others wait."""
    return (
        f"others wait for GPUs, and the rank session has run no cell for {format_span(idle_s)}: they end in "
        f"{format_span(NOTICE_S)}, with all their variables. Any %%gpu_ranks cell keeps them"
    )


def _format_held_gpus(ranks: int) -> str:
    return "holds its GPU" if ranks == 1 else "hold their GPUs"
