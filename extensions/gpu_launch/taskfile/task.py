"""What a task file asks for: its keys, each taken, noted as without meaning here, or refused by name. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_launch.errors import UsageError
from gpu_launch.taskfile import accelerators
from gpu_launch.taskfile.accelerators import Accelerators
from gpu_launch.taskfile.reading import Item, read

_MOST_NODES = 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LEAST = re.compile(r"\d+(\.\d+)?([kmgtp]b?)?\+", re.IGNORECASE)

#: Why a key is refused, and what to do instead.
_REFUSED = {
    "file_mounts": "is not supported: copy files once with `gpu-launch cp`, and name them below your home",
    "storage_mounts": "is not supported: copy data once with `gpu-launch cp`, and name it below your home",
    "volumes": "is not supported: your home is on every node, and so is /datasets",
    "service": "is not supported: jobs here end, and nothing outside reaches them",
    "pool": "is not supported: the broker hands out nodes itself",
    "config": "is not supported: the cluster's settings are its administrator's",
    "resources.infra": "is not supported: there is this cluster alone; leave it out",
    "resources.cloud": "is not supported: there is this cluster alone; leave it out",
    "resources.region": "is not supported: there is this cluster alone; leave it out",
    "resources.zone": "is not supported: there is this cluster alone; leave it out",
    "resources.instance_type": "is not supported: name GPUs with resources.accelerators",
    "resources.use_spot": "is not supported: --scavenge is what gives GPUs back when others need them",
    "resources.image_id": "is not supported: --profile NAME chooses one of the cluster's images",
    "resources.ports": "is not supported: nothing outside reaches a job",
    "resources.autostop": "is not supported: a job's GPUs are free when it ends; --time-limit ends it sooner",
    "resources.any_of": "is not supported: list the GPU models in resources.accelerators",
    "resources.ordered": "is not supported: list the GPU models in resources.accelerators, best liked first",
    "resources.accelerator_args": "is not supported: it is for TPUs",
    "resources.job_recovery": "is not supported: --max-restarts and --scavenge start jobs anew",
    "resources.max_hourly_cost": "is not supported: nothing is paid by the hour here",
}
#: Values by which a key says what holds here anyway.
_MEANS_NOTHING: dict[str, tuple[Any, ...]] = {
    "resources.use_spot": (False,),
    "resources.autostop": (False,),
    "resources.job_recovery": ("none",),
    "resources.disk_tier": ("best",),
    "resources.network_tier": ("standard", "best"),
}
#: Keys that change nothing about what the commands do; they are said to have been passed over.
_NOTED = {
    "resources.disk_size": "what jobs write is in your home",
    "resources.disk_tier": "what jobs write is in your home",
    "resources.network_tier": "the network between the nodes is what it is",
    "resources.labels": "jobs have a name only",
}


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """A task as its file has it."""

    name: str = ""
    #: As written; None where nothing is sent.
    workdir: str | None = None
    nnodes: int = 1
    #: None where the file names no GPUs.
    accelerators: Accelerators | None = None
    #: None for a value that must be given on the command line.
    envs: dict[str, str | None] = field(default_factory=dict)
    secrets: dict[str, str | None] = field(default_factory=dict)
    setup: str = ""
    run: str = ""
    #: What was passed over and why, for a person.
    notes: tuple[str, ...] = ()


def parse(text: str) -> TaskFile:
    """A task from its YAML. Raises UsageError that names the line and the key of what is not supported."""
    task = TaskFile()
    for item in read(text):
        take = _TAKEN.get(item.key)
        if take is not None:
            task = take(task, item)
        elif item.value is not None:
            raise _refusal(item)
    if not task.run.strip():
        raise UsageError("it has no `run`, so that there is nothing to do.")
    return task


def with_values(task: TaskFile, *, envs: dict[str, str], secrets: dict[str, str]) -> dict[str, str]:
    """The variables of the task's commands, with what the command line gives; it may add some. Raises UsageError where
    one is missing.
    """
    found: dict[str, str | None] = {**task.envs, **task.secrets, **envs, **secrets}
    for kind, flag, names in (("envs", "--env", task.envs), ("secrets", "--secret", task.secrets)):
        missing = [name for name in names if found[name] is None]
        if missing:
            raise UsageError(f"{kind}.{missing[0]} has no value in the file: give it with {flag} {missing[0]}=VALUE.")
    return {name: value for name, value in found.items() if value is not None}


def _refusal(item: Item) -> UsageError:
    return item.refuse(_REFUSED.get(item.key, "is not known, or not supported here") + ".")


def _name(task: TaskFile, item: Item) -> TaskFile:
    return replace(task, name="" if item.value is None else str(item.value))


def _workdir(task: TaskFile, item: Item) -> TaskFile:
    if isinstance(item.value, dict):
        raise item.refuse("names a Git repository, which is not supported: clone it in `setup`.")
    if item.value is not None and not isinstance(item.value, str):
        raise item.refuse("is a folder's path.")
    return replace(task, workdir=item.value or None)


def _num_nodes(task: TaskFile, item: Item) -> TaskFile:
    if item.value is None:
        return task
    if isinstance(item.value, bool) or not isinstance(item.value, int) or not 1 <= item.value <= _MOST_NODES:
        raise item.refuse(f"is {item.value!r}: a number from 1 to {_MOST_NODES} is needed.")
    return replace(task, nnodes=item.value)


def _commands(item: Item) -> str:
    if item.value is not None and not isinstance(item.value, str):
        raise item.refuse("is a text of commands, such as: python train.py")
    return item.value or ""


def _variables(item: Item) -> dict[str, str | None]:
    if item.value is None:
        return {}
    if not isinstance(item.value, dict):
        raise item.refuse("is a mapping of names to values.")
    found: dict[str, str | None] = {}
    for below in item.items:
        name = below.key.partition(".")[2]
        if not _VARIABLE.fullmatch(name):
            raise below.refuse("is not a variable's name.")
        if isinstance(below.value, dict | list):
            raise below.refuse("is a text or a number.")
        found[name] = None if below.value is None else str(below.value)
    return found


def _resources(task: TaskFile, item: Item) -> TaskFile:
    if item.value is None:
        return task
    if not isinstance(item.value, dict):
        raise item.refuse("is a mapping, such as `accelerators: A100:8`.")
    for below in item.items:
        task = _resource(task, below)
    return task


def _resource(task: TaskFile, item: Item) -> TaskFile:
    if item.value is None or item.value in _MEANS_NOTHING.get(item.key, ()):
        return task
    if item.key == "resources.accelerators":
        try:
            return replace(task, accelerators=accelerators.parse(item.value))
        except UsageError as error:
            raise item.refuse(str(error)) from None
    if item.key in ("resources.cpus", "resources.memory"):
        if not _LEAST.fullmatch(str(item.value)):
            raise item.refuse(f"is exactly {item.value}, which no node promises; {item.value}+ asks for a least value.")
        return _noted(task, item, "a job gets the share of its nodes that the cluster gives")
    if item.key in _NOTED:
        return _noted(task, item, _NOTED[item.key])
    raise _refusal(item)


def _noted(task: TaskFile, item: Item, why: str) -> TaskFile:
    return replace(task, notes=(*task.notes, f"line {item.line}: {item.key} is passed over: {why}"))


_TAKEN: dict[str, Callable[[TaskFile, Item], TaskFile]] = {
    "name": _name,
    "workdir": _workdir,
    "num_nodes": _num_nodes,
    "resources": _resources,
    "envs": lambda task, item: replace(task, envs=_variables(item)),
    "secrets": lambda task, item: replace(task, secrets=_variables(item)),
    "setup": lambda task, item: replace(task, setup=_commands(item)),
    "run": lambda task, item: replace(task, run=_commands(item)),
}
