"""One option of a launch, for all places where it can be typed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

import click

from gpu_launch.options import value_types as types


class Surface(StrEnum):
    """A place, other than `%gpu_launch`, where options are typed."""

    #: `%%gpu_ranks`.
    RANKS = "ranks"
    #: `gpu_launch.run(...)`.
    FUNCTION = "function"
    #: `gpu-launch run`.
    COMMAND = "command"


class LaunchOption(click.Option):
    """One option of a launch; its name is that of a field of `LaunchOptions` or of `GpuRequest`."""

    def __init__(
        self,
        *declarations: str,
        section: str,
        help: str = "",
        surfaces: Collection[Surface] = tuple(Surface),
        completions: Sequence[str] = (),
        is_torchruns: bool = False,
        **more: Any,
    ) -> None:
        """`completions` are sample values; `is_torchruns` is for a flag that torchrun itself reads."""
        is_switch = "type" not in more
        super().__init__(list(declarations), help=help, is_flag=is_switch, default=False if is_switch else None, **more)
        self.section, self.surfaces, self.completions = section, frozenset(surfaces), tuple(completions)
        self.is_torchruns = is_torchruns

    @property
    def flag(self) -> str:
        """The long flag: `--nnodes`."""
        return self.opts[-1]

    @property
    def label(self) -> str:
        """The flag's name without dashes: `nnodes`."""
        return self.flag.removeprefix("--")

    @property
    def keyword(self) -> str:
        """The keyword in `gpu_launch.run`."""
        return "returns" if self.label == "return" else self.label.replace("-", "_")

    @property
    def usage(self) -> str:
        """The flags and the metavar, for the help: `-t, --tee STREAMS`."""
        return " ".join(filter(None, (", ".join(self.opts), self.metavar)))

    def read(self, value: Any) -> Any:
        """Return the checked value of what a Python caller gives."""
        if self.is_flag:
            return bool(value)
        if isinstance(value, str):
            text = value
        elif isinstance(value, Iterable):
            text = ",".join(value)
        else:
            text = str(value)
        return self.type.convert(text, self, None)

    def write(self, value: Any) -> str:
        """Return the text that is read as this value."""
        assert isinstance(self.type, types.OptionType)  # noqa: S101 - for the type checker
        return self.type.write(value)
