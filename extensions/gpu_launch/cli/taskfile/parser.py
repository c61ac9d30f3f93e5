"""Task files in SkyPilot's YAML format: each key is used, ignored with a note, or refused by name.

Written from the format's public description, without code of SkyPilot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpu_launch.broker.models import Cluster, Gpu
from gpu_launch.errors import UsageError

_MAX_NODES, _MAX_GPUS = 1024, 64
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
#: Parts of model names that task files leave out: `H100 80GB HBM3`, `A100-SXM4-80GB`.
_SUFFIX = re.compile(r"\d+gb|sxm\d*|pcie|hbm\d*e?|nvl|vram")
_MEMORY = re.compile(r"(\d+)gb")
#: Part of the named memory that a GPU must report: one sold as 80 GB reports some 2 % less.
_MEMORY_TOLERANCE = 0.95


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
            return replace(task, accelerators=parse_accelerators(item.value))
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


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """Models in order of preference, empty for any, and the number of GPUs on each node."""

    models: tuple[str, ...] = ()
    count: int = 1


def parse_accelerators(value: Any) -> Accelerators:
    """Parse `A100:8`, `{A100: 8}`, or several alternatives as a list or set: `{'A100:8', 'H100:8'}`.

    Raises:
        UsageError: The value requests parts of GPUs, different numbers for different models, or has another format.
    """
    pairs = [_parse_pair(item) for item in _list_items(value)]
    if not pairs:
        raise UsageError("names no GPU; A100:8 would be one.")
    counts = sorted({count for _, count in pairs})
    if len(counts) > 1:
        raise UsageError(
            f"asks for {counts[0]} of one model or {counts[-1]} of another a node; give all of them the same number."
        )
    return Accelerators(models=tuple(dict.fromkeys(name for name, _ in pairs)), count=counts[0])


def _list_items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return names with their numbers as written; None without a number."""
    if isinstance(value, str):
        return [_split_item(value)]
    if isinstance(value, Mapping):
        # YAML reads {A100:1, H100:1} as keys without values.
        return [_split_item(str(key)) if number is None else (str(key), number) for key, number in value.items()]
    if isinstance(value, list | set | tuple) and all(isinstance(item, str) for item in value):
        return [_split_item(item) for item in value]
    raise UsageError("is neither NAME:NUMBER nor a list or mapping of them.")


def _split_item(text: str) -> tuple[str, str | None]:
    name, has_number, number = text.partition(":")
    return name.strip(), number.strip() if has_number else None


def _parse_pair(item: tuple[str, Any]) -> tuple[str, int]:
    name, number = item
    if not name:
        raise UsageError("has a number without a model; A100:8 would be right.")
    if number is None:
        return name, 1
    try:
        count = float(number)
    except (TypeError, ValueError):
        raise UsageError(f"asks for {name}:{number}, and {number} is not a number.") from None
    if count != int(count):
        raise UsageError(f"asks for {name}:{number}: parts of a GPU are for notebooks here; a task gets whole ones.")
    if not 1 <= count <= _MAX_GPUS:
        raise UsageError(f"asks for {name}:{number}; 1 to {_MAX_GPUS} GPUs a node can be asked for.")
    return name, int(count)


def find_models(accelerators: Accelerators, cluster: Cluster) -> tuple[str, ...]:
    """Return the cluster's own names of the models.

    Raises:
        UsageError: The cluster has none of them.
    """
    gpus = [gpu for node in cluster.nodes for gpu in node.gpus]
    models = dict.fromkeys(
        gpu.model for name in accelerators.models for gpu in gpus if _matches_name(gpu, _tokenize(name))
    )
    if accelerators.models and not models:
        raise UsageError(
            f"asks for {' or '.join(accelerators.models)}, and the cluster has "
            f"{', '.join(cluster.list_models()) or 'no GPUs'}. --model takes one of these instead."
        )
    return tuple(models)


def _matches_name(gpu: Gpu, requested: frozenset[str]) -> bool:
    """Return whether a task file's name matches a GPU: H100 matches `H100 80GB HBM3`, not `H100 Ti`."""
    tokens = _tokenize(gpu.model)
    lacking = {token for token in requested - tokens if not _has_memory(gpu, token)}
    return not lacking and all(_SUFFIX.fullmatch(token) for token in tokens - requested)


def _has_memory(gpu: Gpu, token: str) -> bool:
    match = _MEMORY.fullmatch(token)
    return match is not None and gpu.memory_mib >= int(match[1]) * 1024 * _MEMORY_TOLERANCE


def _tokenize(name: str) -> frozenset[str]:
    """Split a name so that `RTX5090`, `RTX-5090` and `RTX 5090` are equal; so are `RTX5070Ti` and `RTX 5070 Ti`."""
    apart = re.sub(r"(?<=\d)(?=(ti|super|ada)\b)|(?<=rtx)(?=\d)|(?<=gtx)(?=\d)", " ", name.lower())
    return frozenset(re.findall(r"[a-z0-9.]+", apart))
