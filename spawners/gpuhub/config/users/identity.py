"""Users' identities on files: UID, GID and groups, from accounts of the head node or allocated by gpuhub.

A name at a login provider says nothing about the account of that name on the head node: many providers let anyone
choose a free name. So a user gets an account only if the login proves it (`pam`, `ldap`) or cluster.toml says so.
"""

from __future__ import annotations

import fcntl
import grp
import io
import json
import os
import pwd
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common import names
from gpuhub.common.errors import InvalidRequest, NotAllowed, SetupError
from gpuhub.common.files import replace_file
from gpuhub.config.users.users import UserSettings

#: First UID and GID of ordinary accounts. Those below belong to the system (`docker`, `disk`, `shadow` …), and their
#: rights must not reach into containers.
FIRST_ORDINARY_ID = 1000
#: UIDs and GIDs that distributions and systemd assign to services, and `nobody`, to which file servers map other users.
RESERVED_IDS = range(60_000, 65_536)
#: The group `users`, which some distributions give to ordinary accounts as their primary one. It has no rights.
_USERS_GID = 100
_PASSWD = Path("/etc/passwd")
#: Folder in which the archive of `build_identity_archive` is unpacked.
ARCHIVE_ROOT = "/"
#: Folder that libnss-extrausers in our images reads.
_ARCHIVE_FOLDER = "var/lib/extrausers"
_SHELL = "/bin/bash"
_LAST_UID = 2_000_100_000
_LAST_ORDINARY_ID = 2**31 - 1


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


def find_identity(users: UserSettings, state: Path, name: str, *, sees_home: bool = True) -> UserIdentity:
    """Return the user's identity: that of an account on the head node, or a permanent UID from gpuhub. It may block.

    Args:
        users: The settings, which decide whether the user has an account.
        state: The folder with `uids.json`.
        name: The user's name.
        sees_home: Whether `storage.homes` checks the owner of the home. If it cannot, a user who may have had an
            account under an earlier version is refused, because a different UID would not be noticed.

    Raises:
        InvalidRequest: the name has characters that are not permitted.
        NotAllowed: it is a system account, or there is no account and gpuhub allocates no UIDs, or cluster.toml must
            say whether the user has the account of that name.
    """
    if not re.fullmatch(names.USERNAME_PATTERN, name):
        raise InvalidRequest(
            f"user name {name!r}: a lower-case letter, then at most 31 of a-z, 0-9, '.', '-' and '_' is needed"
        )
    account_name = find_own_account(users, name)
    account = _find_account(account_name) if account_name else None
    if account is not None:
        return _from_account(name, account)
    if account_name and not users.has_own_accounts:
        raise NotAllowed(f"users.accounts gives {name} the account {account_name}, which the head node does not have")
    if users.accounts.get(name) is not False and (other := _find_account(name)) is not None:
        if not is_ordinary_id(other.pw_uid):
            raise NotAllowed(
                f"user {name!r} has the name of a system account of the head node (UID {other.pw_uid}): another name "
                f"is needed, or `{_toml_key(name)} = false` below [users.accounts] in cluster.toml"
            )
        if not sees_home:
            raise NotAllowed(describe_undecided(name, other.pw_uid))
    if users.uid_first is None:
        remedy = f"`adduser {name}` there, or set users.uid_first" if users.has_own_accounts else "set users.uid_first"
        raise NotAllowed(f"user {name!r} has no account on the head node: {remedy} in cluster.toml")
    uid = allocate_uid(state, users.uid_first, name)
    return UserIdentity(name=name, uid=uid, gid=uid, group_names=(name,))


def find_own_account(users: UserSettings, name: str) -> str | None:
    """Return the name of the account that the user has if it exists; None if the user has none. It may block."""
    if users.has_own_accounts:
        return name
    if name in users.accounts:
        return users.accounts[name] or None
    return name if users.directory_accounts and _is_in_directory(name) else None


def describe_undecided(name: str, uid: int) -> str:
    """Return which lines of cluster.toml say whether a user has the head node's account of that name."""
    key = _toml_key(name)
    return (
        f"the head node has an account {name} (UID {uid}), and this login does not prove that the user {name} owns it. "
        f'Only if both are the same person, write `{key} = "{name}"` below [users.accounts] in cluster.toml: the user '
        f"has this UID and the home then, as before. Otherwise write `{key} = false`: the user has a UID of gpuhub's "
        "then, and needs a home that does not belong to the account"
    )


def _toml_key(name: str) -> str:
    return f'"{name}"' if "." in name else name


def is_ordinary_id(number: int) -> bool:
    """Return whether the UID or GID can be that of a person or of a group of persons."""
    return FIRST_ORDINARY_ID <= number <= _LAST_ORDINARY_ID and number not in RESERVED_IDS


def find_ordinary_accounts(users: Iterable[str] | None = None) -> dict[str, int]:
    """Return the UIDs of the head node's ordinary accounts by name. It may block.

    Args:
        users: The names to look up; None for all accounts that the system lists, without those of most directories.
    """
    found = pwd.getpwall() if users is None else [account for name in users if (account := _find_account(name))]
    return {account.pw_name: account.pw_uid for account in found if is_ordinary_id(account.pw_uid)}


def find_known_uids(users: UserSettings, state: Path) -> dict[str, int]:
    """Return the UIDs of all users that are known without a login, by the names that machines know. It may block.

    Members of groups are known if their groups are those of the system, or if gpuhub has chosen their UIDs.
    """
    uids = {name: uid for name, uid in read_uids(state).items() if re.fullmatch(names.USERNAME_PATTERN, name)}
    known = {*users.allowed, *users.admins, *users.accounts, *uids}
    if users.has_own_accounts:
        known |= _find_members((*users.allowed_groups, *users.admin_groups))
    for name in known:
        account = _find_account(find_own_account(users, name) or "")
        if account is not None:
            uids.pop(name, None)
            uids[account.pw_name] = account.pw_uid
    return uids


def _find_members(groups: Sequence[str]) -> set[str]:
    """Return the ordinary accounts that are in one of the system's groups, also as their primary group."""
    members: set[str] = set()
    for name in groups:
        try:
            group = grp.getgrnam(name)
        except KeyError:
            continue  # a group of the LDAP server that the system does not know
        primary = {account.pw_name for account in pwd.getpwall() if account.pw_gid == group.gr_gid}
        members |= find_ordinary_accounts({*group.gr_mem, *primary}).keys()
    return members


def _find_account(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _is_in_directory(name: str) -> bool:
    """Return whether an account comes from a directory: it exists, and /etc/passwd does not have it."""
    lines = _PASSWD.read_text(encoding="utf-8", errors="replace").splitlines()
    return _find_account(name) is not None and not any(line.startswith(f"{name}:") for line in lines)


def _from_account(name: str, account: pwd.struct_passwd) -> UserIdentity:
    uid, gid = account.pw_uid, account.pw_gid
    if not is_ordinary_id(uid):
        raise NotAllowed(
            f"user {name!r} has a system account (UID {uid}): only accounts from {FIRST_ORDINARY_ID} on get a "
            f"notebook, without {RESERVED_IDS.start} to {RESERVED_IDS.stop - 1}, which belong to services"
        )
    if not is_ordinary_id(gid) and gid != _USERS_GID:
        raise NotAllowed(
            f"user {name!r} has a system group ({_group_name(gid)}, GID {gid}) as the primary one: give the account a "
            "group of its own"
        )
    groups = tuple(
        sorted(group for group in os.getgrouplist(account.pw_name, gid) if group != gid and is_ordinary_id(group))
    )
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
    with _locked(state / "uids.lock"):
        known = read_uids(state)
        if name not in known:
            known[name] = choose_uid(known, first, _is_taken)
            _write_uids(_uids_file(state), known)
        return known[name]


def retire_uid(state: Path, name: str) -> None:
    """Take the allocated UID from a user, and keep it in the file, so that no other user gets it."""
    with _locked(state / "uids.lock"):
        known = read_uids(state)
        if name in known:
            uid = known.pop(name)
            known[retired_name(name, uid)] = uid
            _write_uids(_uids_file(state), known)


def retired_name(name: str, uid: int) -> str:
    """Return what a former user's UID and home are called; it can be no user's name."""
    return f"{name}~{uid}"


def _write_uids(file: Path, known: Mapping[str, int]) -> None:
    replace_file(file, json.dumps(known, indent=1, sort_keys=True))


def find_user_name(state: Path, uid: int) -> str | None:
    """Return the name of the user with this UID for messages: the account's, or that of gpuhub's user. It may block."""
    account = find_account_name(uid)
    if account is not None:
        return account
    return next((name for name, allocated in read_uids(state).items() if allocated == uid), None)


def find_account_name(uid: int) -> str | None:
    """Return the name of the head node's account with this UID; None if there is none. It may block."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def read_uids(state: Path) -> dict[str, int]:
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
        if number not in used and number not in RESERVED_IDS and not is_taken(number):
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
