"""From typed options to one `LaunchOptions`, and back.

`%gpu_launch`, `%%gpu_launch`, `%%gpu_ranks`, `gpu_launch.run(...)`, `gpu-launch run` and completion use the options of
`definition`, and get one `LaunchOptions`. `format_words` is the way back: a detached job's manifest has the options as
words, which `parse_words` reads on the cluster.
"""

from __future__ import annotations

import difflib
import shlex
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import click

from gpu_launch.errors import UsageError
from gpu_launch.options.conflicts import EXCLUDING, REFUSED
from gpu_launch.options.definition import BENCH_MODULE, BENCH_OPTIONS, BY_NAME, OPTIONS, TORCHRUN
from gpu_launch.options.launch_options import DEMAND_FIELDS, JOB_FIELDS, NOT_IN_MANIFEST, LaunchOptions
from gpu_launch.options.option import LaunchOption


@dataclass(frozen=True, kw_only=True)
class TypedLine:
    """A command line, split into checked values and the words that belong to the script."""

    #: Option name → value; only options that were typed.
    values: Mapping[str, Any] = field(default_factory=dict)
    torchrun_flags: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    #: `--` stands before the rest.
    has_separator: bool = False


class LaunchCommand(click.Command):
    """A command line of launch options, in torchrun's spelling too: `--nproc_per_node`."""

    def __init__(
        self,
        name: str,
        own_options: Sequence[click.Option] = (),
        launch_options: Sequence[LaunchOption] = OPTIONS,
        *,
        usage: str = "[options]",
        help: str = "",
    ) -> None:
        super().__init__(
            name,
            params=[*own_options, *launch_options],
            help=help,
            add_help_option=False,
            context_settings={
                "allow_interspersed_args": False,
                "allow_extra_args": True,
                "help_option_names": [],
                "token_normalize_func": lambda token: token.replace("_", "-"),
            },
        )

        self._usage = usage

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [self._usage]

    def read(self, words: Sequence[str]) -> TypedLine:
        """Return the options in an argument list; everything from the first word that is not a flag is the rest.

        Raises:
            UsageError: for an unknown flag, a flag that a launch refuses, and a wrong or missing value.
        """
        try:
            context = self.make_context(self.name, list(words))
        except click.NoSuchOption as error:
            self._refuse_unknown(_find_typed(words, error.option_name))
        except click.BadOptionUsage as error:
            option = self._find(str(error.option_name))
            lacks = "takes no value" if option is not None and option.is_flag else "needs a value"
            raise UsageError(f"{_find_typed(words, str(error.option_name))} {lacks}.") from None
        except click.UsageError as error:
            raise UsageError(error.format_message()) from None
        rest = tuple(context.args)
        typed = {name: value for name, value in context.params.items() if value is not None and value is not False}
        torchruns = [name for name in typed if name in BY_NAME and BY_NAME[name].is_torchruns]
        return TypedLine(
            torchrun_flags=tuple(_format_torchrun_flag(BY_NAME[name], typed.pop(name)) for name in torchruns),
            values=typed,
            rest=rest,
            has_separator=len(rest) < len(words) and words[len(words) - len(rest) - 1] == "--",
        )

    def _find(self, flag: str) -> click.Option | None:
        options = (option for option in self.params if isinstance(option, click.Option))
        return next((option for option in options if flag in option.opts), None)

    def _refuse_unknown(self, flag: str) -> NoReturn:
        label = flag.removeprefix("--").replace("_", "-")
        if label in REFUSED:
            raise UsageError(f"{flag} is torchrun's, and not for a launch: {REFUSED[label]}. Leave it out.")
        known = [name for option in reversed(self.params) for name in reversed(option.opts)]
        close = difflib.get_close_matches(flag.replace("_", "-"), known, n=2, cutoff=0.6)
        hint = f"Did you mean {' or '.join(close)}?" if close else "%gpu_launch --help lists the flags."
        raise UsageError(f"There is no flag {flag}. {hint} The script's own arguments come after the script.")


LAUNCH_COMMAND = LaunchCommand(
    "%gpu_launch",
    usage="[options] script.py [script's arguments]",
    help="Run a script, or over a cell with %% the cell, with torchrun on the GPUs of several nodes.",
)


BENCH_COMMAND = LaunchCommand(
    "%gpu_bench",
    launch_options=BENCH_OPTIONS,
    usage="[options]",
    help="Measure GPUs and the network between them, for %gpu_launch --predict.",
)


def split_line(line: str) -> list[str]:
    """Return a magic's words, split as a shell splits them.

    Raises:
        UsageError: for a quotation mark without its partner.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{error} in: {line.strip()}") from None


def parse(line: str, *, cell: bool = False) -> LaunchOptions:
    """Return the options in a magic's line. With `cell` the cell is the script, and its arguments follow `--`."""
    return parse_words(split_line(line), cell=cell)


def parse_bench(line: str) -> LaunchOptions:
    """Return the options of the launch that measures GPUs and the network between them.

    Raises:
        UsageError: naming what `%gpu_bench` does not take.
    """
    typed = BENCH_COMMAND.read(split_line(line))
    if typed.values.get("help"):
        return LaunchOptions(help=True)
    if typed.rest:
        raise UsageError(f"%gpu_bench takes no arguments, and {typed.rest[0]} is one.")
    options = build(typed.values, script=BENCH_MODULE)
    if options.least_nnodes is not None:
        raise UsageError("%gpu_bench --nnodes: one number of nodes is needed, all of which are measured together.")
    return replace(options, module=True)


def parse_words(words: Sequence[str], *, cell: bool = False) -> LaunchOptions:
    """Return the options in an argument list; everything from the script on belongs to the script.

    Raises:
        UsageError: naming the flag and what is right.
    """
    typed = LAUNCH_COMMAND.read(words)
    if typed.values.get("help"):
        return LaunchOptions(help=True)
    options = build(typed.values, torchrun_flags=typed.torchrun_flags)
    _check_is_job(options)
    if cell:
        return _with_cell(options, typed)
    if not typed.rest:
        raise UsageError(
            "No script is named: %gpu_launch [options] script.py [arguments], or %%gpu_launch over a cell."
        )
    return replace(options, script=typed.rest[0], arguments=typed.rest[1:])


def build(
    values: Mapping[str, Any], *, torchrun_flags: Sequence[str] = (), script: str = "", arguments: Sequence[str] = ()
) -> LaunchOptions:
    """Return the options with these checked values, by option name.

    Raises:
        UsageError: for two that exclude each other.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for first, second, reason in EXCLUDING:
        if _is_given(given, first) and _is_given(given, second):
            raise UsageError(f"{BY_NAME[first].flag} and {BY_NAME[second].flag} exclude each other: {reason}.")
    options = LaunchOptions(torchrun_flags=tuple(torchrun_flags), script=script, arguments=tuple(arguments))
    return override(options, given)


def build_from_keywords(
    keywords: Mapping[str, Any], *, script: str = "", arguments: Sequence[str] = ()
) -> LaunchOptions:
    """Return the options with values that a Python caller gave, by `LaunchOption.keyword`; None and () are not given.

    Raises:
        UsageError: as for `%gpu_launch`.
    """
    options = {option.keyword: option for option in OPTIONS}
    given = {keyword: value for keyword, value in keywords.items() if value is not None and value not in ((), [])}
    values = {str(options[keyword].name): options[keyword].read(value) for keyword, value in given.items()}
    return build(values, script=script, arguments=arguments)


def override(options: LaunchOptions, values: Mapping[str, Any]) -> LaunchOptions:
    """Return the options with these values, by option name, in place of their own."""
    changes = {name: value for name, value in values.items() if name not in DEMAND_FIELDS}
    if "nnodes" in changes:
        changes["least_nnodes"], changes["nnodes"] = changes["nnodes"]
    demand = replace(options.demand, **{name: value for name, value in values.items() if name in DEMAND_FIELDS})
    return replace(options, demand=demand, **changes)


def format_flags(options: LaunchOptions, *, names: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the flags that differ from their defaults, or those of `names`, each followed by its value."""
    flags: list[str] = []
    for option in OPTIONS:
        name = str(option.name)
        if option.is_torchruns or (name not in names if names is not None else _is_default(options, name)):
            continue
        flags += [option.flag] if option.is_flag else [option.flag, option.write(_get(options, name))]
    return (*flags, *(word for flag in options.torchrun_flags for word in flag.split("=", 1)))


def format_words(options: LaunchOptions) -> tuple[str, ...]:
    """Return the words from which a detached job's driver reads the same options, as they stand in its manifest.

    What is asked of the GPUs is not among them: the broker knows it.
    """
    flags = []
    for option in OPTIONS:
        name = str(option.name)
        is_shape = name in ("nnodes", "nproc_per_node")
        if option.is_torchruns or name in NOT_IN_MANIFEST or (_is_default(options, name) and not is_shape):
            continue
        flags.append(option.flag if option.is_flag else f"{option.flag}={option.write(_get(options, name))}")
    script = (options.script,) if options.script else ()
    return (*flags, *options.torchrun_flags, "--", *script, *options.arguments)


def _check_is_job(options: LaunchOptions) -> None:
    for name in JOB_FIELDS:
        if not options.detach and not _is_default(options, name):
            raise UsageError(f"{BY_NAME[name].flag} is for jobs that run without this notebook: add --detach.")


def _with_cell(options: LaunchOptions, typed: TypedLine) -> LaunchOptions:
    if options.module or options.no_python:
        raise UsageError("In %%gpu_launch the cell is the script: --module and --no-python are for %gpu_launch.")
    if typed.rest and not typed.has_separator:
        raise UsageError(
            f"In %%gpu_launch the cell is the script; its arguments follow '--', such as: -- {typed.rest[0]}"
        )
    return replace(options, arguments=typed.rest)


def _is_given(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) not in (None, False, ())


def _get(options: LaunchOptions, name: str) -> Any:
    if name == "nnodes":
        return options.least_nnodes, options.nnodes
    return getattr(options.demand if name in DEMAND_FIELDS else options, name)


def _is_default(options: LaunchOptions, name: str) -> bool:
    return bool(_get(options, name) == _get(_DEFAULT, name))


def _format_torchrun_flag(option: LaunchOption, value: Any) -> str:
    return option.flag if option.is_flag else f"{option.flag}={option.write(value)}"


def _find_typed(words: Sequence[str], flag: str) -> str:
    """Return a flag as the user spelled it, underscores included."""
    flags = (word.partition("=")[0] for word in words)
    fits = (typed for typed in flags if typed.replace("_", "-") == flag or (flag[:2] != "--" and typed[:2] == flag))
    return next(fits, flag)


def format_usage(options: Iterable[LaunchOption], *, width: int = 120) -> str:
    """Return the flags and their help by section."""
    parts: list[str] = []
    section = ""
    for option in options:
        if not option.help or option.is_torchruns:
            continue
        if option.section != section:
            section = option.section
            parts.append(f"{chr(10) if parts else ''}{section}")
        left = f"  {option.usage}".ljust(25)
        left = left if left.endswith(" ") else f"{left} "
        parts.append(textwrap.fill(left + option.help, width, subsequent_indent=" " * 25, break_on_hyphens=False))
    return "\n".join(parts) + "\n"


_DEFAULT = LaunchOptions()
_TORCHRUN_FLAGS = ", ".join(option.flag for option in OPTIONS if option.is_torchruns)
BENCH_USAGE = f"""\
%gpu_bench [options]      measure each card, the all-reduces between them, and how fast they read your home

{format_usage(BENCH_OPTIONS)}"""
USAGE = f"""\
%gpu_launch [options] script.py [script's arguments]
%%gpu_launch [options] [-- arguments]      the cell's body is the script

{format_usage(OPTIONS)}
{textwrap.fill(f"{TORCHRUN}: {_TORCHRUN_FLAGS}", 120, break_on_hyphens=False)}
"""
