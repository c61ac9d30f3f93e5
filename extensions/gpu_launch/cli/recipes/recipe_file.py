"""A recipe's file: a task file whose key `recipe` says what it does and which parameters it has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpu_launch.cli.recipes.parameters import Parameter, ParameterType
from gpu_launch.cli.taskfile import parser
from gpu_launch.cli.taskfile.document import YamlItem, parse_documents
from gpu_launch.errors import UsageError

#: Maximum size of a recipe file, characters.
MAX_SIZE = 65536
#: Maximum number of parameters.
MAX_PARAMETERS = 64
_MAX_TEXT = 1000
_HEAD = "recipe"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_PARAMETER = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: The variables that a job has besides its parameters.
_RESERVED = frozenset({"name", "parameters"})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe."""

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()
    #: Python module that gpu-launch starts on every GPU, with arguments; empty for one with `run` commands.
    module: str = ""
    #: `$RECIPE_NAME` as a whole argument stands for a parameter's value.
    arguments: tuple[str, ...] = ()
    #: It uses one GPU: several work as the tasks of an array.
    single_gpu: bool = False
    task: parser.TaskFile
    #: Where it comes from, for a person: `gpu-launch`, `lab`, or a file.
    origin: str


def check_name(name: str) -> str:
    """Return a recipe's name.

    Raises:
        UsageError: It cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"recipe:{name}: a name of lower-case letters, digits and dashes is needed, or a path ending in .yaml."
        )
    return name


def parse_recipe(text: str, *, name: str, origin: str) -> Recipe:
    """Return the recipe in a file.

    Raises:
        UsageError: The file is not a recipe; the text names the line and what would be right.
    """
    if len(text) > MAX_SIZE:
        raise UsageError(f"it has {len(text)} characters; a recipe has at most {MAX_SIZE}.")
    documents = parse_documents(text)
    if len(documents) != 1:
        raise UsageError(f"it has {len(documents)} documents; a recipe is one task.")
    heads = [item for item in documents[0] if item.key == _HEAD]
    if len(heads) != 1 or not isinstance(heads[0].value, dict):
        raise UsageError(f"it has no head: a mapping `{_HEAD}:` with a description is what makes a task file a recipe.")
    recipe = _parse_head(heads[0], Recipe(name=name, description="", task=parser.TaskFile(), origin=origin))
    others = tuple(item for item in documents[0] if item.key != _HEAD)
    recipe = replace(recipe, task=parser.parse_task(others, needs_commands=not recipe.module))
    _check(recipe, heads[0])
    return recipe


def _parse_head(head: YamlItem, recipe: Recipe) -> Recipe:
    for item in head.items:
        key = item.key.removeprefix(f"{_HEAD}.")
        if key not in _SETTERS:
            raise item.build_error(f"is not known; a recipe's head has {', '.join(_SETTERS)}.")
        recipe = _SETTERS[key](recipe, item)
    if not recipe.description:
        raise head.build_error("needs a `description`.")
    return recipe


def _check(recipe: Recipe, head: YamlItem) -> None:
    """Refuse what no job can have."""
    task = recipe.task
    if recipe.module and (task.run.strip() or task.setup.strip()):
        raise head.build_error("has a `module`, which replaces `run` and `setup`.")
    if recipe.arguments and not recipe.module:
        raise head.build_error("has `arguments` without a `module`: commands in `run` read the variables RECIPE_….")
    if task.workdir or task.file_mounts:
        raise head.build_error(
            "is of a task with `workdir` or `file_mounts`, and a recipe is not sent from one machine: name files in "
            "/datasets, or in the home."
        )
    known = {f"${parameter.variable}" for parameter in recipe.parameters}
    for argument in recipe.arguments:
        if argument.startswith("$") and argument not in known:
            raise head.build_error(f"has the argument {argument}, and its parameters are {', '.join(sorted(known))}.")


def _set_description(recipe: Recipe, item: YamlItem) -> Recipe:
    return replace(recipe, description=_read_text(item))


def _set_module(recipe: Recipe, item: YamlItem) -> Recipe:
    if not isinstance(item.value, str) or not _MODULE.fullmatch(item.value):
        raise item.build_error("is the name of a Python module, such as lab.train.")
    return replace(recipe, module=item.value)


def _set_arguments(recipe: Recipe, item: YamlItem) -> Recipe:
    values = item.value
    if not isinstance(values, list) or any(isinstance(value, dict | list | None) for value in values):
        raise item.build_error("is a list of texts, such as [--model, $RECIPE_MODEL].")
    return replace(recipe, arguments=tuple(str(value) for value in values))


def _set_single_gpu(recipe: Recipe, item: YamlItem) -> Recipe:
    if not isinstance(item.value, bool):
        raise item.build_error("is true or false.")
    return replace(recipe, single_gpu=item.value)


def _set_parameters(recipe: Recipe, item: YamlItem) -> Recipe:
    if not isinstance(item.value, dict):
        raise item.build_error("is a mapping of names to mappings, such as `epochs: {type: integer, default: 1}`.")
    if len(item.items) > MAX_PARAMETERS:
        raise item.build_error(f"has {len(item.items)} entries; {MAX_PARAMETERS} are the most.")
    return replace(recipe, parameters=tuple(_parse_parameter(sub_item) for sub_item in item.items))


def _parse_parameter(item: YamlItem) -> Parameter:
    name = item.key.rpartition(".")[2]
    if not _PARAMETER.fullmatch(name) or name in _RESERVED:
        raise item.build_error(
            "is not a parameter's name: lower-case letters, digits and underscores are needed, and not "
            f"{' or '.join(sorted(_RESERVED))}."
        )
    if not isinstance(item.value, dict):
        raise item.build_error("is a mapping, such as {type: integer, default: 1, help: how often}.")
    parameter, default = Parameter(name=name), None
    for sub_item in item.items:
        key = sub_item.key.rpartition(".")[2]
        if key == "default":
            default = sub_item
        elif key in _PARAMETER_SETTERS:
            parameter = _PARAMETER_SETTERS[key](parameter, sub_item)
        else:
            raise sub_item.build_error(f"is not known; a parameter has {', '.join((*_PARAMETER_SETTERS, 'default'))}.")
    _check_parameter(parameter, item)
    return parameter if default is None else _set_default(parameter, default)


def _check_parameter(parameter: Parameter, item: YamlItem) -> None:
    is_number = parameter.type in (ParameterType.INTEGER, ParameterType.NUMBER)
    if not is_number and (parameter.least is not None or parameter.most is not None):
        raise item.build_error(f"has bounds, and is of the type {parameter.type}: integer and number have bounds.")
    if None not in (parameter.least, parameter.most) and parameter.least > parameter.most:  # type: ignore[operator]
        raise item.build_error(f"has `least` {parameter.least:g} above `most` {parameter.most:g}.")
    if bool(parameter.choices) != (parameter.type is ParameterType.CHOICE):
        raise item.build_error("has either `type: choice` or `choices` without the other.")


def _set_default(parameter: Parameter, item: YamlItem) -> Parameter:
    if item.value is None or isinstance(item.value, dict | list):
        raise item.build_error("is a text, a number, true or false; leave it out if a value must be given.")
    text = str(item.value).lower() if isinstance(item.value, bool) else str(item.value)
    parameter = replace(parameter, default=text)
    if not text and parameter.type in (ParameterType.TEXT, ParameterType.PATH):
        return parameter
    try:
        return replace(parameter, default=parameter.parse(text))
    except UsageError as error:
        raise item.build_error(f"is not a value of the parameter: {error}") from None


def _set_type(parameter: Parameter, item: YamlItem) -> Parameter:
    if item.value not in list(ParameterType):
        raise item.build_error(f"is {item.value!r}; one of {', '.join(ParameterType)} is needed.")
    return replace(parameter, type=ParameterType(item.value))


def _read_bound(item: YamlItem) -> float:
    """Return a number; YAML reads `1e-8` as a text."""
    try:
        number = math.nan if isinstance(item.value, bool) else float(item.value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise item.build_error(f"is {item.value!r}: a number is needed.")
    return number


def _set_choices(parameter: Parameter, item: YamlItem) -> Parameter:
    values = item.value
    if not isinstance(values, list) or not values or any(isinstance(value, dict | list | None) for value in values):
        raise item.build_error("is a list of texts, such as [lora, full].")
    return replace(parameter, choices=tuple(str(value) for value in values))


def _read_text(item: YamlItem) -> str:
    text = " ".join(str(item.value).split()) if isinstance(item.value, str) else ""
    if not text or not text.isprintable() or len(text) > _MAX_TEXT:
        raise item.build_error(f"is a text of 1 to {_MAX_TEXT} printable characters.")
    return text


_SETTERS: dict[str, Callable[[Recipe, YamlItem], Recipe]] = {
    "description": _set_description,
    "module": _set_module,
    "arguments": _set_arguments,
    "single_gpu": _set_single_gpu,
    "parameters": _set_parameters,
}
_PARAMETER_SETTERS: dict[str, Callable[[Parameter, YamlItem], Parameter]] = {
    "type": _set_type,
    "help": lambda parameter, item: replace(parameter, help=_read_text(item)),
    "least": lambda parameter, item: replace(parameter, least=_read_bound(item)),
    "most": lambda parameter, item: replace(parameter, most=_read_bound(item)),
    "choices": _set_choices,
}
