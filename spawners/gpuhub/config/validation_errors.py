"""Validation errors of cluster.toml as lines that its editor can act on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_PLAIN_TYPES = {
    "string_type": "text in quotes",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
}


def describe_mistakes(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one line for each mistake: the key, what is wrong with its value, and what to write instead."""
    lines: list[str] = []
    for mistake in error.errors(include_url=False):
        where = _format_key(mistake["loc"])
        kind, value = mistake["type"], mistake["input"]
        if kind == "extra_forbidden":
            lines.append(_unknown_key(where, mistake["loc"], root))
        elif kind == "missing":
            lines.append(f"{where}: is missing")
        elif kind == "value_error":
            text = str(mistake["ctx"]["error"])
            lines.extend(f"{where}: {line}" if where else line for line in text.splitlines())
        elif kind in _PLAIN_TYPES:
            lines.append(f"{where}: {value!r} is not {_PLAIN_TYPES[kind]}")
        else:
            lines.append(f"{where}: {_short(value)}: {mistake['msg'][0].lower()}{mistake['msg'][1:]}")
    return lines


def _format_key(location: Sequence[int | str]) -> str:
    """Return `nodes[1].docker` for `('nodes', 0, 'docker')`; tables of an array are counted from 1."""
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part + 1}]"
        else:
            key += f".{part}" if key else part
    return key


def _unknown_key(where: str, location: Sequence[int | str], root: type[BaseModel]) -> str:
    valid = _valid_keys(location[:-1], root)
    close = difflib.get_close_matches(str(location[-1]), valid, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where}: there is no such key; {hint}valid here: {', '.join(valid)}"


def _valid_keys(location: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    for part in location:
        if isinstance(part, str):
            inner = _model_in(model.model_fields[part].annotation)
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings table in an annotation such as `tuple[NodeSettings, ...]` or `DockerTlsFiles | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        model = _model_in(argument)
        if model is not None:
            return model
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
