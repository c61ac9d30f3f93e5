"""What the administrator names: a machine as `ssh` finds it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpuhub.errors import InvalidRequest

#: What can be said to ssh and to a shell without a second meaning.
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A machine as it was named; what is None, the administrator's own settings of ssh say."""

    host: str
    user: str | None = None
    port: int | None = None

    def words(self) -> list[str]:
        """For ssh: the machine after everything that might be an option."""
        port = [] if self.port is None else ["-p", str(self.port)]
        user = [] if self.user is None else ["-l", self.user]
        return [*port, *user, "--", self.host]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What the administrator's ssh makes of a target (`ssh -G`)."""

    host: str
    user: str
    port: int
    #: Another machine that it goes over.
    jump: str | None = None
    known_hosts: tuple[str, ...] = ()


def parse_target(text: str) -> Target:
    """`ssh://me@rig2:22`, with user and port as wished.

    Raises:
        InvalidRequest: it is something else.
    """
    url = urlsplit(text)
    try:
        port = url.port
    except ValueError:
        port = -1
    user_fits = url.username is None or _USER.fullmatch(url.username)
    if (
        url.scheme != "ssh"
        or url.hostname is None
        or not _HOST.fullmatch(url.hostname)
        or not user_fits
        or url.password is not None
        or url.path not in {"", "/"}
        or url.query
        or url.fragment
        or port == -1
    ):
        raise InvalidRequest(
            f"{text!r} is no machine reached over SSH: write such as ssh://me@rig2 or ssh://me@192.168.1.22:22"
        )
    return Target(host=url.hostname, user=url.username, port=port)


def parse_resolved(text: str) -> Resolved:
    """What `ssh -G` prints: a word, a space and its value on each line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), value.strip())
    jump = next((found[key] for key in ("proxyjump", "proxycommand") if found.get(key, "none") != "none"), None)
    files = f"{found.get('userknownhostsfile', '')} {found.get('globalknownhostsfile', '')}".split()
    return Resolved(
        host=found["hostname"], user=found["user"], port=int(found["port"]), jump=jump, known_hosts=tuple(files)
    )


def suggest_name(target: Target, taken: Sequence[str]) -> str:
    """A node's name: the first part of the machine's, or `rigN` where an address was given."""
    first = target.host.split(".")[0].lower()
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", first) and first not in taken:
        return first
    return next(name for number in range(1, len(taken) + 2) if (name := f"rig{number}") not in taken)


def build_ssh_url(user: str, address: str, port: int) -> str:
    """What cluster.toml is told of it."""
    host = f"[{address}]" if ":" in address else address
    return f"ssh://{user}@{host}{'' if port == 22 else f':{port}'}"
