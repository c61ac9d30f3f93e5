"""`resources` of a task file: the GPUs, one or several alternatives, and the container image."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpu_launch.broker.gpu_request import Amount
from gpu_launch.cli.taskfile.accelerators import Accelerators, parse_accelerators
from gpu_launch.cli.taskfile.document import YamlItem
from gpu_launch.cli.taskfile.keys import note_ignored, note_unused
from gpu_launch.errors import UsageError
from gpu_launch.options.value_types import MAX_RETRIES, parse_cpus, parse_ram

_ALTERNATIVES = ("resources.any_of", "resources.ordered")
#: `8`, `8+`, `0.5`, and `4x` for a multiple; sizes also have a unit.
_SIZE = re.compile(r"\d+(\.\d+)?([kmgtp]i?b?|x)?\+?", re.IGNORECASE)
#: `8080`, or a range.
_PORTS = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?")
_MAX_PORT = 65535
#: `docker:IMAGE`, or a name that begins with a registry's host, as Kubernetes takes it.
_CONTAINER_IMAGE = re.compile(r"docker:.+|[\w-]+(\.[\w-]+)+(:\d+)?/.+")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a task asks for."""

    #: None if no GPUs are named.
    accelerators: Accelerators | None = None
    #: Set where one request cannot express the choice: the cluster decides, in this order. None is one GPU.
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
    #: Keys without effect, for a person.
    notes: tuple[str, ...] = ()


def parse_resources(item: YamlItem) -> Resources:
    """Parse the resources of a task.

    Raises:
        UsageError: A key is not supported or has a wrong value.
    """
    if item.value is None:
        return Resources()
    if not isinstance(item.value, dict):
        raise item.build_error("is a mapping, such as `accelerators: A100:8`.")
    lists = [sub_item for sub_item in item.items if sub_item.key in _ALTERNATIVES and sub_item.value is not None]
    base = _parse_keys([sub_item for sub_item in item.items if sub_item.key not in _ALTERNATIVES], Resources())
    if len(lists) > 1:
        raise lists[1].build_error(f"and {lists[0].key} exclude each other.")
    return _add_alternatives(base, lists[0]) if lists else base


def _add_alternatives(base: Resources, item: YamlItem) -> Resources:
    """Return the resources with the choice in `any_of` or `ordered`; a key in it overrides the one outside."""
    if not isinstance(item.value, list) or not item.items or not all(isinstance(value, dict) for value in item.value):
        raise item.build_error("is a list of mappings, such as `- accelerators: A100:8`.")
    choices = []
    for element in item.items:
        for sub_item in element.items:
            if sub_item.key in _ALTERNATIVES:
                raise sub_item.build_error(f"cannot be within {item.key}.")
        choices.append(_parse_keys(element.items, replace(base, notes=())))
    parsed = replace(
        base,
        image=next((choice.image for choice in choices if choice.image), base.image),
        cpus=choices[0].cpus,
        ram=choices[0].ram,
        notes=base.notes + tuple(note for choice in choices for note in choice.notes),
    )
    if len({(choice.cpus, choice.ram) for choice in choices}) > 1:
        note = f"line {item.line}: {item.key}: cpus and memory differ, and those of the first alternative count"
        parsed = replace(parsed, notes=(*parsed.notes, note))
    # The order of `any_of` is the file's as well: there are no prices to choose by.
    return _choose(parsed, [gpus for choice in choices for gpus in choice.alternatives or (choice.accelerators,)])


def _choose(resources: Resources, gpus: Iterable[Accelerators | None]) -> Resources:
    """Return the resources with one request for alternatives of the same number, or with all alternatives."""
    different = tuple(dict.fromkeys(gpus))
    named = [accelerators for accelerators in different if accelerators is not None]
    if len(different) == 1:
        return replace(resources, accelerators=different[0], alternatives=())
    if len(named) == len(different) and len({accelerators.count for accelerators in named}) == 1:
        models = tuple(dict.fromkeys(model for accelerators in named for model in accelerators.models))
        one = Accelerators(models=models, count=named[0].count)
        return replace(resources, accelerators=one, alternatives=())
    return replace(resources, accelerators=None, alternatives=different)


def _parse_keys(items: Iterable[YamlItem], resources: Resources) -> Resources:
    for item in items:
        resources = _parse_key(item, resources)
    return resources


def _parse_key(item: YamlItem, resources: Resources) -> Resources:
    if item.key in ("resources.accelerators", "resources.gpus") and item.value is not None:
        try:
            return _choose(resources, parse_accelerators(item.value))
        except UsageError as error:
            raise item.build_error(str(error)) from None
    if item.key in ("resources.cpus", "resources.memory") and item.value is not None:
        if isinstance(item.value, bool) or not _SIZE.fullmatch(str(item.value)):
            raise item.build_error(f"is {item.value!r}: a size such as 8+ is needed.")
        return _parse_size(item, resources)
    if item.key == "resources.job_recovery" and isinstance(item.value, dict):
        return _parse_recovery(item, resources)
    if item.key == "resources.image_id" and (image := _find_container_image(item)):
        return replace(resources, image=image)
    if item.key == "resources.ports" and item.value is not None:
        return _parse_ports(item, resources)
    return replace(resources, notes=resources.notes + note_unused(item))


def _parse_size(item: YamlItem, resources: Resources) -> Resources:
    """Return the resources with `cpus` or `memory`; SkyPilot counts memory in GB where no unit follows."""
    text = str(item.value)
    if text.lower().rstrip("+").endswith("x"):
        note = note_ignored(item, "a multiple of another resource; a job gets its GPUs' share of the node")
        return replace(resources, notes=(*resources.notes, note))
    try:
        if item.key == "resources.cpus":
            return replace(resources, cpus=parse_cpus(item.key, text))
        number, plus = text.rstrip("+"), "+" if text.endswith("+") else ""
        return replace(resources, ram=parse_ram(item.key, f"{number}{'G' if number[-1].isdigit() else ''}{plus}"))
    except UsageError:
        raise item.build_error(f"is {item.value!r}, which no node could have: a size such as 8+ is needed.") from None


def _parse_ports(item: YamlItem, resources: Resources) -> Resources:
    """Return the resources with the one port of a task; of several, none can be told from the others."""
    values = item.value if isinstance(item.value, list) else [item.value]
    for value in values:
        if isinstance(value, bool) or not _PORTS.fullmatch(str(value)):
            raise item.build_error(f"has {value!r}: a port such as 8080 is needed.")
    if len(values) != 1 or not str(values[0]).isdecimal():
        note = note_ignored(item, "a job has one port, which --port names")
        return replace(resources, notes=(*resources.notes, note))
    port = int(values[0])
    if not 1 <= port <= _MAX_PORT:
        raise item.build_error(f"is {port}: a port from 1 to {_MAX_PORT} is needed.")
    return replace(resources, port=port)


def _parse_recovery(item: YamlItem, resources: Resources) -> Resources:
    """Return the resources with the tries of `max_restarts_on_errors`; its other keys are about a cloud's machines."""
    for sub_item in item.items:
        if sub_item.key == "resources.job_recovery.max_restarts_on_errors":
            if isinstance(sub_item.value, bool) or not isinstance(sub_item.value, int):
                raise sub_item.build_error(f"is {sub_item.value!r}: a number from 0 to {MAX_RETRIES} is needed.")
            if not 0 <= sub_item.value <= MAX_RETRIES:
                raise sub_item.build_error(f"is {sub_item.value}: a number from 0 to {MAX_RETRIES} is needed.")
            resources = replace(resources, retries=sub_item.value)
        else:
            note = note_ignored(sub_item, "a preempted job waits again on this cluster, whatever the strategy")
            resources = replace(resources, notes=(*resources.notes, note))
    return resources


def _find_container_image(item: YamlItem) -> str:
    """Return the container image; empty for a cloud's image."""
    images = item.value.values() if isinstance(item.value, dict) else [item.value]
    return next((image for image in images if isinstance(image, str) and _CONTAINER_IMAGE.fullmatch(image)), "")
