"""Tasks of a file: each key is used, passed over with a note, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gpu_launch.broker.gpu_request import Amount
from gpu_launch.cli.taskfile.accelerators import Accelerators
from gpu_launch.cli.taskfile.document import YamlItem, parse_documents
from gpu_launch.cli.taskfile.file_mounts import FileMount, parse_file_mounts
from gpu_launch.cli.taskfile.group_header import HEADER_KEYS, parse_header
from gpu_launch.cli.taskfile.keys import note_unused
from gpu_launch.cli.taskfile.resources import parse_resources
from gpu_launch.errors import UsageError
from gpu_launch.options.value_types import DATASETS

_MAX_NODES = 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """The content of a task file."""

    name: str = ""
    #: As written; None if no files are uploaded.
    workdir: str | None = None
    nnodes: int = 1
    #: None if the file names no GPUs.
    accelerators: Accelerators | None = None
    #: Set instead where the cluster decides, in this order; None is one GPU of any model.
    alternatives: tuple[Accelerators | None, ...] = ()
    #: The container image that the commands expect, as written; empty for any.
    image: str = ""
    #: CPU cores and memory of each node's container; None for the GPUs' share of the node.
    cpus: Amount | None = None
    ram: Amount | None = None
    #: Number of times that the job runs again after a failure.
    retries: int = 0
    #: Port of the server that the commands run; None for none.
    port: int | None = None
    #: None for a value that the command line must give.
    envs: dict[str, str | None] = field(default_factory=dict)
    secrets: dict[str, str | None] = field(default_factory=dict)
    setup: str = ""
    run: str = ""
    file_mounts: tuple[FileMount, ...] = ()
    #: Datasets of which each node gets a copy on its own disk first.
    stage: tuple[str, ...] = ()
    #: The job runs on guests.
    guests: bool = False
    #: It runs next to the other tasks of its file, instead of after the one before.
    is_parallel: bool = False
    #: In a job group with primary tasks: seconds that this task runs on when these have ended; None for a primary task.
    auxiliary_s: int | None = None
    #: Keys without effect with the reason, for a person.
    notes: tuple[str, ...] = ()


def parse_task_files(text: str) -> tuple[TaskFile, ...]:
    """Parse the tasks of a file: one, or those of a pipeline or job group in their order.

    Raises:
        UsageError: A key is not supported; the text names it and its line.
    """
    documents = parse_documents(text)
    if not documents:
        raise UsageError("it is empty.")
    first = {item.key for item in documents[0]}
    if len(documents) == 1 or not first <= HEADER_KEYS:
        return tuple(parse_task(document) for document in documents)
    header = parse_header(documents[0])
    tasks = [replace(parse_task(document), is_parallel=header.is_parallel) for document in documents[1:]]
    if len(tasks) == 1:
        return (replace(tasks[0], name=tasks[0].name or header.name),)
    named = [
        task if task.name or not header.name else replace(task, name=f"{header.name}-{number}")
        for number, task in enumerate(tasks, start=1)
    ]
    delays = header.find_delays([task.name for task in named])
    return tuple(replace(task, auxiliary_s=delays.get(task.name)) for task in named)


def parse_task(items: tuple[YamlItem, ...], *, needs_commands: bool = True) -> TaskFile:
    """Return the task of a document.

    Raises:
        UsageError: A key is not supported, or `run` is missing where it is needed.
    """
    task = TaskFile()
    for item in items:
        setter = _SETTERS.get(item.key)
        task = setter(task, item) if setter is not None else replace(task, notes=task.notes + note_unused(item))
    if needs_commands and not task.run.strip():
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


def _parse_secrets(item: YamlItem) -> dict[str, str | None]:
    """Parse a mapping, or a list of names whose values the command line must give."""
    if isinstance(item.value, list) and all(isinstance(name, str) and _VARIABLE.fullmatch(name) for name in item.value):
        return dict.fromkeys(item.value)
    return _parse_variables(item)


def _set_resources(task: TaskFile, item: YamlItem) -> TaskFile:
    resources = parse_resources(item)
    return replace(
        task,
        accelerators=resources.accelerators,
        alternatives=resources.alternatives,
        image=resources.image,
        cpus=resources.cpus,
        ram=resources.ram,
        retries=resources.retries,
        port=resources.port,
        notes=task.notes + resources.notes,
    )


def _set_stage(task: TaskFile, item: YamlItem) -> TaskFile:
    if item.value is None:
        return task
    if not isinstance(item.value, list) or not all(isinstance(name, str) for name in item.value):
        raise item.build_error("is a list of folders below /datasets, such as [datasets/imagenet].")
    try:
        return replace(task, stage=DATASETS.convert(",".join(item.value), None, None))
    except UsageError as error:
        raise item.build_error(f"cannot be read: {error}") from None


def _set_guests(task: TaskFile, item: YamlItem) -> TaskFile:
    if not isinstance(item.value, bool | None):
        raise item.build_error("is true or false.")
    return replace(task, guests=bool(item.value))


_SETTERS: dict[str, Callable[[TaskFile, YamlItem], TaskFile]] = {
    "name": _set_name,
    "workdir": _set_workdir,
    "num_nodes": _set_num_nodes,
    "resources": _set_resources,
    "file_mounts": lambda task, item: replace(task, file_mounts=parse_file_mounts(item)),
    "stage": _set_stage,
    "guests": _set_guests,
    "envs": lambda task, item: replace(task, envs=_parse_variables(item)),
    "secrets": lambda task, item: replace(task, secrets=_parse_secrets(item)),
    "setup": lambda task, item: replace(task, setup=_parse_commands(item)),
    "run": lambda task, item: replace(task, run=_parse_commands(item)),
}
