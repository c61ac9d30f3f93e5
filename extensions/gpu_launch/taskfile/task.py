"""A task file's request: each key of its YAML is used, ignored with a note, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpu_launch.errors import UsageError
from gpu_launch.taskfile import accelerators
from gpu_launch.taskfile.accelerators import Accelerators

_MAX_NODES = 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MINIMUM = re.compile(r"\d+(\.\d+)?([kmgtp]b?)?\+", re.IGNORECASE)
#: Reasons for refused keys, with the alternative.
_REFUSED = {
    "file_mounts": "is not supported: copy files once with `gpu-launch cp`, and name them below your home",
    "storage_mounts": "is not supported: copy data once with `gpu-launch cp`, and name it below your home",
    "volumes": "is not supported: your home is on every node, and so is /datasets",
    "service": "is not supported: jobs here end, and nothing outside reaches them",
    "pool": "is not supported: the broker chooses the nodes itself",
    "config": "is not supported: the cluster's settings are its administrator's",
    "resources.infra": "is not supported: there is this cluster alone; leave it out",
    "resources.cloud": "is not supported: there is this cluster alone; leave it out",
    "resources.region": "is not supported: there is this cluster alone; leave it out",
    "resources.zone": "is not supported: there is this cluster alone; leave it out",
    "resources.instance_type": "is not supported: name GPUs with resources.accelerators",
    "resources.use_spot": "is not supported: use --scavenge for GPUs that others may take when they need them",
    "resources.image_id": "is not supported: --profile NAME chooses one of the cluster's images",
    "resources.ports": "is not supported: nothing outside reaches a job",
    "resources.autostop": "is not supported: a job's GPUs are free when it ends; --time-limit ends it sooner",
    "resources.any_of": "is not supported: list the GPU models in resources.accelerators",
    "resources.ordered": "is not supported: list the GPU models in resources.accelerators in order of preference",
    "resources.accelerator_args": "is not supported: it is for TPUs",
    "resources.job_recovery": "is not supported: --max-restarts and --scavenge restart jobs",
    "resources.max_hourly_cost": "is not supported: nothing is paid by the hour here",
}
#: Values that only state the default.
_DEFAULT_VALUES: dict[str, tuple[Any, ...]] = {
    "resources.use_spot": (False,),
    "resources.autostop": (False,),
    "resources.job_recovery": ("none",),
    "resources.disk_tier": ("best",),
    "resources.network_tier": ("standard", "best"),
}
#: Keys without an effect on the commands; a note lists them.
_IGNORED = {
    "resources.disk_size": "what jobs write is in your home",
    "resources.disk_tier": "what jobs write is in your home",
    "resources.network_tier": "the network between the nodes cannot be chosen",
    "resources.labels": "jobs have no labels, only a name",
}


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """The content of a task file."""

    name: str = ""
    #: As written; None if no files are uploaded.
    workdir: str | None = None
    nnodes: int = 1
    #: None if the file names no GPUs.
    accelerators: Accelerators | None = None
    #: None for a value that the command line must give.
    envs: dict[str, str | None] = field(default_factory=dict)
    secrets: dict[str, str | None] = field(default_factory=dict)
    setup: str = ""
    run: str = ""
    #: Ignored keys with the reason, for a person.
    notes: tuple[str, ...] = ()


def parse_task_file(text: str) -> TaskFile:
    """Parse a task from its YAML.

    Raises:
        UsageError: A key is not supported; the text names it and its line.
    """
    task = TaskFile()
    for item in parse_yaml(text):
        setter = _SETTERS.get(item.key)
        if setter is not None:
            task = setter(task, item)
        elif item.value is not None:
            raise _build_refusal(item)
    if not task.run.strip():
        raise UsageError("it has no `run` commands.")
    return task


def build_environ(task: TaskFile, *, envs: dict[str, str], secrets: dict[str, str]) -> dict[str, str]:
    """Return the variables of the task's commands, with those of the command line.

    Raises:
        UsageError: A variable has no value.
    """
    values: dict[str, str | None] = {**task.envs, **task.secrets, **envs, **secrets}
    for kind, flag, names in (("envs", "--env", task.envs), ("secrets", "--secret", task.secrets)):
        missing = [name for name in names if values[name] is None]
        if missing:
            raise UsageError(f"{kind}.{missing[0]} has no value in the file: give it with {flag} {missing[0]}=VALUE.")
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class YamlItem:
    """A key of a mapping, with its parsed value and its line from 1."""

    #: Includes the keys of the mappings around it: `resources.cpus`.
    key: str
    value: Any
    line: int
    #: The items below, if the value is a mapping.
    items: tuple[YamlItem, ...] = ()

    def build_error(self, text: str) -> UsageError:
        """Return an error about this key."""
        return UsageError(f"line {self.line}: {self.key} {text}")


def parse_yaml(text: str) -> tuple[YamlItem, ...]:
    """Return the keys of the file's one mapping.

    Raises:
        UsageError: The file has another format; the text names the line.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise UsageError("it is empty.")
        if not isinstance(node, yaml.MappingNode):
            raise UsageError("it is not a task: a mapping such as `run: python train.py` is needed.")
        return tuple(_iter_items(loader, node, ""))
    except yaml.composer.ComposerError as error:
        if "single document" in str(error):
            raise UsageError("it contains several tasks; use one file for each.") from None
        raise UsageError(_format_yaml_error(error)) from None
    except yaml.YAMLError as error:
        raise UsageError(_format_yaml_error(error)) from None
    except RecursionError:
        raise UsageError("it is nested too deeply.") from None
    finally:
        loader.dispose()


def _iter_items(loader: yaml.SafeLoader, node: yaml.MappingNode, above: str) -> Iterator[YamlItem]:
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        name = f"{above}{key}"
        sub_items = (
            tuple(_iter_items(loader, value_node, f"{name}.")) if isinstance(value_node, yaml.MappingNode) else ()
        )
        value = loader.construct_object(value_node, deep=True)
        yield YamlItem(key=name, value=value, line=key_node.start_mark.line + 1, items=sub_items)


def _format_yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: it is not YAML: {problem}." if mark is not None else f"it is not YAML: {problem}."


def _build_refusal(item: YamlItem) -> UsageError:
    return item.build_error(_REFUSED.get(item.key, "is not known, or not supported here") + ".")


def _set_name(task: TaskFile, item: YamlItem) -> TaskFile:
    return replace(task, name="" if item.value is None else str(item.value))


def _set_workdir(task: TaskFile, item: YamlItem) -> TaskFile:
    if isinstance(item.value, dict):
        raise item.build_error("names a Git repository, which is not supported: clone it in `setup`.")
    if item.value is not None and not isinstance(item.value, str):
        raise item.build_error("is a folder's path.")
    return replace(task, workdir=item.value or None)


def _set_num_nodes(task: TaskFile, item: YamlItem) -> TaskFile:
    if item.value is None:
        return task
    if isinstance(item.value, bool) or not isinstance(item.value, int) or not 1 <= item.value <= _MAX_NODES:
        raise item.build_error(f"is {item.value!r}: a number from 1 to {_MAX_NODES} is needed.")
    return replace(task, nnodes=item.value)


def _parse_commands(item: YamlItem) -> str:
    if item.value is not None and not isinstance(item.value, str):
        raise item.build_error("is a text of commands, such as: python train.py")
    return item.value or ""


def _parse_variables(item: YamlItem) -> dict[str, str | None]:
    if item.value is None:
        return {}
    if not isinstance(item.value, dict):
        raise item.build_error("is a mapping of names to values.")
    variables: dict[str, str | None] = {}
    for sub_item in item.items:
        name = sub_item.key.partition(".")[2]
        if not _VARIABLE.fullmatch(name):
            raise sub_item.build_error("is not a variable's name.")
        if isinstance(sub_item.value, dict | list):
            raise sub_item.build_error("is a text or a number.")
        variables[name] = None if sub_item.value is None else str(sub_item.value)
    return variables


def _set_resources(task: TaskFile, item: YamlItem) -> TaskFile:
    if item.value is None:
        return task
    if not isinstance(item.value, dict):
        raise item.build_error("is a mapping, such as `accelerators: A100:8`.")
    for sub_item in item.items:
        task = _set_resource(task, sub_item)
    return task


def _set_resource(task: TaskFile, item: YamlItem) -> TaskFile:
    if item.value is None or item.value in _DEFAULT_VALUES.get(item.key, ()):
        return task
    if item.key == "resources.accelerators":
        try:
            return replace(task, accelerators=accelerators.parse_accelerators(item.value))
        except UsageError as error:
            raise item.build_error(str(error)) from None
    if item.key in ("resources.cpus", "resources.memory"):
        if not _MINIMUM.fullmatch(str(item.value)):
            raise item.build_error(
                f"is exactly {item.value}, which no node promises; {item.value}+ asks for a least value."
            )
        return _add_note(task, item, "a job gets the share of its nodes that the cluster gives")
    if item.key in _IGNORED:
        return _add_note(task, item, _IGNORED[item.key])
    raise _build_refusal(item)


def _add_note(task: TaskFile, item: YamlItem, why: str) -> TaskFile:
    return replace(task, notes=(*task.notes, f"line {item.line}: {item.key} is ignored: {why}"))


_SETTERS: dict[str, Callable[[TaskFile, YamlItem], TaskFile]] = {
    "name": _set_name,
    "workdir": _set_workdir,
    "num_nodes": _set_num_nodes,
    "resources": _set_resources,
    "envs": lambda task, item: replace(task, envs=_parse_variables(item)),
    "secrets": lambda task, item: replace(task, secrets=_parse_variables(item)),
    "setup": lambda task, item: replace(task, setup=_parse_commands(item)),
    "run": lambda task, item: replace(task, run=_parse_commands(item)),
}
