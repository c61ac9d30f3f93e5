"""The command line of `%%gpu`: the options of a launch that one worker can follow, and its own."""

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
from gpu_launch.options.definition import BY_LABEL
from gpu_launch.options.launch_options import LaunchOptions

_LABELS = "model memory cpus ram shm priority time-limit timeout-s preload keep send return help"
_OPTIONS = tuple(BY_LABEL[label] for label in _LABELS.split())
_OWN_OPTIONS = (
    click.Option(["--gpus"], type=types.PROCESSES, metavar="N", help="GPUs of one node that the cell sees (1)"),
    click.Option(["--stop"], is_flag=True, help="release the GPU now"),
)
#: Names of the flags, as completion shows them.
LABELS = (*(str(option.name) for option in _OWN_OPTIONS), *(option.label for option in _OPTIONS))
#: Options about one cell, not about the worker.
_OF_A_CELL = ("send", "returns")
CELL_COMMAND = LaunchCommand(
    "%%gpu",
    _OWN_OPTIONS,
    _OPTIONS,
    help="Run the cell on a GPU that is taken for it, with the notebook's variables.",
)

_START_FLAGS = ", ".join(
    option.flag for option in _OPTIONS if option.help and option.name not in _OF_A_CELL and not option.hidden
)
USAGE = f"""\
%%gpu [options]      run the cell on a GPU that is taken for it, with the notebook's variables
%gpu                 show the worker, and which variables are there alone
%gpu --stop          release the GPU

The cell gets the notebook's variables that it uses, and what it makes or changes is copied back. The worker stays with
the notebook until others wait for GPUs, or no cell has run for a while; the next use then takes a GPU again.

  --gpus N               GPUs of one node that the cell sees (1)
  --send NAME[,NAME...]  send these variables too, such as those that a string names
  --return NAME[,NAME...]  bring these back whatever their size, up to 2 GiB in all
  --stop                 release the GPU now

{textwrap.fill(f"As in %gpu_launch (%gpu_launch --help): {_START_FLAGS}.", 120, break_on_hyphens=False)}
A cell without flags uses the worker that is there, or one like the last.
"""
NO_WORKER = "No GPU is held for cells. %%gpu over a cell takes one; %gpu --help lists the flags.\n"


@dataclass(frozen=True, kw_only=True)
class GpuCellOptions:
    """One use of the magic."""

    options: LaunchOptions = field(default_factory=LaunchOptions)
    #: The options about the worker that were typed, by name.
    start_values: Mapping[str, Any] = field(default_factory=dict)
    stop: bool = False
    help: bool = False

    @property
    def start(self) -> LaunchOptions:
        """The options with which the worker starts."""
        return replace(self.options, send=(), returns=())

    def fits(self, running: LaunchOptions) -> bool:
        """Return whether a worker that was started with these options serves this use."""
        return command.override(running, self.start_values) == running


def parse(line: str, *, cell: bool) -> GpuCellOptions:
    """Return one use of the magic, over a `cell` or alone.

    Raises:
        UsageError: for anything that is wrong whatever worker is running.
    """
    typed = CELL_COMMAND.read(command.split_line(line))
    values = dict(typed.values)
    if values.pop("help", False):
        return GpuCellOptions(help=True)
    stop = bool(values.pop("stop", False))
    if "gpus" in values:
        # One process that sees all of them; the broker counts GPUs by processes.
        values["nproc_per_node"] = values.pop("gpus")
    _check(values, typed.rest, stop=stop, cell=cell)
    start_values = {name: value for name, value in values.items() if name not in _OF_A_CELL}
    return GpuCellOptions(options=command.build(values), start_values=start_values, stop=stop)


def format_flags(options: LaunchOptions) -> str:
    """Return the flags with which a worker like this is taken."""
    words = command.format_flags(replace(options, nproc_per_node=1))
    gpus = ("--gpus", str(options.nproc_per_node)) if options.nproc_per_node > 1 else ()
    return shlex.join((*gpus, *words))


def _check(values: Mapping[str, Any], rest: Sequence[str], *, stop: bool, cell: bool) -> None:
    if rest:
        raise UsageError(f"%%gpu takes no arguments, and {rest[0]!r} is one. The code is below the line, in the cell.")
    if stop and (cell or values):
        raise UsageError("--stop stands alone: %gpu --stop")
    if values and not cell:
        raise UsageError("The flags belong to a cell: %%gpu in its first line. %gpu alone shows the worker.")
