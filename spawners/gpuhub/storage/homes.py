"""Users' homes and identities, prepared before a container is created.

The head node creates homes where it sees them, for their users alone, and never through a symbolic link. These calls
block, and hang if a file server does. So `prepare_user` runs them on separate threads, and each step ends after
`storage.patience` seconds. `docker.containers.mounts` mounts the homes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhub.common.errors import SetupError, StorageUnavailable
from gpuhub.config.settings import StorageSettings, UserSettings
from gpuhub.config.users.identity import (
    UserIdentity,
    describe_undecided,
    find_identity,
    find_ordinary_accounts,
    retired_name,
)
from gpuhub.storage.blocking_calls import BlockingCallPool
from gpuhub.storage.probe import NfsProber, find_servers

#: Shared by the whole process, because a target that hangs does so for all users.
BLOCKING_CALLS = BlockingCallPool()
PROBER = NfsProber(BLOCKING_CALLS)
_ACCOUNTS_TARGET = "accounts"
_FOLDER_MODE = 0o755
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Sufficient to inspect a folder that the head node may not read, as in an export with root_squash.
_PATH_ONLY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: Longer than a start takes between creating a folder and changing its owner, seconds.
_CHOWN_WAIT_S = 1.0


async def resolve_identity(users: UserSettings, storage: StorageSettings, state: Path, name: str) -> UserIdentity:
    """Return a user's identity.

    Raises:
        StorageUnavailable: The accounts do not answer within `storage.patience`.
        InvalidRequest, NotAllowed, SetupError: As for `find_identity`.
    """
    return await BLOCKING_CALLS.run(
        _ACCOUNTS_TARGET,
        lambda: find_identity(users, state, name, sees_home=find_home(storage, name) is not None),
        limit_s=storage.patience,
        timeout_message="The head node's accounts (files, LDAP) do not answer",
    )


async def prepare_user(
    users: UserSettings, storage: StorageSettings, state: Path, name: str, *, datasets: bool = True
) -> UserIdentity:
    """Return the user's identity once the home exists and its file server answers.

    Args:
        datasets: Whether the file servers of datasets and models must answer as well.

    Raises:
        StorageUnavailable: A server or folder does not answer within `storage.patience`; the text names it.
        InvalidRequest, NotAllowed, SetupError: As for `find_identity` and `ensure_home`.
    """
    sources = (storage.home, *storage.list_read_only()) if datasets else (storage.home,)
    servers = find_servers(sources, storage.nfs_options)
    waits: list[Awaitable[Any]] = [
        resolve_identity(users, storage, state, name),
        *(PROBER.ensure_answers(server, storage.patience) for server in servers),
    ]
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        identity: UserIdentity
        identity, *_ = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    # Only once the servers have answered, because a home on one of them would hang.
    location = find_home(storage, name)
    if location is not None:
        await BLOCKING_CALLS.run(
            str(location.root),
            lambda: ensure_home(storage, identity),
            limit_s=storage.patience,
            timeout_message=f"The folder of homes {location.root} on the head node does not answer",
        )
    return identity


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeLocation:
    """Path of a user's home on the head node."""

    path: Path
    #: The folder of homes, in which it must lie.
    root: Path


def find_home(storage: StorageSettings, name: str) -> HomeLocation | None:
    """Return where the head node sees a user's home, or None if it does not."""
    path = storage.home_create or (None if storage.home.startswith("nfs://") else storage.home)
    if path is None:
        return None
    root = os.path.dirname(path.split("{username}", 1)[0])  # noqa: PTH120 - "/home/" must give "/home"
    return HomeLocation(path=Path(path.replace("{username}", name)), root=Path(root))


def ensure_home(storage: StorageSettings, identity: UserIdentity) -> None:
    """Create the user's home with mode 0700 if the head node sees homes; an existing one is only checked.

    Raises:
        SetupError: The path leads out of the folder of homes, is not a folder, belongs to another user, or the head
            node may not create it.
        StorageUnavailable: The file system does not work.
    """
    location = find_home(storage, identity.name)
    if location is None:
        return
    with _translate_errors(location.path):
        real_root, real = Path(os.path.realpath(location.root)), Path(os.path.realpath(location.path))
        if real_root not in real.parents:
            raise SetupError(
                f"the home {location.path} of {identity.name} leads to {real}, outside {location.root}: "
                "remove the symbolic link"
            )
        _make_folders(real_root)
        with _open(real_root, _OPEN_FOLDER) as folder:
            _ensure_below(folder, real.relative_to(real_root).parts, location.path, identity)


def move_home_aside(storage: StorageSettings, name: str, uid: int) -> Path | None:
    """Rename a former user's home, which keeps its owner, and return its new path; None where there is none.

    Raises:
        SetupError: The head node does not see homes, or the home is not a folder of this UID.
    """
    location = find_home(storage, name)
    if location is None:
        raise SetupError(
            f"the head node does not see the home {storage.format_home(name)}: move it aside on the "
            "file server, then call the command with --home-moved"
        )
    try:
        status = os.lstat(location.path)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid:
        raise SetupError(f"{location.path} is not a folder that belongs to UID {uid}: move it aside, or remove it")
    aside = location.path.with_name(retired_name(location.path.name, uid))
    if aside.exists():
        raise SetupError(f"{aside} exists already: move it away first")
    location.path.rename(aside)
    return aside


def _make_folders(path: Path) -> None:
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            folder.chmod(_FOLDER_MODE)  # whatever the umask


def _ensure_below(folder: int, parts: tuple[str, ...], path: Path, identity: UserIdentity) -> None:
    """Create the folders `parts` below an open folder; the last one is the home.

    Links were resolved before, and none is followed here, in case a name was replaced by one in the meantime.
    """
    name, *rest = parts
    if rest:
        with suppress(FileExistsError):
            os.mkdir(name, _FOLDER_MODE, dir_fd=folder)
            os.chmod(name, _FOLDER_MODE, dir_fd=folder)  # whatever the umask; folders on the way stay root's
        with _open(name, _OPEN_FOLDER, folder) as inner:
            _ensure_below(inner, tuple(rest), path, identity)
        return
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
        _give_to_user(folder, name, path, identity)
    with _open(name, _PATH_ONLY, folder) as home:
        _check_home(_wait_for_owner(home, identity), path, identity)


def _wait_for_owner(home: int, identity: UserIdentity) -> os.stat_result:
    """Return the home's state, after waiting for another start of the same user that is creating it."""
    end = time.monotonic() + _CHOWN_WAIT_S
    while True:
        status = os.fstat(home)
        is_being_made = status.st_uid == os.geteuid() != identity.uid and status.st_mode & 0o777 == 0o700
        if not is_being_made or time.monotonic() > end:
            return status
        time.sleep(0.01)


def _give_to_user(folder: int, name: str, path: Path, identity: UserIdentity) -> None:
    """Change the owner of a new folder to its user; remove the folder if that is not allowed."""
    try:
        with _open(name, _OPEN_FOLDER, folder) as home:
            os.fchown(home, identity.uid, identity.gid)
            os.fchmod(home, 0o700)
    except PermissionError:
        with suppress(OSError):
            os.rmdir(name, dir_fd=folder)
        raise SetupError(
            f"the home {path} cannot be given to {identity.name} (UID {identity.uid}): the file server treats the head "
            "node's root as nobody. home_create must lie on the file server itself, or in an export with "
            "no_root_squash for the head node; or omit home_create, and create homes on the server"
        ) from None


def _check_home(status: os.stat_result, path: Path, identity: UserIdentity) -> None:
    kind = status.st_mode & 0o170000
    if kind == 0o120000:
        raise SetupError(f"the home {path} became a symbolic link while it was checked: it is not used")
    if kind != 0o040000:
        raise SetupError(f"the home {path} of {identity.name} is not a folder")
    if status.st_uid != identity.uid:
        # Never advise to give an account's home to a user who has only its name.
        if status.st_uid == find_ordinary_accounts([identity.name]).get(identity.name):
            raise SetupError(
                f"the home {path} belongs to the head node's account {identity.name}, and not to the user "
                f"{identity.name} of this login: {describe_undecided(identity.name, status.st_uid)}"
            )
        raise SetupError(
            f"the home {path} belongs to UID {status.st_uid}, not to {identity.name} (UID {identity.uid}): "
            f"`chown -R {identity.uid}:{identity.gid} {path}`, or give {identity.name} that UID"
        )


@contextmanager
def _open(name: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    opened = os.open(name, flags, dir_fd=folder)
    try:
        yield opened
    finally:
        os.close(opened)


#: Texts for users, by error number of the file system.
_ERROR_TEXTS = {
    errno.ESTALE: "the file server has another file system there than before (stale file handle): mount it again on "
    "the head node; nothing was changed",
    errno.EIO: "the disk or the file server fails (input/output error)",
    errno.ETIMEDOUT: "the file server does not answer",
    errno.EHOSTDOWN: "the file server does not answer",
    errno.EHOSTUNREACH: "the file server cannot be reached",
    errno.ENOTCONN: "its file system is disconnected: mount it again on the head node",
    errno.ENOSPC: "its file system is full",
    errno.EDQUOT: "its quota is used up",
    errno.EROFS: "its file system is read-only",
}


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Raise errors of the file system as errors with texts for users."""
    try:
        yield
    except PermissionError as error:
        raise SetupError(
            f"the home {path} cannot be created or checked: the head node's root may not ({error.strerror}). If it is "
            "an NFS mount, the export needs no_root_squash for the head node, or omit home_create"
        ) from error
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise SetupError(f"a part of the path to the home {path} is not a folder, or is a symbolic link") from error
        why = _ERROR_TEXTS.get(error.errno or 0, error.strerror or str(error))
        raise StorageUnavailable(f"the home {path} cannot be used: {why}") from error
