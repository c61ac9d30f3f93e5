"""The base class of the tables of cluster.toml, the types that their keys share, and texts for wrong values."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from gpuhub.common import names
from gpuhub.common.node_access import check_group

#: Name of a node in cluster.toml: 1 to 32 lower-case letters, digits and dashes.
NodeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
ProfileName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
#: Name of a group at the login provider: 1 to 200 printable characters.
GroupName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$"),
    AfterValidator(check_group),
]
#: A folder below `/datasets`, such as "datasets/imagenet".
DatasetName = Annotated[str, StringConstraints(pattern=f"^{names.DATASET_PATTERN}$")]
#: TCP port.
Port = Annotated[int, Field(ge=1, le=65535)]
#: Text of 1 to 300 characters.
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]
HostName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$")
]
#: Name of a switch or rack.
Label = Annotated[str, StringConstraints(min_length=1, max_length=64)]
#: Name of a node, partition, account, QOS, reservation or GPU type in Slurm.
SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}$")]
#: Version of NVIDIA's driver, such as "570.86.15".
DriverVersion = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$")]
#: CUDA compute capability, such as "8.9".
ComputeCapability = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")]
#: What TOML calls the types, by the kinds of pydantic's errors.
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


def to_float(value: object) -> object:
    """Convert a whole number to float: TOML distinguishes `4` from `4.0`, and strict validation would refuse `4`."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def to_tuple(value: object) -> object:
    """Convert a TOML list to a tuple, since settings are frozen."""
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T")
#: A number, written with or without a decimal point.
Number = Annotated[float, BeforeValidator(to_float)]
#: A list in the file, a tuple in the program.
ListOf = Annotated[tuple[T, ...], BeforeValidator(to_tuple)]


def private_network(example: str, prefixes: range = range(8, 33)) -> AfterValidator:
    """Return the check that a text is a private IPv4 network whose prefix has one of these lengths."""

    def check(text: str) -> str:
        try:
            network = ipaddress.IPv4Network(text)
        except ValueError as error:
            raise ValueError(f'{text!r} is not an IPv4 network: {error}; write one such as "{example}"') from None
        if not network.is_private or network.prefixlen not in prefixes:
            sizes = f"/{prefixes[0]} to /{prefixes[-1]}"
            raise ValueError(f'{text!r}: a private network of {sizes} is needed, such as "{example}"')
        return text

    return AfterValidator(check)


class SettingsTable(BaseModel):
    """Base of every table of cluster.toml: frozen, and unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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
