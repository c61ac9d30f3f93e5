"""What the options of a launch take: each type reads a typed text, checks it, and writes the value as text again.

A value that is wrong raises UsageError, which names the flag, the value and what is right.
"""

from __future__ import annotations

import keyword
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from gpu_launch import units
from gpu_launch.broker.gpu_request import Amount
from gpu_launch.errors import UsageError
from gpu_launch.training.comm_modes import AUTO, CommMode

MAX_NODES, MAX_PROCESSES, MAX_MODELS, MAX_PRIORITY, MAX_DATASETS = 1024, 64, 16, 100, 16
MIN_TIME_LIMIT_S, MAX_TIME_LIMIT_S = 60, 366 * 86400
MAX_KEEP_S = 86400
#: Minimum number of cores of a container.
MIN_CPUS = 0.1
#: Maximum number of cores of a container.
MAX_CPUS = 4096
#: Minimum memory of a container.
MIN_RAM_MIB = 64
MAX_RANK = MAX_NODES * MAX_PROCESSES - 1
#: Maximum number of tasks in one request to the broker.
MAX_TASKS = 1000
#: Maximum number of times that the broker tries a failed job again.
MAX_RETRIES = 100
#: As in torch.numa.binding.
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
COMM_MODES = (AUTO, *(str(mode) for mode in CommMode))
_COUNTED_BY_TORCHRUN = frozenset({"auto", "gpu", "cpu", "xpu"})
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_SECONDS = re.compile(r"(?=.*[1-9])\d{1,7}(\.\d{1,3})?")
_RANKS = re.compile(r"\d{1,6}(,\d{1,6})*")
_SIGNAL = re.compile(r"SIG[A-Z0-9]{2,12}")
_INDEXES = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?")
_ROLE = re.compile(r"[\w.-]{1,64}")
#: As in the broker's API.
_DATASET = re.compile(r"datasets(/[A-Za-z0-9_][A-Za-z0-9._-]{0,62}){1,4}")


@dataclass(frozen=True, kw_only=True)
class ArrayTasks:
    """The tasks of an array: the index of each, and how many may run at the same time."""

    indexes: tuple[int, ...]
    #: None for all.
    limit: int | None = None


class OptionType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """The type of an option, from a function that reads a text and one that writes a value."""

    def __init__(
        self, name: str, read: Callable[[str, str], Any], write: Callable[[Any], str] = str, *, lists: bool = False
    ) -> None:
        self.name = name
        self._read, self._write = read, write
        #: Several values, with commas between them, may also be given as a list.
        self.lists = lists

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        del ctx
        flag = param.opts[-1] if param is not None else self.name
        # `-t=3` comes as `=3`.
        text = value.removeprefix("=") if param is not None and len(param.opts) > 1 else value
        return self._read(flag, text)

    def write(self, value: Any) -> str:
        """Return the text that reads as this value."""
        return self._write(value)


def parse_number(flag: str, value: str, *, least: int, most: int) -> int:
    """Return the whole number in `value`."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise UsageError(f"{flag} {value}: a whole number from {least} to {most} is needed.")
    return int(value)


def number(least: int, most: int) -> OptionType:
    """Return the type of whole numbers between two limits."""
    return OptionType("number", lambda flag, value: parse_number(flag, value, least=least, most=most))


def _read_processes(flag: str, value: str) -> int:
    if value in _COUNTED_BY_TORCHRUN:
        raise UsageError(
            f"{flag} {value}: torchrun counts what a machine has, but here this is the number of GPUs to request on "
            f"each node, so that it must be known before. Give a whole number from 1 to {MAX_PROCESSES}."
        )
    return parse_number(flag, value, least=1, most=MAX_PROCESSES)


def span(least_s: int, most_s: int) -> OptionType:
    """Return the type of spans of time such as `30m`, in seconds."""
    return OptionType(
        "span", lambda flag, value: units.parse_span(flag, value, least=least_s, most=most_s), units.write_span
    )


def pattern(expression: re.Pattern[str], right: str) -> OptionType:
    """Return the type of texts that match; `right` names the correct form."""
    return OptionType("text", lambda flag, value: _match(flag, value, expression, right))


def names(*, dotted: bool) -> OptionType:
    """Return the type of Python names with commas between them; with `dotted` those of modules in packages too."""
    return OptionType("names", lambda flag, value: _read_names(flag, value, dotted=dotted), ",".join, lists=True)


def _match(flag: str, value: str, expression: re.Pattern[str], right: str) -> str:
    if not expression.fullmatch(value):
        raise UsageError(f"{flag} {value}: use {right}.")
    return value


def _read_nodes(flag: str, value: str) -> tuple[int | None, int]:
    """Return the least and the greatest number of nodes in `1:3`; no least number for `3`."""
    least, is_range, most = value.partition(":")
    if not is_range:
        return None, parse_number(flag, value, least=1, most=MAX_NODES)
    if not (re.fullmatch(r"[0-9]{1,4}", least) and re.fullmatch(r"[0-9]{1,4}", most)):
        raise UsageError(f"{flag} {value}: a number of nodes, or MIN:MAX such as 1:3, is needed.")
    if not 1 <= int(least) <= int(most) <= MAX_NODES:
        raise UsageError(f"{flag} {value}: MIN:MAX needs 1 ≤ MIN ≤ MAX ≤ {MAX_NODES}, such as 1:3.")
    return int(least), int(most)


def _write_nodes(value: tuple[int | None, int]) -> str:
    least, most = value
    return str(most) if least is None else f"{least}:{most}"


def parse_cpus(flag: str, value: str) -> Amount:
    """Return the cores in `8`, `0.5` or `8+`.

    Raises:
        UsageError: for anything else.
    """
    match = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)(\+?)", value)
    cores = float(match[1]) if match else 0.0
    if match is None or not MIN_CPUS <= cores <= MAX_CPUS:
        raise UsageError(
            f"{flag} {value}: a number of CPU cores from {MIN_CPUS} to {MAX_CPUS} is needed, such as 8, or 8+ for at "
            "least 8."
        )
    return Amount(cores, or_more=bool(match[2]))


def _write_cpus(value: Amount) -> str:
    return f"{value.value:g}{'+' if value.or_more else ''}"


def parse_ram(flag: str, value: str) -> Amount:
    """Return the MiB in `64G`, or `64G+`.

    Raises:
        UsageError: for anything else.
    """
    mib = units.parse_memory(flag, value.removesuffix("+"))
    if mib < MIN_RAM_MIB:
        raise UsageError(f"{flag} {value}: a container needs {MIN_RAM_MIB}M at least.")
    return Amount(mib, or_more=value.endswith("+"))


def _write_ram(value: Amount) -> str:
    return f"{units.write_memory(round(value.value))}{'+' if value.or_more else ''}"


def _read_models(flag: str, value: str) -> tuple[str, ...]:
    models = tuple(" ".join(part.split()) for part in value.split(","))
    if not all(models):
        raise UsageError(f"{flag} needs a value: one model, or several with a comma between them.")
    if len(models) > MAX_MODELS:
        raise UsageError(f"{flag}: at most {MAX_MODELS} models can be named.")
    return models


def _read_datasets(flag: str, value: str) -> tuple[str, ...]:
    datasets = tuple(dict.fromkeys(part.strip().strip("/") for part in value.split(",")))
    for dataset in datasets:
        if not _DATASET.fullmatch(dataset):
            raise UsageError(f"{flag} {value}: a folder below /datasets is needed, such as datasets/imagenet.")
    if len(datasets) > MAX_DATASETS:
        raise UsageError(f"{flag}: at most {MAX_DATASETS} datasets can be named.")
    return datasets


def _read_names(flag: str, value: str, *, dotted: bool) -> tuple[str, ...]:
    values = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in values:
        parts = name.split(".") if dotted else [name]
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise UsageError(
                f"{flag} {value}: names such as model,losses are needed, and {name!r} is not a Python name."
            )
        if name.startswith("__"):
            raise UsageError(f"{flag} {value}: {name} is Python's own.")
    return values


def _read_ranks(flag: str, value: str, *, right: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in _match(flag, value, _RANKS, right).split(","))


def _write_ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))


def _read_folder(flag: str, value: str) -> str:
    if not value.strip():
        raise UsageError(f"{flag} needs a value.")
    return value


def _one_of(words: Sequence[str]) -> Callable[[str, str], str]:
    def read(flag: str, value: str) -> str:
        if value not in words:
            raise UsageError(f"{flag} {value}: one of {', '.join(words)} is needed.")
        return value

    return read


def _read_signals(flag: str, value: str) -> str:
    values = [name.strip() for name in value.split(",")]
    # Windows lacks these signals: there only the spelling can be checked.
    valid = signal.Signals.__members__ if hasattr(signal, "SIGUSR1") else values
    if not all(_SIGNAL.fullmatch(name) and name in valid for name in values):
        raise UsageError(f"{flag} {value}: names of signals such as SIGTERM,SIGUSR1 are needed.")
    return value


def _read_array(flag: str, value: str) -> ArrayTasks:
    """Return the indexes in `0-9`, `0-100:10`, `1,3,5` or a mixture, each once, and the limit in `0-9%4`."""
    ranges, has_limit, limit = value.partition("%")
    if has_limit and (not re.fullmatch(r"\d{1,4}", limit) or not 1 <= int(limit) <= MAX_TASKS):
        raise UsageError(f"{flag} {value}: after %, the number of tasks that may run at once is needed, such as 0-9%4.")
    indexes: dict[int, None] = {}
    for part in ranges.split(","):
        match = _INDEXES.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        step = int(match[3] or 1) if match else 1
        if match is None or last < first or step < 1:
            raise UsageError(f"{flag} {value}: indexes such as 0-9, 0-100:10 or 1,3,5 are needed.")
        indexes |= dict.fromkeys(range(first, last + 1, step))
    if len(indexes) > MAX_TASKS:
        raise UsageError(f"{flag} {value}: {len(indexes)} tasks are more than one array may have, {MAX_TASKS}.")
    return ArrayTasks(indexes=tuple(indexes), limit=int(limit) if has_limit else None)


def _write_array(value: ArrayTasks) -> str:
    return ",".join(map(str, value.indexes)) + ("" if value.limit is None else f"%{value.limit}")


_STREAMS_RIGHT = "0, 1 (stdout), 2 (stderr), 3 (both) or 0:3,1:1"
PROCESSES = OptionType("number", _read_processes)
NODES = OptionType("nodes", _read_nodes, _write_nodes)
MODELS = OptionType("models", _read_models, ",".join, lists=True)
DATASETS = OptionType("datasets", _read_datasets, ",".join, lists=True)
MEMORY = OptionType("memory", units.parse_memory, units.write_memory)
CPUS = OptionType("cores", parse_cpus, _write_cpus)
RAM = OptionType("size", parse_ram, _write_ram)
ARRAY = OptionType("array", _read_array, _write_array)
RUN = pattern(re.compile(r"\S{1,64}"), "a run's id, or a job's name")
SECONDS = OptionType(
    "seconds", lambda flag, value: float(_match(flag, value, _SECONDS, "a number of seconds above 0")), "{:g}".format
)
#: As SECONDS, for a flag that torchrun reads itself.
SECONDS_TEXT = pattern(_SECONDS, "a number of seconds above 0")
STREAMS = pattern(_STREAMS, _STREAMS_RIGHT)
LOCAL_RANKS = OptionType(
    "ranks", lambda flag, value: _read_ranks(flag, value, right="local ranks such as 0,2"), _write_ranks
)
RANKS = OptionType("ranks", lambda flag, value: tuple(sorted(set(_read_ranks(flag, value, right="ranks such as 0,2")))))
FOLDER = OptionType("folder", _read_folder)
ROLE = pattern(_ROLE, "a word such as trainer")
NUMA_BINDING = OptionType("binding", _one_of(NUMA_BINDINGS))
COMM = OptionType("mode", _one_of(COMM_MODES))
SIGNALS = OptionType("signals", _read_signals)
