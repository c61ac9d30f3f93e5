"""`[storage]` in cluster.toml: homes, datasets and scratch folders."""

from __future__ import annotations

import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from gpuhub.common.units import Span
from gpuhub.config.base import SettingsTable
from gpuhub.config.nfs_options import check_nfs_options, is_read_only


class StorageSettings(SettingsTable):
    """Home and datasets, which are the same on every node, and scratch, which is local to each."""

    #: Home folder of a user: a path on each node, or `nfs://server/path`; `{username}` stands for the user's name.
    home: str = "/home/{username}"
    #: Path on the head node where it creates missing homes, with `{username}`; None: homes exist already. For an
    #: `nfs://` home, the path at which the head node sees the same folder.
    home_create: str | None = None
    #: Folder mounted read-only at /datasets: a path on each node, or `nfs://server/path`; None for none.
    datasets: str | None = None
    #: Mount options for `nfs://` volumes, without `addr=`.
    nfs_options: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_=,.:-]*$")] = "nfsvers=4.2,hard,noatime"
    #: Whether each user has a folder on the node's local disk at /scratch, shared by all their containers there.
    scratch: bool = True
    #: Time after which a user's unused scratch folder on a node is deleted, seconds.
    scratch_keep: Span = 14 * 86400
    #: Time that an NFS server may take to answer before a start is refused, seconds; 60 at most.
    patience: Annotated[Span, Field(le=60)] = 10

    @field_validator("nfs_options")
    @classmethod
    def _options(cls, value: str) -> str:
        check_nfs_options(value)
        return value

    @field_validator("home", "home_create", "datasets")
    @classmethod
    def _location(cls, value: str | None) -> str | None:
        if value is None:
            return value
        url = urlsplit(value)
        if url.scheme == "nfs" and url.hostname and len(url.path) > 1 and ".." not in url.path:
            if url.netloc not in {url.hostname, f"[{url.hostname}]"} or not re.fullmatch(r"[a-z0-9.:-]+", url.hostname):
                raise ValueError(
                    f"{value!r}: nfs://SERVER/PATH is needed, with a host name or an IP address alone; "
                    'another port is written as nfs_options = "…,port=2050"'
                )
            return value
        if value.startswith("/") and len(value) > 1 and ".." not in value.split("/"):
            return value
        raise ValueError(f"{value!r} is neither an absolute path nor nfs://server/path")

    @model_validator(mode="after")
    def _per_user(self) -> Self:
        for key in ("home", "home_create"):
            value = getattr(self, key)
            if value is not None and "{username}" not in value:
                raise ValueError(f"{key} = {value!r} is one folder for all users: put {{username}} into it")
        if self.home_create is not None and self.home_create.startswith("nfs://"):
            raise ValueError("home_create is a path on the head node, not an nfs:// address")
        if self.home.startswith("nfs://") and is_read_only(self.nfs_options):
            raise ValueError("nfs_options: with ro, homes could not be written; datasets are read-only without it")
        return self
