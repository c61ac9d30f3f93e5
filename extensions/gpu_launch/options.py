"""`%gpu_launch`'s command line: torchrun's flag names, checked before anything is asked for. Pure."""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from gpu_launch import quantities
from gpu_launch.demand import Demand
from gpu_launch.errors import UsageError

USAGE = """\
%gpu_launch [options] script.py [script's arguments]
%%gpu_launch [options] [-- arguments]      the cell's body is the script

  --nnodes N             nodes that take part (1); MIN:MAX starts with what is free, and goes on with less when
                         others need GPUs: the ranks get SIGTERM and start again on what is left
  --nproc-per-node N     ranks, and GPUs, a node (1)
  --model NAME[,NAME...] only GPUs of these models, best liked first, such as "RTX 5090,RTX 5070" (any)
  --memory SIZE          only GPUs with at least so much memory, such as 24G (any)
  --same-model           all GPUs of one model (mixed ones are allowed)
  --exclusive            nothing else may run on the nodes; the notebook's own GPU does not take part
  --scavenge             give the GPUs back when others need them: the ranks get SIGTERM and some time for a
                         checkpoint, the launch waits again and runs the same command anew
  --priority N           -100 to 100, higher goes first; above 0 for administrators (0)
  --time-limit SPAN      the longest time with the GPUs, such as 30m, 2h or 1d; a short one starts sooner
                         where it fits in before others (as the administrator set)
  --timeout-s SECONDS    give up when no GPUs were free for this long (wait without limit)
  --max-restarts N       start all ranks again after a failure, up to N times (0)
  -m, --module           the script is a module's name
  --no-python            the script is a program
  -t, --tee STREAMS      redirected streams that are shown as well: 1 stdout, 2 stderr, 3 both, or RANK:STREAMS,...
  -r, --redirects STREAMS  streams that go to the log files only
  --local-ranks-filter RANKS  show only these local ranks, such as 0,2
  --log-dir DIR          where log files go (~/.gpu_launch/jobs/<run>/logs)
"""

#: Given to torchrun as they are.
_PASSED = ("monitor-interval", "role", "numa-binding", "signals-to-handle", "shutdown-timeout", "virtual-local-rank")
_OURS = (
    "nnodes", "nproc-per-node", "max-restarts", "tee", "redirects", "local-ranks-filter", "log-dir", "module",
    "no-python", "model", "memory", "same-model", "exclusive", "scavenge", "priority", "time-limit", "timeout-s",
    "help",
)  # fmt: skip
_SWITCHES = frozenset({"module", "no-python", "virtual-local-rank", "same-model", "exclusive", "scavenge", "help"})
_SHORT = {"-m": "module", "-t": "tee", "-r": "redirects", "-h": "help"}
#: torchrun's flags for what a launch decides itself.
_DECIDED = frozenset(
    {"node-rank", "master-addr", "master-port", "local-addr", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf",
     "standalone", "start-method", "run-path", "logs-specs"}
)  # fmt: skip
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_SECONDS = re.compile(r"(?=.*[1-9])\d{1,7}(\.\d{1,3})?")
_RANKS = re.compile(r"\d+(,\d+)*")
_MOST_NODES, _MOST_PROCESSES, _MOST_MODELS, _MOST_PRIORITY = 1024, 64, 16, 100
_LEAST_TIME_S, _MOST_TIME_S = 60, 366 * 86400


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
    if options.module and options.no_python:
        raise UsageError("--module and --no-python exclude each other.")
    if cell:
        return _cell(options, rest, explicit=explicit)
    if not rest:
        raise UsageError(
            "No script is named: %gpu_launch [options] script.py [arguments], or %%gpu_launch over a cell."
        )
    return replace(options, script=rest[0], arguments=tuple(rest[1:]))


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
    name = _SHORT.get(flag) or (flag[2:].replace("_", "-") if flag.startswith("--") else "")
    if name in _DECIDED:
        raise UsageError(f"{flag} is decided by the launch itself; leave it out.")
    if name not in _OURS and name not in _PASSED:
        _unknown(flag)
    if name in _SWITCHES:
        if has_value:
            raise UsageError(f"{flag} takes no value.")
        return name, ""
    if not has_value:
        if not rest:
            raise UsageError(f"{flag} needs a value.")
        value = rest.pop(0)
    return name, value


def _unknown(flag: str) -> NoReturn:
    known = [f"--{name}" for name in (*_OURS, *_PASSED)]
    close = difflib.get_close_matches(flag.replace("_", "-"), [*known, *_SHORT], n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}?" if close else "%gpu_launch --help lists the flags."
    raise UsageError(f"There is no flag {flag}. {hint} The script's own arguments come after the script.")


def _with(options: Options, name: str, value: str) -> Options:
    """`options` with one flag set."""
    changes: dict[str, Any]
    match name:
        case "nnodes":
            changes = _nodes(value)
        case "nproc-per-node":
            changes = {"nproc_per_node": number(f"--{name}", value, least=1, most=_MOST_PROCESSES)}
        case "max-restarts":
            changes = {"max_restarts": number(f"--{name}", value, least=0, most=1000)}
        case "timeout-s":
            seconds = _matching(f"--{name}", value, _SECONDS, "a number of seconds above 0")
            changes = {"timeout_s": float(seconds)}
        case "tee" | "redirects":
            changes = {name: _matching(f"--{name}", value, _STREAMS, "0, 1 (stdout), 2 (stderr), 3 (both) or 0:3,1:1")}
        case "local-ranks-filter":
            ranks = _matching(f"--{name}", value, _RANKS, "local ranks such as 0,2")
            changes = {"shown_ranks": tuple(int(rank) for rank in ranks.split(","))}
        case "module" | "no-python":
            changes = {name.replace("-", "_"): True}
        case "log-dir":
            if not value.strip():
                raise UsageError(f"--{name} needs a value.")
            changes = {"log_dir": value}
        case "model" | "memory" | "same-model" | "exclusive" | "scavenge" | "priority" | "time-limit":
            changes = {"demand": replace(options.demand, **_demanded(name, value))}
        case _:
            changes = {"passed": (*options.passed, f"--{name}" + (f"={value}" if name not in _SWITCHES else ""))}
    return replace(options, **changes)


def _nodes(value: str) -> dict[str, Any]:
    """`3`, or `1:3` as torchrun has it."""
    least, is_range, most = value.partition(":")
    if not is_range:
        return {"nnodes": number("--nnodes", value, least=1, most=_MOST_NODES), "least_nnodes": None}
    if not (re.fullmatch(r"[0-9]{1,4}", least) and re.fullmatch(r"[0-9]{1,4}", most)):
        raise UsageError(f"--nnodes {value}: a number of nodes, or MIN:MAX such as 1:3, is needed.")
    if not 1 <= int(least) <= int(most) <= _MOST_NODES:
        raise UsageError(f"--nnodes {value}: MIN:MAX needs 1 ≤ MIN ≤ MAX ≤ {_MOST_NODES}, such as 1:3.")
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


def _streams(text: str, local_rank: int) -> int:
    """The bits torchrun's stream notation gives a local rank: `3`, or `0:3,1:1` (0 for ranks not named)."""
    if ":" not in text:
        return int(text)
    pairs = (part.split(":") for part in text.split(","))
    return next((int(bits) for rank, bits in pairs if int(rank) == local_rank), 0)
