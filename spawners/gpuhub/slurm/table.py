"""`[slurm]` in cluster.toml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gpuhub.gpus import short_model
from gpuhub.quantities import Span
from gpuhub.tables import SlurmName, Text, Value

__all__ = ["Slurm", "SlurmName"]


class Slurm(Value):
    """How Slurm is asked, and what for; used with `engine = "slurm"`."""

    #: `cli`: by Slurm's commands on the head node; `rest`: by slurmrestd.
    api: Literal["cli", "rest"] = "cli"
    #: The folder of sbatch, squeue, …; None: they are found on PATH.
    commands: Path | None = None
    #: Its slurm.conf; None: where Slurm's commands look by themselves.
    conf: Path | None = None
    #: Where slurmrestd answers: `unix:///run/slurmrestd.sock` or `http://127.0.0.1:6820`.
    rest_url: str | None = None
    #: The file of the JWT key that slurm.conf names (`AuthAltParameters=jwt_key=…`).
    rest_key: Path | None = None
    #: As whom slurmrestd is asked about everybody's jobs: SlurmUser, or an operator.
    rest_user: SlurmName = "root"
    #: None: Slurm's own defaults. A profile may say others.
    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    reservation: SlurmName | None = None
    #: Slurm's types of GPUs by model, where they are not the model in small letters without blanks ("rtx5090").
    gpu_types: dict[Text, SlurmName] = Field(default_factory=dict)
    #: `docker`: gpuhub makes the containers on the nodes; `apptainer`: the job runs the image file `image`; `plain`:
    #: the job runs `command` as it is on the nodes.
    runtime: Literal["docker", "apptainer", "plain"] = "docker"
    #: Apptainer's image file; the same path on every node.
    image: Path | None = None
    #: What starts a notebook with `runtime = "plain"`: an absolute path on the nodes.
    command: Path | None = None
    #: Between two looks at all jobs, seconds.
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
        """Slurm's type of a model as NVML or a profile names it: `RTX 5090` is `rtx5090`, or what `gpu_types` says."""
        wanted = short_model(model).casefold()
        told = (kind for name, kind in self.gpu_types.items() if short_model(name).casefold() == wanted)
        return next(told, "".join(wanted.split()))
