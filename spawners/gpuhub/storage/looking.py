"""Asks how full a user's home is, where the head node sees it; whatever hangs is given up soon."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

from gpuhub.errors import StorageUnavailable
from gpuhub.settings import Storage
from gpuhub.storage.homes import HomePlace, place_of
from gpuhub.storage.preparing import PATIENCE
from gpuhub.storage.quotas import QUOTA_COMMAND, HomeUse, Quota, Space, describe_home, parse_quota

log = logging.getLogger(__name__)

#: A page does not wait longer for this, seconds.
LOOK_S = 2.0
_SILENT = HomeUse(warning="The disk with your home does not answer at present: a start may fail.")


async def look_at_home(storage: Storage, name: str) -> HomeUse:
    """What to tell the owner of a home; nothing where the head node does not see it, or it does not exist yet."""
    place = place_of(storage, name)
    if place is None:
        return HomeUse()
    try:
        # Apart from starts, which wait longer before they take the place for stuck.
        return await PATIENCE.run(
            f"use of {place.root}", lambda: read_use(place), limit_s=LOOK_S, silent=f"{place.root} does not answer"
        )
    except StorageUnavailable as error:
        log.warning("How full homes are is not known: %s", error)
        return _SILENT
    except OSError as error:
        log.warning("How full the home %s is is not known: %s", place.path, error)
        return HomeUse()


def read_use(place: HomePlace) -> HomeUse:
    """The same for one place; blocks."""
    try:
        home = Path(os.path.realpath(place.path, strict=True))
        owner = home.stat().st_uid
    except FileNotFoundError:
        return HomeUse()
    return describe_home(PurePosixPath(home), _read_quotas(owner), _read_space(home), _read_space(place.root))


def _read_space(path: Path) -> Space:
    found = os.statvfs(path)
    # Blocks kept for root are nobody's: a disk is full for users before.
    reserved = found.f_bfree - found.f_bavail
    return Space(size=(found.f_blocks - reserved) * found.f_frsize, free=found.f_bavail * found.f_frsize)


def _read_quotas(uid: int) -> list[Quota]:
    if shutil.which(QUOTA_COMMAND[0]) is None:
        return []
    # It ends with 1 where a limit is exceeded, and also where there is none: what counts is what it writes.
    try:
        done = subprocess.run((*QUOTA_COMMAND, str(uid)), capture_output=True, text=True, check=False, timeout=LOOK_S)
    except subprocess.TimeoutExpired as error:
        raise StorageUnavailable("`quota` does not end: a file server does not answer") from error
    return parse_quota(done.stdout)
