"""Users' identities on files: UID, GID and groups, from accounts of the head node or allocated by gpuhub."""

from __future__ import annotations

import fcntl
import grp
import io
import json
import os
import pwd
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common import names
from gpuhub.common.errors import InvalidRequest, NotAllowed, SetupError
from gpuhub.config.users import UserSettings

#: First UID and GID of ordinary accounts. Those below belong to the system (`docker`, `disk`, `shadow` …), and their
#: rights must not reach into containers.
FIRST_ORDINARY_ID = 1000
#: Folder in which the archive of `build_identity_archive` is unpacked.
ARCHIVE_ROOT = "/"
#: Folder that libnss-extrausers in our images reads.
_ARCHIVE_FOLDER = "var/lib/extrausers"
_SHELL = "/bin/bash"
_LAST_UID = 2_000_100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UserIdentity:
    """UID, GID and groups with which a user's containers run."""

    name: str
    uid: int
    gid: int
    #: Supplementary groups, by GID, without `gid`.
    groups: tuple[int, ...] = ()
    #: Names of `gid` and of `groups`, in that order.
    group_names: tuple[str, ...]

    @property
    def home(self) -> str:
        """The home folder inside of every container."""
        return f"/home/{self.name}"


def find_identity(users: UserSettings, state: Path, name: str) -> UserIdentity:
    """Return the user's identity: that of the account on the head node, or a permanent UID from gpuhub. It may block.

    Raises:
        InvalidRequest: the name has characters that are not permitted.
        NotAllowed: it is a system account, or there is no account and gpuhub allocates no UIDs.
    """
    if not re.fullmatch(names.USERNAME_PATTERN, name):
        raise InvalidRequest(
            f"user name {name!r}: a lower-case letter, then at most 31 of a-z, 0-9, '.', '-' and '_' is needed"
        )
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        if users.uid_first is None:
            raise NotAllowed(
                f"user {name!r} has no account on the head node: `adduser {name}` there, "
                "or set users.uid_first in cluster.toml"
            ) from None
        uid = allocate_uid(state, users.uid_first, name)
        return UserIdentity(name=name, uid=uid, gid=uid, group_names=(name,))
    return _from_account(account)


def _from_account(account: pwd.struct_passwd) -> UserIdentity:
    name, uid, gid = account.pw_name, account.pw_uid, account.pw_gid
    if uid < FIRST_ORDINARY_ID:
        raise NotAllowed(
            f"user {name!r} is a system account (UID {uid}): only accounts from {FIRST_ORDINARY_ID} on get a notebook"
        )
    if gid == 0:
        raise NotAllowed(f"user {name!r} has root's group as the primary one: give the account a group of its own")
    groups = tuple(sorted(group for group in os.getgrouplist(name, gid) if group != gid and group >= FIRST_ORDINARY_ID))
    return UserIdentity(
        name=name, uid=uid, gid=gid, groups=groups, group_names=tuple(_group_name(g) for g in (gid, *groups))
    )


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"g{gid}"


def allocate_uid(state: Path, first: int, name: str) -> int:
    """Return the UID of `name` in `uids.json`; the first call chooses the lowest free one from `first` on."""
    file = _uids_file(state)
    with _locked(state / "uids.lock"):
        known = _read_uids(state)
        if name not in known:
            known[name] = choose_uid(known, first, _is_taken)
            temporary = file.with_suffix(".new")
            with temporary.open("w", encoding="utf-8") as out:
                json.dump(known, out, indent=1, sort_keys=True)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
        return known[name]


def find_user_name(state: Path, uid: int) -> str | None:
    """Return the name of the user with this UID, by account or as allocated by gpuhub, else None. It may block."""
    account = find_account_name(uid)
    if account is not None:
        return account
    return next((name for name, allocated in _read_uids(state).items() if allocated == uid), None)


def find_account_name(uid: int) -> str | None:
    """Return the name of the head node's account with this UID; None if there is none. It may block."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _read_uids(state: Path) -> dict[str, int]:
    """Return the UIDs that gpuhub has allocated, by user name."""
    file = _uids_file(state)
    known: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return known


def _uids_file(state: Path) -> Path:
    return state / "uids.json"


def choose_uid(known: Mapping[str, int], first: int, is_taken: Callable[[int], bool]) -> int:
    """Return the lowest UID from `first` on that is neither in `known` nor taken by an account or group elsewhere."""
    used = set(known.values())
    for number in range(first, _LAST_UID):
        if number not in used and not is_taken(number):
            return number
    raise SetupError(f"no UID is free from {first} on")


def _is_taken(number: int) -> bool:
    for look_up in (pwd.getpwuid, grp.getgrgid):
        try:
            look_up(number)
        except KeyError:
            continue
        return True
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file, since hub and broker may allocate at the same time, from two processes."""
    with path.open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_identity_archive(identity: UserIdentity, *, private_folders: Sequence[str] = ()) -> bytes:
    """Return a tar with passwd and group entries, for `put_archive` at `ARCHIVE_ROOT`.

    Args:
        identity: the user to add.
        private_folders: folders, such as `/scratch`, that will belong to the user with mode 0700.
    """
    passwd = f"{identity.name}:x:{identity.uid}:{identity.gid}:{identity.name}:{identity.home}:{_SHELL}\n"
    group = f"{identity.group_names[0]}:x:{identity.gid}:\n" + "".join(
        f"{name}:x:{gid}:{identity.name}\n" for name, gid in zip(identity.group_names[1:], identity.groups, strict=True)
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file, text in (("passwd", passwd), ("group", group)):
            content = text.encode()
            entry = tarfile.TarInfo(f"{_ARCHIVE_FOLDER}/{file}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
        for folder in private_folders:
            entry = tarfile.TarInfo(folder.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            entry.uid, entry.gid = identity.uid, identity.gid
            archive.addfile(entry)
    return buffer.getvalue()
