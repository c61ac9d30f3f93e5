"""`[slurm]` in cluster.toml: the Slurm cluster behind `engine = "slurm"`, and how gpuhub reaches it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gpuhub.common.gpu import shorten_model
from gpuhub.common.units import Span
from gpuhub.config.base import SettingsTable, SlurmName, Text

__all__ = ["SlurmName", "SlurmSettings"]


class SlurmSettings(SettingsTable):
    """Connection to Slurm, defaults of its jobs, and what runs notebooks and workers on its nodes."""

    #: Interface to Slurm. `cli`: Slurm's commands on the head node; `rest`: slurmrestd.
    api: Literal["cli", "rest"] = "cli"
    #: Folder of sbatch, squeue and the other commands; None: they are found on PATH.
    commands: Path | None = None
    #: Path of slurm.conf; None: the default of Slurm's commands.
    conf: Path | None = None
    #: Address of slurmrestd: `unix:///run/slurmrestd.sock` or `http://127.0.0.1:6820`.
    rest_url: str | None = None
    #: File of the JWT key, as in slurm.conf (`AuthAltParameters=jwt_key=…`).
    rest_key: Path | None = None
    #: User as whom gpuhub queries all jobs through slurmrestd: SlurmUser, or an operator.
    rest_user: SlurmName = "root"
    #: Partition of gpuhub's jobs unless the profile sets one; None: Slurm's default.
    partition: SlurmName | None = None
    #: Account of gpuhub's jobs unless the profile sets one; None: Slurm's default.
    account: SlurmName | None = None
    #: QOS of gpuhub's jobs unless the profile sets one; None: Slurm's default.
    qos: SlurmName | None = None
    #: Reservation of gpuhub's jobs unless the profile sets one; None: none.
    reservation: SlurmName | None = None
    #: Slurm's GPU types by model, where they are not the model in lower case without blanks ("rtx5090").
    gpu_types: dict[Text, SlurmName] = Field(default_factory=dict)
    #: What runs notebooks and workers. `docker`: gpuhub creates containers on the nodes; `apptainer`: the job runs the
    #: image file `image`; `plain`: the job runs `command` as installed on the nodes.
    runtime: Literal["docker", "apptainer", "plain"] = "docker"
    #: Apptainer image file, with the same path on every node.
    image: Path | None = None
    #: Program that starts a notebook with `runtime = "plain"`: an absolute path on the nodes.
    command: Path | None = None
    #: Interval between two queries of all jobs, seconds; 60 at most.
    poll: Annotated[Span, Field(le=60)] = 2

    @field_validator("commands", "conf", "rest_key", "image", "command", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value

    @field_validator("commands", "conf", "rest_key", "image", "command")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and (not value.is_absolute() or not re.fullmatch(r"[A-Za-z0-9/_.@+-]+", str(value))):
            raise ValueError(f"{str(value)!r}: an absolute path of letters, digits and / _ . @ + - is needed")
        return value

    @field_validator("rest_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            is_socket = url.scheme == "unix" and not url.netloc and len(url.path) > 1
            is_http = url.scheme in {"http", "https"} and url.hostname and url.path in {"", "/"}
            if not is_socket and not is_http:
                raise ValueError(f'{value!r}: write "unix:///run/slurmrestd.sock" or "http://127.0.0.1:6820"')
            return value.rstrip("/")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.api == "rest" and (self.rest_url is None or self.rest_key is None):
            raise ValueError('api = "rest" needs rest_url and rest_key')
        if self.runtime == "apptainer" and self.image is None:
            raise ValueError('runtime = "apptainer" needs image: the file that the nodes run')
        if self.runtime == "plain" and self.command is None:
            raise ValueError('runtime = "plain" needs command, such as "/opt/gpuhub/bin/jupyterhub-singleuser"')
        return self

    def gpu_type(self, model: str) -> str:
        """Return Slurm's type of a model: the one in `gpu_types`, else `rtx5090` for `RTX 5090`."""
        wanted = shorten_model(model).casefold()
        configured = (gpu_type for name, gpu_type in self.gpu_types.items() if shorten_model(name).casefold() == wanted)
        return next(configured, "".join(wanted.split()))
