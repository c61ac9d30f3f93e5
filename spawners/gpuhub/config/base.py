"""The base class of the tables of cluster.toml, and the types that their keys share."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from gpuhub.common import names

#: Name of a node in cluster.toml: 1 to 32 lower-case letters, digits and dashes.
NodeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
ProfileName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
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


class SettingsTable(BaseModel):
    """Base of every table of cluster.toml: frozen, and unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
