"""A detached job's order, and where it is: two files in its folder, the same whoever wrote it. Pure.

`job.json` is written by a notebook or a laptop before the job is asked for; `state.json` by the job itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gpu_launch.errors import UsageError

VERSION = 1
#: Nothing more comes after these. A job that was told to end may have been preempted, and begins again then.
FINAL = frozenset({"done", "failed"})


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task file's commands, each run by bash on every node: `setup` first, once a container."""

    setup: str = ""
    run: str = ""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a detached job runs."""

    #: For people: the script's or the task's name.
    name: str
    #: `%gpu_launch`'s words, flags and script, as `options.parse_words` takes them; empty for a task.
    words: tuple[str, ...] = ()
    task: Task | None = None
    #: Where it runs, below the home: `gpu-launch/train-3f2a`, or empty for the home itself.
    folder: str = ""
    #: Set for the ranks.
    environ: dict[str, str] = field(default_factory=dict)
    #: A cell's body; None for a script.
    cell: str | None = None
    version: int = VERSION


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a detached job is; replaced as a whole."""

    #: `starting`, `running`, `done`, `failed` or `cancelled`.
    state: str
    #: Counts starts of the ranks from 0.
    attempt: int = 0
    #: Seconds since 1970; None for not yet.
    started_at: float | None = None
    ended_at: float | None = None
    #: The exit status of the job: the first failing rank's own, 128 + N for a signal.
    exit_code: int | None = None
    #: What went wrong, the first failing rank's traceback first.
    error: str = ""
    #: What it does at present, one line for a person.
    text: str = ""


def dump(value: Order | State) -> str:
    """As JSON."""
    return json.dumps(asdict(value), indent=1)


def parse_order(text: str) -> Order:
    """Raises UsageError for anything but an order that this version understands."""
    data = _object(text, "order")
    if data.get("version") != VERSION:
        raise UsageError(
            f"The order is of version {data.get('version')!r}, and the cluster understands {VERSION}: "
            "install the gpu-launch that the cluster has."
        )
    task = data.pop("task", None)
    known = _known(Order, data)
    known["words"] = tuple(known.get("words") or ())
    try:
        return Order(**known, task=None if task is None else Task(**task))
    except TypeError as error:
        raise UsageError(f"The order is not complete: {error}.") from None


def parse_state(text: str) -> State:
    """Raises UsageError for anything but a state."""
    try:
        return State(**_known(State, _object(text, "state")))
    except TypeError as error:
        raise UsageError(f"The state is not complete: {error}.") from None


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"The {what} is no JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UsageError(f"The {what} is a {type(data).__name__}, not an object.")
    return data


def _known(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Without what a later version may add."""
    return {item.name: data[item.name] for item in fields(kind) if item.name in data}
