"""`[storage]` in cluster.toml: homes, datasets, models and scratch folders, and the mount options of NFS volumes.

The options are checked by nfs(5) and what Docker's own mount call accepts. Docker mounts without mount.nfs, so options
that only that program understands (`bg`, `retry`) are refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from gpuhub.common.units import Size, Span
from gpuhub.config.base import DatasetName, ListOf, SettingsTable

#: TCP port of NFS servers.
NFS_PORT = 2049
_VERSIONS = ("3", "4", "4.0", "4.1", "4.2")
_LARGEST_TRANSFER = 1024**2
#: Folders that every NFS server's configuration can name without quotes.
_SERVED_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+(/\{username\})?")


class StorageSettings(SettingsTable):
    """Home, datasets and models, which are the same on every node, and scratch, which is local to each."""

    #: Whether the head node serves `home`, `datasets` and `models`, paths there, to all nodes over NFS; then nodes
    #: mount nothing else.
    serve: bool = False
    #: Home folder of a user: a path on each node, or `nfs://server/path`; `{username}` stands for the user's name.
    home: str = "/home/{username}"
    #: Path on the head node where it creates missing homes, with `{username}`; None: homes exist already. For an
    #: `nfs://` home, the path at which the head node sees the same folder.
    home_create: str | None = None
    #: Folder mounted read-only at /datasets: a path on each node, or `nfs://server/path`; None for none.
    datasets: str | None = None
    #: Folder with language models that all users read, mounted read-only at /models, as `datasets` is; None for none.
    #: Its folder `hub` is a cache of Hugging Face, whose models users' programs find by name.
    models: str | None = None
    #: Mount options for `nfs://` volumes, without `addr=`.
    nfs_options: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_=,.:-]*$")] = "nfsvers=4.2,hard,noatime"
    #: Whether each user has a folder on the node's local disk at /scratch, shared by all their containers there.
    scratch: bool = True
    #: Time after which a user's unused scratch folder on a node is deleted, seconds.
    scratch_keep: Span = 14 * 86400
    #: Datasets, such as "datasets/imagenet", of which every node that runs a container gets a copy on its own disk.
    stage: ListOf[DatasetName] = ()
    #: Time after which a copy of a dataset that no container uses is deleted, seconds.
    stage_keep: Span = 14 * 86400
    #: Space that copies of datasets leave free on the disk with Docker's data, bytes: the copies that were not used for
    #: the longest time are deleted first.
    stage_spare: Size = 20 * 1024**3
    #: Time that an NFS server may take to answer before a start is refused, seconds; 60 at most.
    patience: Annotated[Span, Field(le=60)] = 10

    @field_validator("nfs_options")
    @classmethod
    def _options(cls, value: str) -> str:
        check_nfs_options(value)
        return value

    @field_validator("home", "home_create", "datasets", "models")
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
        if self.serve:
            self._check_served()
        if self.stage and self.datasets is None:
            raise ValueError("stage: copies are made of what `datasets` has, and it is not set")
        if self.home.startswith("nfs://") and is_read_only(self.nfs_options):
            raise ValueError("nfs_options: with ro, homes could not be written; datasets are read-only without it")
        return self

    def format_home(self, username: str) -> str:
        """Return a user's home as `home` has it: a path on the nodes, or the address of a folder that they mount."""
        return self.home.replace("{username}", username)

    def list_read_only(self) -> tuple[str, ...]:
        """Return the folders that all users read: datasets and models, as far as there are some."""
        return tuple(source for source in (self.datasets, self.models) if source is not None)

    def _check_served(self) -> None:
        for key in ("home", "datasets", "models"):
            value = getattr(self, key)
            if value is not None and not _SERVED_PATH.fullmatch(value):
                raise ValueError(
                    f"{key} = {value!r}: with serve = true this is a folder of the head node, such as "
                    f'"/export/{"home/{username}" if key == "home" else key}"'
                )
        if self.home_create is not None:
            raise ValueError("home_create: with serve = true the head node creates homes in `home`: leave it out")
        if nfs_version(self.nfs_options) < 4:
            raise ValueError(f"nfs_options = {self.nfs_options!r}: with serve = true, nfsvers=4.2 is needed")


def serve_from(storage: StorageSettings, address: str) -> StorageSettings:
    """Return the settings as nodes need them, where the head node with this address serves all but scratch."""
    host = f"[{address}]" if ":" in address else address
    read_only = {
        key: None if (folder := getattr(storage, key)) is None else f"nfs://{host}{folder}"
        for key in ("datasets", "models")
    }
    return storage.model_copy(update={"home": f"nfs://{host}{storage.home}", "home_create": storage.home, **read_only})


@dataclass(frozen=True, slots=True)
class _OptionRule:
    """Check of an option's value, with a description of valid values; an option without a value has no check."""

    accepts: Callable[[str], bool] | None
    description: str = ""


def _number_rule(least: int, most: int, unit: str = "") -> _OptionRule:
    def accepts(value: str) -> bool:
        return re.fullmatch(r"\d{1,9}", value) is not None and least <= int(value) <= most

    return _OptionRule(accepts, f"a whole number from {least} to {most}{unit}")


def _choice_rule(*values: str) -> _OptionRule:
    return _OptionRule(lambda value: value in values, f"one of {', '.join(values)}")


def _transfer_size_rule() -> _OptionRule:
    def accepts(value: str) -> bool:
        is_number = re.fullmatch(r"[1-9]\d{3,6}", value) is not None
        return is_number and int(value) <= _LARGEST_TRANSFER and int(value) % 1024 == 0

    return _OptionRule(accepts, f"bytes, a multiple of 1024 up to {_LARGEST_TRANSFER}")


_FLAG = _OptionRule(None)
_SECONDS = _number_rule(0, 86400, " seconds")
_RULES: dict[str, _OptionRule] = {
    "nfsvers": _choice_rule(*_VERSIONS),
    "vers": _choice_rule(*_VERSIONS),
    "minorversion": _choice_rule("0", "1", "2"),
    "proto": _choice_rule("tcp", "tcp6", "rdma", "rdma6"),
    "port": _number_rule(1, 65535),
    "mountport": _number_rule(1, 65535),
    "mountproto": _choice_rule("tcp", "tcp6", "udp", "udp6"),
    "mountvers": _choice_rule("3"),
    "nconnect": _number_rule(1, 16),
    "max_connect": _number_rule(1, 16),
    "rsize": _transfer_size_rule(),
    "wsize": _transfer_size_rule(),
    "timeo": _number_rule(1, 6000, " tenths of a second"),
    "retrans": _number_rule(0, 100),
    "sec": _choice_rule("sys", "krb5", "krb5i", "krb5p"),
    "xprtsec": _choice_rule("none", "tls", "mtls"),
    "acregmin": _SECONDS,
    "acregmax": _SECONDS,
    "acdirmin": _SECONDS,
    "acdirmax": _SECONDS,
    "actimeo": _SECONDS,
    "lookupcache": _choice_rule("all", "none", "pos", "positive"),
    "local_lock": _choice_rule("none", "all", "flock", "posix"),
    "namlen": _number_rule(1, 255),
    **dict.fromkeys(
        (
            *("hard", "soft", "softerr", "softreval", "nosoftreval", "fsc", "nofsc", "ac", "noac", "cto", "nocto"),
            *("rdirplus", "nordirplus", "sharecache", "nosharecache", "resvport", "noresvport", "lock", "nolock"),
            *("acl", "noacl", "migration", "nomigration", "tcp", "ro", "rw", "sync", "async", "atime", "noatime"),
            *("diratime", "nodiratime", "relatime", "nosuid", "nodev", "noexec"),
        ),
        _FLAG,
    ),
}
#: Options that exist and are refused here, with the reason.
_REFUSED = {
    "addr": "the server's address is taken from nfs://SERVER/PATH",
    "clientaddr": "every node has its own address: leave it to the kernel",
    "mounthost": "the server's address is taken from nfs://SERVER/PATH",
    "bg": "Docker mounts when a container starts, in the foreground",
    "fg": "it has no effect with Docker, which always mounts in the foreground",
    "retry": "Docker tries once; `patience` in [storage] sets how long a start waits for the server",
    "udp": "Linux no longer supports NFS over UDP: remove it",
    "intr": "it has had no effect since Linux 2.6.25: remove it",
    "nointr": "it has had no effect since Linux 2.6.25: remove it",
    **dict.fromkeys(
        ("_netdev", "auto", "noauto", "nofail", "user", "users", "nouser", "defaults"),
        "it belongs in /etc/fstab, which Docker does not read",
    ),
}
#: Groups of options of which at most one may be set.
_EXCLUSIVE = (
    ("nfsvers", "vers"),
    ("hard", "soft", "softerr"),
    ("fsc", "nofsc"),
    ("ro", "rw"),
    ("sync", "async"),
    ("lock", "nolock"),
    ("cto", "nocto"),
    ("ac", "noac"),
    ("atime", "noatime", "relatime"),
)


def check_nfs_options(text: str) -> None:
    """Refuse mount options that are unknown, wrong or contradictory.

    Raises:
        ValueError: lists every mistake with its remedy.
    """
    pairs = list(_split(text))
    mistakes = [mistake for name, value in pairs if (mistake := _check_option(name, value))]
    given = [name for name, _ in pairs]
    mistakes += [f"{name} is set twice" for name in dict.fromkeys(given) if given.count(name) > 1]
    for group in _EXCLUSIVE:
        conflicting = [name for name in group if name in given]
        if len(conflicting) > 1:
            mistakes.append(f"{' and '.join(conflicting)} exclude each other")
    if mistakes:
        raise ValueError(f"{text!r}: {'; '.join(mistakes)}")


def parse_nfs_options(text: str) -> dict[str, str]:
    """Return checked options by name; options without a value have an empty one."""
    return {name: value or "" for name, value in _split(text)}


def nfs_port(options: str) -> int:
    """Return the TCP port on which the server of a volume with these options answers."""
    parsed = parse_nfs_options(options)
    # With RDMA the port is that of another transport; servers listen on TCP as well.
    return NFS_PORT if parsed.get("proto", "").startswith("rdma") else int(parsed.get("port") or NFS_PORT)


def nfs_version(options: str) -> int:
    """Return the major version of NFS, 3 or 4, of a volume with these options."""
    parsed = parse_nfs_options(options)
    # The kernel itself, without mount.nfs, defaults to version 3.
    return int((parsed.get("nfsvers") or parsed.get("vers") or "3")[0])


def is_read_only(options: str) -> bool:
    """Return whether a volume with these options is mounted read-only."""
    return "ro" in parse_nfs_options(options)


def _split(text: str) -> Iterable[tuple[str, str | None]]:
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        yield name, value if equals else None


def _check_option(name: str, value: str | None) -> str | None:
    if name in _REFUSED:
        return f"{name}: {_REFUSED[name]}"
    if (name, value) in {("proto", "udp"), ("proto", "udp6")}:
        return f"proto={value}: {_REFUSED['udp']}"
    rule = _RULES.get(name)
    if rule is None:
        close = difflib.get_close_matches(name, _RULES, n=1)
        return f"there is no option {name!r} in nfs(5){f'; did you mean {close[0]!r}?' if close else ''}"
    if rule.accepts is None:
        return None if value is None else f"{name} takes no value: write {name} alone"
    if value is None:
        return f"{name} needs a value: {rule.description}"
    return None if rule.accepts(value) else f"{name}={value}: {rule.description} is needed"
