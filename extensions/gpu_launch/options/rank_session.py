"""The command line of `%gpu_ranks`: the options of a launch about where ranks run, and its own."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click

from gpu_launch.errors import UsageError
from gpu_launch.options import command
from gpu_launch.options import value_types as types
from gpu_launch.options.command import LaunchCommand
from gpu_launch.options.definition import OPTIONS as LAUNCH_OPTIONS
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.options.option import Surface

OPTIONS = tuple(option for option in LAUNCH_OPTIONS if Surface.RANKS in option.surfaces)
_OWN_OPTIONS = (
    click.Option(["--ranks"], type=types.RANKS, metavar="RANKS", help="run this cell on these ranks only, such as 0,2"),
    click.Option(["--restart"], is_flag=True, help="end the running ranks, and start new ones first"),
    click.Option(["--stop"], is_flag=True, help="end the running ranks"),
)
#: Names of the flags, as completion shows them.
LABELS = (*(str(option.name) for option in _OWN_OPTIONS), *(option.label for option in OPTIONS))
#: Options about one cell, not about how ranks start.
_OF_A_CELL = ("send", "returns")

_START_FLAGS = ", ".join(option.flag for option in OPTIONS if option.help and option.name not in _OF_A_CELL)
USAGE = f"""\
%%gpu_ranks [options]      run the cell on every rank of a process group that stays from cell to cell
%gpu_ranks                 show whether ranks are running, and where
%gpu_ranks [options]       start them without running anything
%gpu_ranks --stop          end them, and free their GPUs

The first use starts the ranks, with the flags of %gpu_launch (%gpu_launch --help):
{textwrap.fill(_START_FLAGS, 120, break_on_hyphens=False)}.
Later cells need none of them.

In a cell there are rank, world_size, local_rank, device, torch and dist (torch.distributed, its default group joined),
and everything that earlier cells have made. The value of the last line is shown.

  --ranks RANKS          run this cell on these ranks only, such as 0,2
  --send NAME[,NAME...]  give these variables of the notebook to the ranks
  --return NAME[,NAME...]  copy these of the ranks' variables to the notebook, each as a list in the order of the ranks
  --restart              end the running ranks, and start new ones first; with other flags, or the same again
"""

NO_SESSION = "There is no rank session. %%gpu_ranks over a cell starts one; %gpu_ranks --help lists the flags.\n"
#: Options of a launch that the ranks of a session cannot follow, and why.
_REFUSED = {
    "detach": "they run as long as this notebook's kernel",
    "dry_run": "%gpu_launch --dry-run shows what a launch with these flags would ask for",
    "max_restarts": "they are started again automatically when the group is lost",
    "module": "a cell is what they run",
    "no_python": "a cell is what they run",
}
#: It knows all options of a launch, so that the refusal of one has a reason.
_COMMAND_LINE = LaunchCommand("%gpu_ranks", _OWN_OPTIONS)
#: The command line with the options that are permitted.
RANKS_COMMAND = LaunchCommand(
    "%%gpu_ranks",
    _OWN_OPTIONS,
    OPTIONS,
    help="Run the cell on every rank of a process group that stays from cell to cell.",
)


@dataclass(frozen=True, kw_only=True)
class RankSessionOptions:
    """One use of the magic."""

    options: LaunchOptions = field(default_factory=LaunchOptions)
    #: The options about how ranks start that were typed, by name.
    start_values: Mapping[str, Any] = field(default_factory=dict)
    #: The ranks that run the cell; empty for all.
    ranks: tuple[int, ...] = ()
    stop: bool = False
    restart: bool = False
    help: bool = False

    @property
    def start(self) -> LaunchOptions:
        """The options with which ranks start."""
        return replace(self.options, send=(), returns=())

    @property
    def start_flags(self) -> tuple[str, ...]:
        """The flags about how ranks start, as words."""
        return command.format_flags(self.options, names=self.start_values.keys())

    @property
    def has_start_flags(self) -> bool:
        """Return whether the user chose certain ranks."""
        return bool(self.start_values or self.options.torchrun_flags)


def parse(line: str, *, cell: bool) -> RankSessionOptions:
    """Return one use of the magic, over a `cell` or alone.

    Raises:
        UsageError: for anything that is wrong whatever ranks are running.
    """
    words = command.split_line(line)
    typed = _COMMAND_LINE.read(words)
    values = dict(typed.values)
    if values.pop("help", False):
        return RankSessionOptions(help=True)
    own = {name: values.pop(name) for name in ("ranks", "restart", "stop") if name in values}
    options = command.build(values, torchrun_flags=typed.torchrun_flags)
    asked = RankSessionOptions(
        options=options,
        start_values={name: value for name, value in values.items() if name not in _OF_A_CELL},
        **own,
    )
    _check(asked, typed.rest, has_more_words=bool(values or typed.torchrun_flags or typed.rest), cell=cell)
    return asked


def check_same(running: LaunchOptions, asked: RankSessionOptions) -> None:
    """Refuse options that ask for other ranks than the running ones.

    Raises:
        UsageError: naming both.
    """
    merged = command.override(running, asked.start_values)
    flags = tuple(dict.fromkeys((*running.torchrun_flags, *asked.options.torchrun_flags)))
    if replace(merged, torchrun_flags=flags) != running:
        raise UsageError(
            f"These ranks are running: %gpu_ranks {shlex.join(command.format_flags(running))}".rstrip()
            + f"\nThis asks for others: {shlex.join(asked.start_flags)}. Leave that out to use the running ones, or "
            "add --restart for new ones, which begin without variables."
        )


def _check(asked: RankSessionOptions, rest: Sequence[str], *, has_more_words: bool, cell: bool) -> None:
    options = asked.options
    for name, why in _REFUSED.items():
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is not for ranks that stay: {why}.")
    if options.least_nnodes is not None and options.least_nnodes != options.nnodes:
        raise UsageError(
            f"--nnodes {options.least_nnodes}:{options.nnodes}: ranks that stay need a fixed number of nodes, "
            f"such as --nnodes {options.nnodes}."
        )
    if options.demand.scavenge:
        raise UsageError(
            "--scavenge is not for ranks that stay: their variables would be lost whenever others need GPUs."
        )
    if rest:
        raise UsageError(f"A cell on ranks takes no arguments, and {rest[0]!r} is one; --send gives it values.")
    if asked.stop and (cell or asked.restart or asked.ranks or has_more_words):
        raise UsageError("--stop stands alone: %gpu_ranks --stop")
    if not cell and (asked.ranks or options.send or options.returns):
        raise UsageError("--ranks, --send and --return belong to a cell: %%gpu_ranks")
