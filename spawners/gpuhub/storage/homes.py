"""Homes where the head node sees them: made for their users alone, and never through a symbolic link.

Everything here blocks, and may hang where a file server does: it is run by `Patience`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpuhub.errors import SetupError, StorageUnavailable
from gpuhub.identity import Identity
from gpuhub.settings import Storage

_READABLE = 0o755
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Enough to look at a folder that the head node may not read: an export with root_squash gives it no more.
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: Longer than it takes from making a folder to giving it away, seconds.
_BEING_GIVEN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HomePlace:
    """A user's home as the head node sees it."""

    path: Path
    #: The folder of homes, under which it must lie.
    root: Path


def place_of(storage: Storage, name: str) -> HomePlace | None:
    """Where the head node sees a user's home; None where it does not."""
    place = storage.home_create or (None if storage.home.startswith("nfs://") else storage.home)
    if place is None:
        return None
    root = os.path.dirname(place.split("{username}", 1)[0])  # noqa: PTH120 - "/home/" must give "/home"
    return HomePlace(path=Path(place.replace("{username}", name)), root=Path(root))


def ensure_home(storage: Storage, identity: Identity) -> None:
    """Make the user's home where the head node keeps homes: theirs, 0700; one that exists is only checked.

    Raises:
        SetupError: the path leads out of the folder of homes, is no folder, belongs to somebody else, or the head node
            may not make it.
        StorageUnavailable: the file system does not work at present.
    """
    place = place_of(storage, identity.name)
    if place is None:
        return
    with _explained(place.path):
        real_root, real = Path(os.path.realpath(place.root)), Path(os.path.realpath(place.path))
        if real_root not in real.parents:
            raise SetupError(
                f"the home {place.path} of {identity.name} leads to {real}, outside {place.root}: "
                "remove the symbolic link"
            )
        _make_folders(real_root)
        with _opened(real_root, _FOLDER) as folder:
            _ensure_below(folder, real.relative_to(real_root).parts, place.path, identity)


def _make_folders(path: Path) -> None:
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            folder.chmod(_READABLE)  # whatever the umask


def _ensure_below(folder: int, parts: tuple[str, ...], path: Path, identity: Identity) -> None:
    """The folders `parts` below an open one, the last of which is the home. No name is followed where it leads
    elsewhere by now: links were resolved before.
    """
    name, *rest = parts
    if rest:
        with suppress(FileExistsError):
            os.mkdir(name, _READABLE, dir_fd=folder)
            os.chmod(name, _READABLE, dir_fd=folder)  # whatever the umask; folders on the way stay root's
        with _opened(name, _FOLDER, folder) as inner:
            _ensure_below(inner, tuple(rest), path, identity)
        return
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
        _give(folder, name, path, identity)
    with _opened(name, _LOOK, folder) as home:
        _check(_look(home, identity), path, identity)


def _look(home: int, identity: Identity) -> os.stat_result:
    """The home; one that another start of the same user is making at this moment is waited for."""
    end = time.monotonic() + _BEING_GIVEN_S
    while True:
        found = os.fstat(home)
        is_being_made = found.st_uid == os.geteuid() != identity.uid and found.st_mode & 0o777 == 0o700
        if not is_being_made or time.monotonic() > end:
            return found
        time.sleep(0.01)


def _give(folder: int, name: str, path: Path, identity: Identity) -> None:
    """Give a folder that was made just now to its user; where that is not allowed, nothing stays."""
    try:
        with _opened(name, _FOLDER, folder) as home:
            os.fchown(home, identity.uid, identity.gid)
            os.fchmod(home, 0o700)
    except PermissionError:
        with suppress(OSError):
            os.rmdir(name, dir_fd=folder)
        raise SetupError(
            f"the home {path} cannot be given to {identity.name} (UID {identity.uid}): the head node's root is nobody "
            "there. home_create must lie on the file server itself, or in an export with no_root_squash for the head "
            "node; or leave home_create out, and make homes on the server"
        ) from None


def _check(found: os.stat_result, path: Path, identity: Identity) -> None:
    kind = found.st_mode & 0o170000
    if kind == 0o120000:
        raise SetupError(f"the home {path} became a symbolic link while it was looked at: it is not used")
    if kind != 0o040000:
        raise SetupError(f"the home {path} of {identity.name} is no folder")
    if found.st_uid != identity.uid:
        raise SetupError(
            f"the home {path} belongs to UID {found.st_uid}, not to {identity.name} (UID {identity.uid}): "
            f"`chown -R {identity.uid}:{identity.gid} {path}`, or give {identity.name} that UID"
        )


@contextmanager
def _opened(name: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    opened = os.open(name, flags, dir_fd=folder)
    try:
        yield opened
    finally:
        os.close(opened)


#: What the file system says, and what that means for the person who reads it.
_STATES = {
    errno.ESTALE: "the file server has another file system there than before (stale file handle): mount it anew on the "
    "head node; nothing was changed",
    errno.EIO: "the disk or the file server fails (input/output error)",
    errno.ETIMEDOUT: "the file server does not answer",
    errno.EHOSTDOWN: "the file server does not answer",
    errno.EHOSTUNREACH: "the file server cannot be reached",
    errno.ENOTCONN: "what is mounted there has ended: mount it anew on the head node",
    errno.ENOSPC: "its file system is full",
    errno.EDQUOT: "its quota is used up",
    errno.EROFS: "its file system is read-only",
}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the file system as what a user may read."""
    try:
        yield
    except PermissionError as error:
        raise SetupError(
            f"the home {path} cannot be made or looked at: the head node's root may not ({error.strerror}). Where it "
            "is an NFS mount, the export needs no_root_squash for the head node, or home_create is left out"
        ) from error
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise SetupError(f"on the way to the home {path} something is no folder, or a symbolic link") from error
        why = _STATES.get(error.errno or 0, error.strerror or str(error))
        raise StorageUnavailable(f"the home {path} cannot be used at present: {why}") from error
