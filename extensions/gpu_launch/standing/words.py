"""`%gpu_ranks`'s command line: the flags of `%gpu_launch` that say where ranks run, and its own. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace

from gpu_launch import options
from gpu_launch.errors import UsageError
from gpu_launch.options import Options

USAGE = """\
%%gpu_ranks [options]      run the cell on every rank of a process group that stands from cell to cell
%gpu_ranks                 tell whether ranks stand, and where
%gpu_ranks [options]       start them without running anything
%gpu_ranks --stop          end them, and free their GPUs

The first use starts the ranks, with the flags of %gpu_launch: --nnodes, --nproc-per-node, --model, --memory,
--same-model, --exclusive, --priority, --time-limit, --timeout-s, --preload, --cold, --keep, --tee, --redirects,
--local-ranks-filter, --log-dir (%gpu_launch --help). Later cells need none of them.

In a cell there are rank, world_size, local_rank, device, torch and dist (torch.distributed, its default group joined),
and everything that cells before have made. The value of the last line is shown.

  --ranks RANKS          run this cell on these ranks only, such as 0,2
  --send NAME[,NAME...]  give these variables of the notebook to the ranks
  --return NAME[,NAME...] bring these of the ranks' variables back, each as a list in the order of the ranks
  --restart              end the ranks that stand, and start new ones first; with other flags, or the same again
"""

#: Flags of a launch that standing ranks cannot follow, and why.
_REFUSED = {
    "detach": "they stand as long as this notebook's kernel",
    "dry_run": "%gpu_launch --dry-run shows what a launch with these flags would ask for",
    "max_restarts": "they are started anew by themselves when the group is lost",
    "module": "a cell is what they run",
    "no_python": "a cell is what they run",
}
_RANKS = re.compile(r"\d{1,6}(,\d{1,6})*")


@dataclass(frozen=True, kw_only=True)
class Words:
    """What one use of the magic asks for."""

    #: Flags of the launch, as they were typed.
    launch: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    #: The ranks that run the cell; empty for all.
    ranks: tuple[int, ...] = ()
    stop: bool = False
    restart: bool = False
    help: bool = False


def parse(line: str, *, cell: bool) -> Words:
    """Raises UsageError for anything that is wrong by itself."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{error} in: {line.strip()}") from None
    kept: list[str] = []
    found = Words()
    while words:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if word == "--stop":
            found = replace(found, stop=True)
        elif word == "--restart":
            found = replace(found, restart=True)
        elif flag == "--ranks":
            found = replace(found, ranks=_ranks(value if has_value else (words.pop(0) if words else "")))
        elif word in ("-h", "--help"):
            return Words(help=True)
        else:
            kept.append(word)
    parsed = _launch(kept)
    _check(found, parsed, kept, cell=cell)
    return replace(found, launch=tuple(_only_start(kept)), options=parsed)


def start_options(words: tuple[str, ...]) -> Options:
    """How ranks are started with these words."""
    return replace(_launch(list(words)), send=(), returns=())


def check_same(standing: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Refuse words that ask for other ranks than those that stand."""
    has, asked = start_options(standing), start_options((*standing, *words))
    if replace(asked, passed=tuple(dict.fromkeys(asked.passed))) != has:
        raise UsageError(
            f"These ranks stand: %gpu_ranks {shlex.join(standing)}".rstrip()
            + f"\nThis asks for others: {shlex.join(words)}. Leave that out to use those that stand, or add --restart "
            "for new ones, which begin without variables."
        )


def _ranks(value: str) -> tuple[int, ...]:
    if not _RANKS.fullmatch(value):
        raise UsageError(f"--ranks {value}: ranks such as 0,2 are needed.")
    return tuple(sorted({int(rank) for rank in value.split(",")}))


def _launch(words: list[str]) -> Options:
    return options.parse_words(words, cell=True)


def _check(found: Words, parsed: Options, words: list[str], *, cell: bool) -> None:
    for name, why in _REFUSED.items():
        if getattr(parsed, name):
            raise UsageError(f"--{name.replace('_', '-')} is not for ranks that stay: {why}.")
    if parsed.least_nnodes is not None and parsed.least_nnodes != parsed.nnodes:
        raise UsageError(
            f"--nnodes {parsed.least_nnodes}:{parsed.nnodes}: ranks that stay need a fixed number of nodes, "
            f"such as --nnodes {parsed.nnodes}."
        )
    if parsed.demand.scavenge:
        raise UsageError(
            "--scavenge is not for ranks that stay: their variables would be lost whenever others need GPUs."
        )
    if parsed.arguments:
        raise UsageError(
            f"A cell on ranks takes no arguments, and {parsed.arguments[0]!r} is one; --send gives it values."
        )
    if found.stop and (cell or found.restart or found.ranks or words):
        raise UsageError("--stop stands alone: %gpu_ranks --stop")
    if not cell and (found.ranks or parsed.send or parsed.returns):
        raise UsageError("--ranks, --send and --return belong to a cell: %%gpu_ranks")


def _only_start(words: list[str]) -> list[str]:
    """Without what belongs to one cell."""
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, _ = word.partition("=")
        if flag in ("--send", "--return"):
            if not has_value:
                rest.pop(0)
        elif word != "--":
            kept.append(word)
    return kept
