"""How full a user's home is: what `quota` and the file system say, as a line for its owner. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpuhub.quantities import format_size

#: The command that asks, to which the UID is added: local file systems and NFS (rquota) alike, no wrapped lines, times
#: as numbers so that every line has as many words, and mount points for names.
QUOTA_COMMAND = (
    *("quota", "--user", "--no-wrap", "--raw-grace", "--quiet-refuse", "--no-autofs"),
    *("--show-mntpoint", "--hide-device"),
)
#: More than this is told as nearly full.
NEARLY_FULL = 0.95
_WORDS = 9
_BLOCK_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a user has and may have on one file system, bytes."""

    mount: PurePosixPath
    used: int
    #: The hard limit, else the soft one.
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A file system as statvfs(3) tells of it, bytes."""

    size: int
    #: For users, not counting what is kept for root.
    free: int

    @property
    def share(self) -> float:
        """How much of it is used, from 0 to 1."""
        return 1 - self.free / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeUse:
    """What the owner of a home reads about it; empty texts say nothing."""

    #: Such as `Home: 12 of 50 GiB`, only where there is a quota.
    text: str = ""
    warning: str = ""


def parse_quota(output: str) -> list[Quota]:
    """The limits in what `QUOTA_COMMAND` writes; lines without a limit, and whatever else it says, are passed over."""
    found = []
    for line in output.splitlines():
        words = line.split()
        numbers = [word.rstrip("*") for word in words[1:]]
        if len(words) != _WORDS or not words[0].startswith("/") or not all(word.isdigit() for word in numbers):
            continue
        used, soft, hard = (int(number) * _BLOCK_BYTES for number in numbers[:3])
        if hard or soft:
            found.append(Quota(mount=PurePosixPath(words[0]), used=used, limit=hard or soft))
    return found


def describe_home(home: PurePosixPath, quotas: Sequence[Quota], space: Space, around: Space) -> HomeUse:
    """What to tell of the home at that path (links resolved). `space` is the file system as seen from the home,
    `around` as seen from the folder of homes: where the home's is smaller, that is its own limit (project quotas of
    XFS and ext4, also seen over NFS, or a data set of its own).
    """
    known = [(one.used, one.limit) for one in _of_home(home, quotas)]
    if 0 < space.size < around.size:
        known.append((space.size - space.free, space.size))
    if known:
        used, limit = max(known, key=lambda one: one[0] / one[1])
        text = f"Home: {format_size(used)} of {format_size(limit)}"
        if used / limit > NEARLY_FULL:
            return HomeUse(
                text=text, warning=f"Your home is nearly full: {format_size(max(0, limit - used))} are left."
            )
        if space.share <= NEARLY_FULL:
            return HomeUse(text=text)
        return HomeUse(text=text, warning=_full(space))
    return HomeUse(warning=_full(space) if space.share > NEARLY_FULL else "")


def _of_home(home: PurePosixPath, quotas: Sequence[Quota]) -> list[Quota]:
    """The limits of the file system that the home is on: that of the longest mount point."""
    on_way = [one for one in quotas if one.mount == home or one.mount in home.parents]
    longest = max((len(one.mount.parts) for one in on_way), default=0)
    return [one for one in on_way if len(one.mount.parts) == longest]


def _full(space: Space) -> str:
    return (
        f"The disk with everybody's homes is nearly full: {format_size(space.free)} of {format_size(space.size)} are "
        "left. Please delete what you do not need."
    )
