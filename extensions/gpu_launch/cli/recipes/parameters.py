"""The parameters of a recipe: their types and bounds, and the values that a user gives."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from gpu_launch.errors import UsageError

#: Prefix of the variables with the values of parameters.
VARIABLE_PREFIX = "RECIPE_"
#: The longest value, in characters.
MAX_VALUE = 4096
_HOME = "home:"
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_FLAGS = {"true": "true", "yes": "true", "false": "false", "no": "false"}


class ParameterType(StrEnum):
    """What a value is."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    #: One of the parameter's choices.
    CHOICE = "choice"
    #: `true` or `false`.
    FLAG = "flag"
    #: A file or folder on the cluster: absolute, or below the user's home.
    PATH = "path"
    #: A model's folder, as a path, or its name among the cluster's models.
    MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter as a recipe declares it."""

    name: str
    type: ParameterType = ParameterType.TEXT
    #: What it means, for a person.
    help: str = ""
    #: None where the user must give a value.
    default: str | None = None
    #: Bounds of a number, both included; None for none.
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The name of the variable with the value: `RECIPE_EPOCHS`."""
        return f"{VARIABLE_PREFIX}{self.name.upper()}"

    def parse(self, text: str) -> str:
        """Return a value as the job gets it.

        Paths below the home begin with `~/`; so does a model's folder that is written as `home:…` or `~/…`.

        Raises:
            UsageError: The text is not a value of this parameter; the error names it, and what would be one.
        """
        if len(text) > MAX_VALUE or not text.isprintable():
            raise self._refuse(text, f"one line of at most {MAX_VALUE} printable characters is needed")
        match self.type:
            case ParameterType.INTEGER | ParameterType.NUMBER:
                return self._parse_number(text.strip())
            case ParameterType.CHOICE:
                if text not in self.choices:
                    raise self._refuse(text, f"one of {', '.join(self.choices)} is needed")
            case ParameterType.FLAG:
                if text.lower() not in _FLAGS:
                    raise self._refuse(text, "true or false is needed")
                return _FLAGS[text.lower()]
            case ParameterType.PATH:
                return self._parse_path(text) if text or self.default != "" else ""
            case ParameterType.MODEL if text.startswith((_HOME, "~")) or not text.strip():
                return self._parse_path(text)
            case _:
                return text
        return text

    def describe(self) -> str:
        """Return the type with its bounds: `integer, 1 to 100`, `lora, qlora or full`."""
        if self.type is ParameterType.CHOICE:
            return " or ".join(filter(None, (", ".join(self.choices[:-1]), self.choices[-1])))
        bounds = {
            (False, False): "",
            (True, False): f", at least {_format(self.least)}",
            (False, True): f", at most {_format(self.most)}",
            (True, True): f", {_format(self.least)} to {_format(self.most)}",
        }
        return f"{self.type}{bounds[self.least is not None, self.most is not None]}"

    def _parse_number(self, text: str) -> str:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        is_integer = self.type is ParameterType.INTEGER
        is_right = bool(_INTEGER.fullmatch(text)) if is_integer else math.isfinite(number)
        if not is_right or (self.least is not None and number < self.least):
            raise self._refuse(text, f"{self._describe_number()} is needed")
        if self.most is not None and number > self.most:
            raise self._refuse(text, f"{self._describe_number()} is needed")
        return str(int(text)) if is_integer else text

    def _describe_number(self) -> str:
        kind, _, bounds = self.describe().partition(", ")
        article = "an integer" if kind == ParameterType.INTEGER else "a number"
        return f"{article} {f'from {bounds}' if ' to ' in bounds else f'of {bounds}'}" if bounds else article

    def _parse_path(self, text: str) -> str:
        path = PurePosixPath(text.removeprefix(_HOME).removeprefix("~/").strip())
        is_other = text.startswith(_HOME) and path.is_absolute()
        if ".." in path.parts or path.parts[:1] in ((), ("~",)) or str(path).startswith("~") or is_other:
            raise self._refuse(
                text, "a path on the cluster is needed: below your home, such as datasets/x, or /datasets/x"
            )
        return str(path) if path.is_absolute() else f"~/{path}"

    def _refuse(self, text: str, reason: str) -> UsageError:
        shown = text if len(text) <= 80 else f"{text[:77]}…"
        return UsageError(f"--set {self.name}={shown!r}: {reason}.")


def parse_values(
    parameters: Sequence[Parameter], given: Sequence[str], *, recipe: str, own: Sequence[str] = ()
) -> dict[str, str]:
    """Return the value of every parameter, by name: those of `NAME=VALUE`, and defaults.

    Args:
        parameters: The recipe's parameters.
        given: The words of `--set`, the last of which counts for a parameter.
        recipe: The recipe's name, for errors.
        own: Names of the options of the command, for the hint where one is given as a parameter.

    Raises:
        UsageError: A word or value is wrong, or a value is missing.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    values: dict[str, str] = {}
    for word in given:
        name, has_value, text = word.partition("=")
        if not has_value:
            raise UsageError(f"--set {word}: NAME=VALUE is needed, such as --set epochs=1.")
        if name not in by_name:
            raise _refuse_name(name, by_name, recipe, own)
        values[name] = by_name[name].parse(text)
    missing = [parameter for parameter in parameters if parameter.default is None and parameter.name not in values]
    if missing:
        needed = " ".join(f"--set {parameter.name}={parameter.type.upper()}" for parameter in missing)
        raise UsageError(f"recipe:{recipe} needs {needed}. `gpu-launch recipe show {recipe}` explains its parameters.")
    defaults = {parameter.name: parameter.default or "" for parameter in parameters}
    return defaults | values


def build_variables(parameters: Sequence[Parameter], values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job with these values."""
    return {parameter.variable: values[parameter.name] for parameter in parameters}


def _refuse_name(name: str, known: Mapping[str, Parameter], recipe: str, own: Sequence[str]) -> UsageError:
    if name.replace("_", "-") in own:
        hint = f"--{name.replace('_', '-')} is an option of `gpu-launch run` itself. "
    elif close := difflib.get_close_matches(name, known, n=1):
        hint = f"Did you mean {close[0]}? "
    else:
        hint = ""
    names = ", ".join(known) or "none"
    return UsageError(f"--set {name}: recipe:{recipe} has no such parameter. {hint}It has {names}.")


def _format(number: float | None) -> str:
    if number is None:
        return ""
    return str(int(number)) if float(number).is_integer() else f"{number:g}"
