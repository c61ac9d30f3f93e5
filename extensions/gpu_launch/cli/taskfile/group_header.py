"""The first document of a file with several tasks: whether they run side by side, and at whose end the others end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_launch.cli.taskfile.document import YamlItem
from gpu_launch.errors import UsageError
from gpu_launch.units import parse_span

#: Keys of a document that is no task, but is about all others.
HEADER_KEYS = frozenset({"name", "execution", "primary_tasks", "termination_delay"})
_LONGEST_DELAY_S = 24 * 3600
#: The entry of `termination_delay` that is for all other tasks.
_DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class GroupHeader:
    """What the first document says of all tasks."""

    name: str = ""
    is_parallel: bool = False
    #: The tasks at whose end the others end; empty where each ends by itself.
    primary: tuple[str, ...] = ()
    #: Task → seconds that it runs on at that end; tasks without an entry end at once.
    delays: Mapping[str, int] = field(default_factory=dict)

    def find_delays(self, tasks: Sequence[str]) -> dict[str, int]:
        """Return the seconds that each task which is not primary runs on when all primary ones have ended.

        Raises:
            UsageError: A task that is named does not exist.
        """
        named = {"primary_tasks": set(self.primary), "termination_delay": self.delays.keys() - {_DEFAULT}}
        for key, names in named.items():
            if unknown := sorted(names - set(tasks)):
                raise UsageError(f"{key}: there is no task {unknown[0]!r}; the tasks are {', '.join(tasks)}.")
        if not self.primary:
            return {}
        usual = self.delays.get(_DEFAULT, 0)
        return {name: self.delays.get(name, usual) for name in tasks if name not in self.primary}


def parse_header(items: tuple[YamlItem, ...]) -> GroupHeader:
    """Return name, execution, primary tasks and delays.

    Raises:
        UsageError: A value is not understood, or primary tasks are named where tasks run one after another.
    """
    values = {item.key: item for item in items if item.value is not None}
    is_parallel = False
    if "execution" in values:
        execution = values["execution"]
        if execution.value not in {"serial", "parallel"}:
            raise execution.build_error(f"is {execution.value!r}: parallel or serial is needed.")
        is_parallel = execution.value == "parallel"
    for key in ("primary_tasks", "termination_delay"):
        if key in values and not is_parallel:
            raise values[key].build_error("is for tasks that run side by side: add `execution: parallel`.")
    if "termination_delay" in values and "primary_tasks" not in values:
        raise values["termination_delay"].build_error("goes with primary_tasks, at whose end the others end.")
    return GroupHeader(
        name=str(values["name"].value) if "name" in values else "",
        is_parallel=is_parallel,
        primary=_parse_primary(values["primary_tasks"]) if "primary_tasks" in values else (),
        delays=_parse_delays(values["termination_delay"]) if "termination_delay" in values else {},
    )


def _parse_primary(item: YamlItem) -> tuple[str, ...]:
    names = item.value if isinstance(item.value, list) else [item.value]
    if not names or not all(isinstance(name, str) for name in names):
        raise item.build_error("is a list of tasks, such as [trainer].")
    return tuple(names)


def _parse_delays(item: YamlItem) -> dict[str, int]:
    values = item.value if isinstance(item.value, dict) else {_DEFAULT: item.value}
    return {str(name): _parse_delay(item, value) for name, value in values.items()}


def _parse_delay(item: YamlItem, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise item.build_error("is a time, such as 30s or 5m, or one for each task.")
    text = f"{value}s" if isinstance(value, int) else value
    try:
        return parse_span("", text, least=0, most=_LONGEST_DELAY_S)
    except UsageError as error:
        raise item.build_error(f"cannot be read: {str(error).strip()}") from None
