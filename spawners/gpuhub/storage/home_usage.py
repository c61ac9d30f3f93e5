"""Reads how full a user's home is, if the head node sees it, with a short time limit."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuhub.common.errors import StorageUnavailable
from gpuhub.common.units import format_size
from gpuhub.config.settings import StorageSettings
from gpuhub.storage.homes import BLOCKING_CALLS, HomeLocation, find_home

log = logging.getLogger(__name__)
#: Maximum time that a page waits for the usage of a home, seconds.
READ_TIMEOUT_S = 2.0
#: The command, to which the UID is appended. It covers local file systems and NFS (rquota), does not wrap lines, prints
#: times as numbers so that every line has equally many columns, and prints mount points as names.
QUOTA_COMMAND = (
    *("quota", "--user", "--no-wrap", "--raw-grace", "--quiet-refuse", "--no-autofs"),
    *("--show-mntpoint", "--hide-device"),
)

#: Share of a limit or disk above which it is reported as nearly full.
NEARLY_FULL_SHARE = 0.95
_QUOTA_COLUMNS = 9
_BLOCK_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskQuota:
    """A user's usage and limit on one file system, bytes."""

    mount: PurePosixPath
    used: int
    #: The hard limit, else the soft one.
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Size and free space of a file system as statvfs(3) reports them, bytes."""

    size: int
    #: Free for users, without the blocks that are reserved for root.
    free: int

    @property
    def used_share(self) -> float:
        """Return the used share, from 0 to 1."""
        return 1 - self.free / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeUsage:
    """Texts about a home for its owner, each of which may be empty."""

    #: Such as `Home: 12 of 50 GiB`; only if there is a quota.
    text: str = ""
    warning: str = ""


def parse_quota(output: str) -> list[DiskQuota]:
    """Return the limits in the output of `QUOTA_COMMAND`; lines without a limit and other output are ignored."""
    quotas = []
    for line in output.splitlines():
        columns = line.split()
        numbers = [word.rstrip("*") for word in columns[1:]]
        if (
            len(columns) != _QUOTA_COLUMNS
            or not columns[0].startswith("/")
            or not all(word.isdigit() for word in numbers)
        ):
            continue
        used, soft, hard = (int(number) * _BLOCK_BYTES for number in numbers[:3])
        if hard or soft:
            quotas.append(DiskQuota(mount=PurePosixPath(columns[0]), used=used, limit=hard or soft))
    return quotas


def describe_home_usage(
    home: PurePosixPath, quotas: Sequence[DiskQuota], space: DiskSpace, around: DiskSpace
) -> HomeUsage:
    """Describe the usage of a home.

    Args:
        home: Path of the home with links resolved.
        space: The file system as seen from the home.
        around: The file system as seen from the folder of homes. If the home's is smaller, the home has its own limit:
            a project quota of XFS or ext4, also over NFS, or a separate data set.
    """
    limits = [(quota.used, quota.limit) for quota in _select_quotas(home, quotas)]
    if 0 < space.size < around.size:
        limits.append((space.size - space.free, space.size))
    if limits:
        used, limit = max(limits, key=lambda pair: pair[0] / pair[1])
        text = f"Home: {format_size(used)} of {format_size(limit)}"
        if used / limit > NEARLY_FULL_SHARE:
            return HomeUsage(
                text=text, warning=f"Your home is nearly full: {format_size(max(0, limit - used))} are left."
            )
        if space.used_share <= NEARLY_FULL_SHARE:
            return HomeUsage(text=text)
        return HomeUsage(text=text, warning=_describe_full_disk(space))
    return HomeUsage(warning=_describe_full_disk(space) if space.used_share > NEARLY_FULL_SHARE else "")


def _select_quotas(home: PurePosixPath, quotas: Sequence[DiskQuota]) -> list[DiskQuota]:
    """Return the quotas of the file system that the home is on: those with the longest mount point."""
    candidates = [quota for quota in quotas if quota.mount == home or quota.mount in home.parents]
    longest = max((len(quota.mount.parts) for quota in candidates), default=0)
    return [quota for quota in candidates if len(quota.mount.parts) == longest]


def _describe_full_disk(space: DiskSpace) -> str:
    return (
        f"The disk with all users' homes is nearly full: {format_size(space.free)} of {format_size(space.size)} are "
        "left. Please delete files that you do not need."
    )


_UNRESPONSIVE = HomeUsage(warning="The disk with your home does not answer: a start may fail.")


async def read_home_usage(storage: StorageSettings, name: str) -> HomeUsage:
    """Return the usage of a user's home; empty if the head node does not see it, or it does not exist yet."""
    location = find_home(storage, name)
    if location is None:
        return HomeUsage()
    try:
        # A separate target, because starts wait longer until they count a folder as stuck.
        return await BLOCKING_CALLS.run(
            f"use of {location.root}",
            lambda: measure_home(location),
            limit_s=READ_TIMEOUT_S,
            timeout_message=f"{location.root} does not answer",
        )
    except StorageUnavailable as error:
        log.warning("How full homes are is not known: %s", error)
        return _UNRESPONSIVE
    except OSError as error:
        log.warning("How full the home %s is is not known: %s", location.path, error)
        return HomeUsage()


def measure_home(location: HomeLocation) -> HomeUsage:
    """Return the usage of a home. Blocks."""
    try:
        home = Path(os.path.realpath(location.path, strict=True))
        owner = home.stat().st_uid
    except FileNotFoundError:
        return HomeUsage()
    return describe_home_usage(PurePosixPath(home), _read_quotas(owner), _read_space(home), _read_space(location.root))


def _read_space(path: Path) -> DiskSpace:
    stats = os.statvfs(path)
    # Blocks that are reserved for root do not count: the disk is full for users earlier.
    reserved = stats.f_bfree - stats.f_bavail
    return DiskSpace(size=(stats.f_blocks - reserved) * stats.f_frsize, free=stats.f_bavail * stats.f_frsize)


def _read_quotas(uid: int) -> list[DiskQuota]:
    if shutil.which(QUOTA_COMMAND[0]) is None:
        return []
    # Its exit status is 1 when a limit is exceeded, and also when there is none, so only the output counts.
    try:
        done = subprocess.run(
            (*QUOTA_COMMAND, str(uid)), capture_output=True, text=True, check=False, timeout=READ_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise StorageUnavailable("`quota` does not end: a file server does not answer") from error
    return parse_quota(done.stdout)
