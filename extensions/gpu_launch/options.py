"""`%gpu_launch`'s command line: torchrun's flag names, checked before anything is asked for. Pure."""

from __future__ import annotations

import difflib
import keyword
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from gpu_launch import flags, quantities
from gpu_launch.demand import Demand
from gpu_launch.errors import UsageError

_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_SECONDS = re.compile(r"(?=.*[1-9])\d{1,7}(\.\d{1,3})?")
_RANKS = re.compile(r"\d+(,\d+)*")
_MOST_NODES, _MOST_PROCESSES, _MOST_MODELS, _MOST_PRIORITY = 1024, 64, 16, 100
_LEAST_TIME_S, _MOST_TIME_S = 60, 366 * 86400
_MOST_KEEP_S = 86400
_SIGNAL = re.compile(r"SIG[A-Z0-9]{2,12}")
_ROLE = re.compile(r"[\w.-]{1,64}")
#: As in torch.numa.binding.
_BINDINGS = ("node", "socket", "exclusive", "core-complex")
_OUTLIVES = "a detached job goes on without this notebook"
_PROGRAM = "a program has no Python variables"
#: Pairs of flags that make no sense together, and why.
_EXCLUDING = (
    ("--module", "--no-python", "the script is either a module or a program"),
    ("--no-python", "--send", _PROGRAM),
    ("--no-python", "--return", _PROGRAM),
    ("--no-python", "--preload", "a program is started anew on every rank, so nothing imported helps it"),
    ("--cold", "--preload", "--cold starts every rank with nothing imported"),
    ("--detach", "--send", f"{_OUTLIVES}, so let the script load what it needs from a file"),
    ("--detach", "--return", f"{_OUTLIVES}, so let the script save its results to a file"),
    ("--detach", "--keep", f"{_OUTLIVES}, and its workers end with it"),
    ("--detach", "--timeout-s", f"{_OUTLIVES} and waits as long as it takes; %gpu_cancel takes it back"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One launch as it was asked for."""

    #: At most; `least_nnodes` is None for exactly so many.
    nnodes: int = 1
    least_nnodes: int | None = None
    nproc_per_node: int = 1
    max_restarts: int = 0
    tee: str = "0"
    redirects: str = "0"
    #: Local ranks whose output is shown; empty for all.
    shown_ranks: tuple[int, ...] = ()
    log_dir: str | None = None
    module: bool = False
    no_python: bool = False
    #: Models as they were typed.
    demand: Demand = field(default_factory=Demand)
    timeout_s: float | None = None
    #: Names of the notebook's variables that ranks get, and of theirs that come back.
    send: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    #: Modules that are imported, besides torch, before ranks are forked.
    preload: tuple[str, ...] = ()
    #: Nothing is forked.
    cold: bool = False
    #: How long the workers stay afterwards, seconds; None for the settings' own.
    keep_s: int | None = None
    #: It goes on without the notebook.
    detach: bool = False
    dry_run: bool = False
    #: More torchrun flags, as given.
    passed: tuple[str, ...] = ()
    #: Script, module or program; empty for a cell.
    script: str = ""
    arguments: tuple[str, ...] = ()
    help: bool = False

    def shows(self, local_rank: int, stream: str) -> bool:
        """Whether this rank's `stdout` or `stderr` is shown: as torchrun's console would have it."""
        bit = 1 if stream == "stdout" else 2
        if self.shown_ranks and local_rank not in self.shown_ranks:
            return False
        return not _streams(self.redirects, local_rank) & bit or bool(_streams(self.tee, local_rank) & bit)


def parse(line: str, *, cell: bool = False) -> Options:
    """The options in a magic's line. With `cell` there is no script: what follows `--` are the cell's arguments."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{error} in: {line.strip()}") from None
    return parse_words(words, cell=cell)


def parse_words(words: list[str], *, cell: bool = False) -> Options:
    """The options in an argument list; everything from the script on belongs to the script."""
    options, rest = Options(), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, value = _take(rest)
        if name == "help":
            return Options(help=True)
        options = _with(options, name, value)
    explicit = bool(rest) and rest[0] == "--"
    rest = rest[1:] if explicit else rest
    _check_together(options)
    if cell:
        return _cell(options, rest, explicit=explicit)
    if not rest:
        raise UsageError(
            "No script is named: %gpu_launch [options] script.py [arguments], or %%gpu_launch over a cell."
        )
    return replace(options, script=rest[0], arguments=tuple(rest[1:]))


def _check_together(options: Options) -> None:
    """Refuse flags that exclude each other."""
    given = {
        "--module": options.module,
        "--no-python": options.no_python,
        "--send": options.send,
        "--return": options.returns,
        "--preload": options.preload,
        "--cold": options.cold,
        "--keep": options.keep_s is not None,
        "--detach": options.detach,
        "--timeout-s": options.timeout_s is not None,
    }
    for first, second, reason in _EXCLUDING:
        if given[first] and given[second]:
            raise UsageError(f"{first} and {second} exclude each other: {reason}.")


def _cell(options: Options, rest: list[str], *, explicit: bool) -> Options:
    if options.module or options.no_python:
        raise UsageError("In %%gpu_launch the cell is the script: --module and --no-python are for %gpu_launch.")
    if rest and not explicit:
        raise UsageError(f"In %%gpu_launch the cell is the script; its arguments follow '--', such as: -- {rest[0]}")
    return replace(options, arguments=tuple(rest))


def _take(rest: list[str]) -> tuple[str, str]:
    """The next flag's name and value ('' for a switch), removed from `rest`."""
    word = rest.pop(0)
    flag, has_value, value = word.partition("=")
    name = flags.SHORT.get(flag) or (flag[2:].replace("_", "-") if flag.startswith("--") else "")
    if name in flags.REFUSED:
        raise UsageError(f"{flag} is torchrun's, and not for a launch: {flags.REFUSED[name]}. Leave it out.")
    if name not in flags.OURS and name not in flags.PASSED:
        _unknown(flag)
    if name in flags.SWITCHES:
        if has_value:
            raise UsageError(f"{flag} takes no value.")
        return name, ""
    if not has_value:
        if not rest:
            raise UsageError(f"{flag} needs a value.")
        value = rest.pop(0)
    return name, value


def _unknown(flag: str) -> NoReturn:
    known = [f"--{name}" for name in (*flags.OURS, *flags.PASSED)]
    close = difflib.get_close_matches(flag.replace("_", "-"), [*known, *flags.SHORT], n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}?" if close else "%gpu_launch --help lists the flags."
    raise UsageError(f"There is no flag {flag}. {hint} The script's own arguments come after the script.")


def _with(options: Options, name: str, value: str) -> Options:
    """`options` with one flag set."""
    if name in flags.PASSED:
        _check_passed(f"--{name}", value)
        word = f"--{name}" + ("" if name in flags.SWITCHES else f"={value}")
        return replace(options, passed=(*options.passed, word))
    if name in _DEMANDED:
        return replace(options, demand=replace(options.demand, **_demanded(name, value)))
    changes: dict[str, Any] = {name.replace("-", "_"): True} if name in flags.SWITCHES else {}
    return replace(options, **(changes or _READERS[name](f"--{name}", value)))


def _nodes(flag: str, value: str) -> dict[str, Any]:
    """`3`, or `1:3` as torchrun has it."""
    least, is_range, most = value.partition(":")
    if not is_range:
        return {"nnodes": number(flag, value, least=1, most=_MOST_NODES), "least_nnodes": None}
    if not (re.fullmatch(r"[0-9]{1,4}", least) and re.fullmatch(r"[0-9]{1,4}", most)):
        raise UsageError(f"{flag} {value}: a number of nodes, or MIN:MAX such as 1:3, is needed.")
    if not 1 <= int(least) <= int(most) <= _MOST_NODES:
        raise UsageError(f"{flag} {value}: MIN:MAX needs 1 ≤ MIN ≤ MAX ≤ {_MOST_NODES}, such as 1:3.")
    return {"nnodes": int(most), "least_nnodes": int(least)}


def _demanded(name: str, value: str) -> dict[str, Any]:
    """What one flag wants of the GPUs."""
    flag = f"--{name}"
    match name:
        case "model":
            models = tuple(" ".join(part.split()) for part in value.split(","))
            if not all(models):
                raise UsageError(f"{flag} needs a value: one model, or several with a comma between them.")
            if len(models) > _MOST_MODELS:
                raise UsageError(f"{flag}: at most {_MOST_MODELS} models can be named.")
            return {"models": models}
        case "memory":
            return {"least_memory_mib": quantities.parse_memory(flag, value)}
        case "priority":
            return {"priority": number(flag, value, least=-_MOST_PRIORITY, most=_MOST_PRIORITY)}
        case "time-limit":
            return {"time_limit_s": quantities.parse_span(flag, value, least=_LEAST_TIME_S, most=_MOST_TIME_S)}
        case _:
            return {name.replace("-", "_"): True}


def number(flag: str, value: str, *, least: int, most: int) -> int:
    """The whole number in `value`."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise UsageError(f"{flag} {value}: a whole number from {least} to {most} is needed.")
    return int(value)


def _matching(flag: str, value: str, pattern: re.Pattern[str], right: str) -> str:
    if not pattern.fullmatch(value):
        raise UsageError(f"{flag} {value}: {right} is needed.")
    return value


def _names(flag: str, value: str, *, dotted: bool) -> tuple[str, ...]:
    """Python names with commas between them, each once; with `dotted` those of modules in packages too."""
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        parts = name.split(".") if dotted else [name]
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise UsageError(f"{flag} {value}: names such as model,losses are needed, and {name!r} is none.")
        if name.startswith("__"):
            raise UsageError(f"{flag} {value}: {name} is Python's own.")
    return names


def _check_passed(flag: str, value: str) -> None:
    """What torchrun itself would only refuse on the nodes."""
    match flag:
        case "--role":
            _matching(flag, value, _ROLE, "a word such as trainer")
        case "--monitor-interval":
            _matching(flag, value, _SECONDS, "a number of seconds above 0")
        case "--shutdown-timeout":
            number(flag, value, least=0, most=_MOST_KEEP_S)
        case "--numa-binding":
            if value not in _BINDINGS:
                raise UsageError(f"{flag} {value}: one of {', '.join(_BINDINGS)} is needed.")
        case "--signals-to-handle":
            names = [name.strip() for name in value.split(",")]
            # A laptop without these signals cannot tell which there are.
            known = signal.Signals.__members__ if hasattr(signal, "SIGUSR1") else names
            if not all(_SIGNAL.fullmatch(name) and name in known for name in names):
                raise UsageError(f"{flag} {value}: names of signals such as SIGTERM,SIGUSR1 are needed.")


def _timeout(flag: str, value: str) -> dict[str, Any]:
    return {"timeout_s": float(_matching(flag, value, _SECONDS, "a number of seconds above 0"))}


def _shown(flag: str, value: str) -> dict[str, Any]:
    ranks = _matching(flag, value, _RANKS, "local ranks such as 0,2")
    return {"shown_ranks": tuple(int(rank) for rank in ranks.split(","))}


def _redirected(flag: str, value: str) -> dict[str, Any]:
    return {flag[2:]: _matching(flag, value, _STREAMS, "0, 1 (stdout), 2 (stderr), 3 (both) or 0:3,1:1")}


def _log_dir(flag: str, value: str) -> dict[str, Any]:
    if not value.strip():
        raise UsageError(f"{flag} needs a value.")
    return {"log_dir": value}


_DEMANDED = frozenset({"model", "memory", "same-model", "exclusive", "scavenge", "priority", "time-limit"})
#: What each flag with a value sets, by its name.
_READERS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "nnodes": _nodes,
    "nproc-per-node": lambda flag, value: {"nproc_per_node": number(flag, value, least=1, most=_MOST_PROCESSES)},
    "max-restarts": lambda flag, value: {"max_restarts": number(flag, value, least=0, most=1000)},
    "timeout-s": _timeout,
    "tee": _redirected,
    "redirects": _redirected,
    "local-ranks-filter": _shown,
    "log-dir": _log_dir,
    "send": lambda flag, value: {"send": _names(flag, value, dotted=False)},
    "return": lambda flag, value: {"returns": _names(flag, value, dotted=False)},
    "preload": lambda flag, value: {"preload": _names(flag, value, dotted=True)},
    "keep": lambda flag, value: {"keep_s": quantities.parse_span(flag, value, least=0, most=_MOST_KEEP_S)},
}


def _streams(text: str, local_rank: int) -> int:
    """The bits torchrun's stream notation gives a local rank: `3`, or `0:3,1:1` (0 for ranks not named)."""
    if ":" not in text:
        return int(text)
    pairs = (part.split(":") for part in text.split(","))
    return next((int(bits) for rank, bits in pairs if int(rank) == local_rank), 0)
