"""What is known of a Slurm site, as values made of what it says. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuhub.slurm.values import Site

_AS_OF = re.compile(r"(?m)^Configuration data as of (\d+)\s*$")
_SOCKET = re.compile(r"(?:^|,)socket=([^,]+)")
_NULL = "(null)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """What the head node was told of the site."""

    #: Slurm's commands that were not found; nothing where slurmrestd is asked.
    missing: tuple[str, ...] = ()
    #: What is set up there, else why nobody could tell.
    site: Site | None = None
    trouble: str = ""
    #: What munge says when it fails, empty where it works; None where it was not asked.
    munge: str | None = None
    #: `scontrol show config`, small letters: setting → value; empty where it was not asked.
    config: Mapping[str, str] = field(default_factory=dict)
    #: How far the head node's clock is ahead of slurmctld's, seconds; None where not known.
    ahead_s: float | None = None
    #: By so much that may be wrong: how long the answer took, and that slurmctld tells whole seconds.
    within_s: float = 1.0
    #: Slurm's name of a node → its slurmd's version.
    slurmds: Mapping[str, str] = field(default_factory=dict)
    #: What of cluster.toml Slurm does not know.
    mistakes: tuple[str, ...] = ()

    @property
    def munge_socket(self) -> str:
        """Where slurm.conf says that munged listens; empty for the usual place."""
        found = _SOCKET.search(self.config.get("authinfo", ""))
        return found[1] if found else ""

    @property
    def epilog(self) -> str:
        """What Slurm runs after each job; empty for nothing."""
        value = self.config.get("epilog", "")
        return "" if value == _NULL else value


def parse_config(text: str) -> dict[str, str]:
    """The lines `Key = value` of `scontrol show config`, keys in small letters."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        # Later sections repeat keys of other files.
        if sign and key.strip():
            found.setdefault(key.strip().lower(), value.strip())
    return found


def parse_moment(text: str) -> float | None:
    """slurmctld's clock in `SLURM_TIME_FORMAT=%s scontrol show config`, seconds since 1970."""
    found = _AS_OF.search(text)
    return None if found is None else float(found[1])


def parse_slurmds(text: str) -> dict[str, str]:
    """The lines `NAME VERSION` of `sinfo -h -N -o "%N %v"`; a node that never answered has no version."""
    parts = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in parts if len(words) == 2 and words[1][0].isdigit()}
