"""What is said of cells that did not end well, and of where the ranks are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_launch.cards import name_text
from gpu_launch.failure import first_failure, is_victim
from gpu_launch.quantities import format_span
from gpu_launch.render import count, ranks_text
from gpu_launch.shortage import find_gpu_shortage, shortage_text
from gpu_launch.spec import RankEnd
from gpu_launch.standing.executor import How
from gpu_launch.standing.idle import NOTICE_S
from gpu_launch.tracebacks import last_line

USABLE = "The process group is usable, and all variables are kept."
RENEWED = (
    "The ranks were started anew with a fresh process group: all their variables are gone. "
    "Run the cells that make them again."
)
GIVEN_BACK = "The ranks were ended, as others waited for GPUs and no cell ran: their variables are gone."
_KILLED = "did not come back from the interrupt, and was killed"
NOTHING_STANDS = "No ranks stand. %%gpu_ranks over a cell starts them; %gpu_ranks --help lists the flags.\n"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a cell ended on a rank; `how` is None where the rank did not come back."""

    rank: int
    node: str
    how: How | None
    error: str = ""
    at_ns: int = 0
    #: The name of its GPU, where known.
    gpu: str = ""


def failure_text(ends: Sequence[Ended]) -> str:
    """The first failing rank's traceback, then a line for each way in which others ended. Some rank has failed."""
    first = _first(ends)
    if first is None:
        return _others_text(ends)
    shortage = find_gpu_shortage(first.error)
    who = f"rank {first.rank} on {first.node}"
    head = (
        f"{who} ran out of GPU memory: {shortage_text(shortage, name_text(first.gpu))}"
        if shortage
        else f"{who} failed{' first' if sum(end.how is How.FAILED for end in ends) > 1 else ''}"
    )
    others = _others_text([end for end in ends if end is not first])
    return "\n".join([f"{head}:\n\n{first.error}\n", *([others] if others else [])])


def _first(ends: Sequence[Ended]) -> Ended | None:
    """The rank to blame, by the rules for ranks of a launch."""
    failed = {end.rank: end for end in ends if end.how is How.FAILED}
    found = first_failure(
        RankEnd(rank=end.rank, node=end.node, exit_code=1, error=end.error, at_ns=end.at_ns) for end in failed.values()
    )
    return None if found is None else failed[found.rank]


def _others_text(ends: Sequence[Ended]) -> str:
    groups: dict[str, list[int]] = {}
    for end in ends:
        if text := _other_text(end):
            groups.setdefault(text, []).append(end.rank)
    return "\n".join(f"{ranks_text(ranks)}: {_agree(text, ranks)}" for text, ranks in groups.items())


def _other_text(end: Ended) -> str:
    match end.how:
        case How.DONE:
            return ""
        case How.INTERRUPTED:
            return "interrupted"
        case How.FAILED:
            lost = is_victim(RankEnd(rank=end.rank, node=end.node, exit_code=1, error=end.error, at_ns=end.at_ns))
            return f"{'lost a peer, ' if lost else ''}{last_line(end.error)}"
        case None:
            return _KILLED


def _agree(text: str, ranks: Sequence[int]) -> str:
    return text.replace("was", "were") if text == _KILLED and len(ranks) > 1 else text


def stand_text(ranks: int, nodes: str) -> str:
    """When they have been started."""
    stand = "stands" if ranks == 1 else "stand"
    return f"{count(ranks, 'rank')} {stand} on {nodes}, and {_hold(ranks)} until %gpu_ranks --stop or the kernel's end"


def state_text(ranks: int, nodes: str, *, stands_s: float, idle_s: float | None, flags: str, logs: str) -> str:
    """For `%gpu_ranks` alone; `idle_s` is None while a cell runs."""
    now = "a cell runs" if idle_s is None else f"idle for {format_span(idle_s)}"
    started = f"Started with: %gpu_ranks {flags}".rstrip()
    return (
        f"{count(ranks, 'rank')} on {nodes} for {format_span(stands_s)}, {now}. {started}\n"
        f"The GPUs are held until %gpu_ranks --stop or the kernel's end. Logs: {logs}\n"
    )


def warning_text(idle_s: float) -> str:
    """Before idle ranks end, as others wait."""
    return (
        f"others wait for GPUs, and these ranks have run no cell for {format_span(idle_s)}: they end in "
        f"{format_span(NOTICE_S)}, with all their variables. Any %%gpu_ranks cell keeps them"
    )


def _hold(ranks: int) -> str:
    return "holds its GPU" if ranks == 1 else "hold their GPUs"
