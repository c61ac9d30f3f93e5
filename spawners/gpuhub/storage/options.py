"""Mount options of NFS volumes: what nfs(5) knows and Docker's own mount takes, checked before anything is mounted.

Docker mounts without mount.nfs, so what that program alone understands (`bg`, `retry`) is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: Where NFS servers listen.
NFS_PORT = 2049
_VERSIONS = ("3", "4", "4.0", "4.1", "4.2")
_LARGEST_TRANSFER = 1024**2


@dataclass(frozen=True, slots=True)
class _Rule:
    """What an option's value may be, and that in words; an option without value has None."""

    accepts: Callable[[str], bool] | None
    words: str = ""


def _number(least: int, most: int, unit: str = "") -> _Rule:
    def accepts(value: str) -> bool:
        return re.fullmatch(r"\d{1,9}", value) is not None and least <= int(value) <= most

    return _Rule(accepts, f"a whole number from {least} to {most}{unit}")


def _one_of(*values: str) -> _Rule:
    return _Rule(lambda value: value in values, f"one of {', '.join(values)}")


def _transfer() -> _Rule:
    def accepts(value: str) -> bool:
        is_number = re.fullmatch(r"[1-9]\d{3,6}", value) is not None
        return is_number and int(value) <= _LARGEST_TRANSFER and int(value) % 1024 == 0

    return _Rule(accepts, f"bytes, a multiple of 1024 up to {_LARGEST_TRANSFER}")


_FLAG = _Rule(None)
_SECONDS = _number(0, 86400, " seconds")
_RULES: dict[str, _Rule] = {
    "nfsvers": _one_of(*_VERSIONS),
    "vers": _one_of(*_VERSIONS),
    "minorversion": _one_of("0", "1", "2"),
    "proto": _one_of("tcp", "tcp6", "rdma", "rdma6"),
    "port": _number(1, 65535),
    "mountport": _number(1, 65535),
    "mountproto": _one_of("tcp", "tcp6", "udp", "udp6"),
    "mountvers": _one_of("3"),
    "nconnect": _number(1, 16),
    "max_connect": _number(1, 16),
    "rsize": _transfer(),
    "wsize": _transfer(),
    "timeo": _number(1, 6000, " tenths of a second"),
    "retrans": _number(0, 100),
    "sec": _one_of("sys", "krb5", "krb5i", "krb5p"),
    "xprtsec": _one_of("none", "tls", "mtls"),
    "acregmin": _SECONDS,
    "acregmax": _SECONDS,
    "acdirmin": _SECONDS,
    "acdirmax": _SECONDS,
    "actimeo": _SECONDS,
    "lookupcache": _one_of("all", "none", "pos", "positive"),
    "local_lock": _one_of("none", "all", "flock", "posix"),
    "namlen": _number(1, 255),
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
#: Options that exist and are wrong here, each with why.
_REFUSED = {
    "addr": "the server's address is taken from nfs://SERVER/PATH",
    "clientaddr": "every node has its own address: leave it to the kernel",
    "mounthost": "the server's address is taken from nfs://SERVER/PATH",
    "bg": "Docker mounts when a container starts, in the foreground",
    "fg": "it means nothing to Docker, which always mounts in the foreground",
    "retry": "Docker tries once; `patience` in [storage] says how long a start waits for the server",
    "udp": "Linux has no NFS over UDP any more: leave it out",
    "intr": "it has meant nothing since Linux 2.6.25: leave it out",
    "nointr": "it has meant nothing since Linux 2.6.25: leave it out",
    **dict.fromkeys(
        ("_netdev", "auto", "noauto", "nofail", "user", "users", "nouser", "defaults"),
        "it belongs into /etc/fstab, which Docker does not read",
    ),
}
#: Of each group at most one.
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


def check_options(text: str) -> None:
    """Refuse mount options that are unknown, wrong, or contradict each other.

    Raises:
        ValueError: with every mistake, and what would be right.
    """
    pairs = list(_pairs(text))
    mistakes = [mistake for name, value in pairs if (mistake := _mistake(name, value))]
    given = [name for name, _ in pairs]
    mistakes += [f"{name} stands twice" for name in dict.fromkeys(given) if given.count(name) > 1]
    for group in _EXCLUSIVE:
        both = [name for name in group if name in given]
        if len(both) > 1:
            mistakes.append(f"{' and '.join(both)} exclude each other")
    if mistakes:
        raise ValueError(f"{text!r}: {'; '.join(mistakes)}")


def parse_options(text: str) -> dict[str, str]:
    """Checked options by name; those without a value have an empty one."""
    return {name: value or "" for name, value in _pairs(text)}


def port_of(options: str) -> int:
    """The TCP port on which the server of a volume with these options answers."""
    found = parse_options(options)
    # With RDMA the port is that of another transport; servers listen on TCP beside it.
    return NFS_PORT if found.get("proto", "").startswith("rdma") else int(found.get("port") or NFS_PORT)


def version_of(options: str) -> int:
    """The major version of NFS that a volume with these options speaks: 3 or 4."""
    found = parse_options(options)
    # The kernel itself, without mount.nfs, takes 3 where nothing is said.
    return int((found.get("nfsvers") or found.get("vers") or "3")[0])


def is_read_only(options: str) -> bool:
    """Whether nothing can be written to a volume with these options."""
    return "ro" in parse_options(options)


def _pairs(text: str) -> Iterable[tuple[str, str | None]]:
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        yield name, value if equals else None


def _mistake(name: str, value: str | None) -> str | None:
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
        return f"{name} needs a value: {rule.words}"
    return None if rule.accepts(value) else f"{name}={value}: {rule.words} is needed"
