"""Users on files."""

from __future__ import annotations

import grp
import io
import json
import pwd
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from gpuhub.common import names
from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.config.settings import UserSettings
from gpuhub.config.users import identity
from gpuhub.config.users.identity import (
    UserIdentity,
    allocate_uid,
    build_identity_archive,
    choose_uid,
    find_identity,
    find_known_uids,
    find_user_name,
)
from gpuhub.config.users.users import LOGINS_WITH_ACCOUNTS

UID_FIRST = 1_900_000_000
USERS = UserSettings(allowed=("ada",), uid_first=UID_FIRST)
PROVIDERS = ("oidc", "github", "gitlab", "google", "cilogon", "password", "first-use")


def add_accounts(
    monkeypatch: pytest.MonkeyPatch, *accounts: tuple[str, int, int], groups: Mapping[str, list[int]] | None = None
) -> None:
    """Simulate the head node's accounts (name, UID, GID), and no others."""
    entries = [pwd.struct_passwd((name, "x", uid, gid, "", f"/home/{name}", "/bin/sh")) for name, uid, gid in accounts]

    def find(attribute: str) -> Callable[[object], pwd.struct_passwd]:
        def look_up(value: object) -> pwd.struct_passwd:
            for entry in entries:
                if getattr(entry, attribute) == value:
                    return entry
            raise KeyError(value)

        return look_up

    monkeypatch.setattr(identity.pwd, "getpwnam", find("pw_name"))
    monkeypatch.setattr(identity.pwd, "getpwuid", find("pw_uid"))
    monkeypatch.setattr(identity.pwd, "getpwall", lambda: entries)
    monkeypatch.setattr(identity.os, "getgrouplist", lambda name, gid: [gid, *(groups or {}).get(name, [])])


NOBODY_HAS = "gpuhub-nobody-x"


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "1a", "a b", "a\n", "a:b", "ä", "-a", "a" * 33, "a'b", 'a"'])
def test_user_names_with_path_characters_are_refused(tmp_path: Path, name: str) -> None:
    """They never come near a file."""
    with pytest.raises(InvalidRequest):
        find_identity(USERS, tmp_path, name)


def test_system_accounts_get_no_notebook(tmp_path: Path) -> None:
    """Root is a valid name with an account, and refused with every login."""
    for login in ("pam", "ldap", *PROVIDERS):
        users = UserSettings(login=login, allowed=("ada",), uid_first=UID_FIRST)  # type: ignore[arg-type]
        with pytest.raises(NotAllowed, match="system account"):
            find_identity(users, tmp_path, "root")


@pytest.mark.parametrize("named", [None, "ada", False])
@pytest.mark.parametrize("has_account", [True, False])
@pytest.mark.parametrize("login", ["pam", "ldap", *PROVIDERS])
def test_whose_account_a_user_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str, has_account: bool, named: Literal["ada", False] | None
) -> None:
    """A login that proves the account gives it; any other login gives it only if cluster.toml names it."""
    add_accounts(monkeypatch, *[("ada", 1500, 1600)] * has_account, groups={"ada": [1700]})
    accounts = {} if named is None else {"ada": named}
    settings = {"login": login, "allowed": ("ada",), "uid_first": UID_FIRST, "accounts": accounts}
    if login in LOGINS_WITH_ACCOUNTS and named is not None:
        with pytest.raises(ValidationError, match="remove accounts"):
            UserSettings.model_validate(settings)
        return
    users = UserSettings.model_validate(settings)
    if named and not has_account:
        with pytest.raises(NotAllowed, match="gives ada the account ada, which the head node does not have"):
            find_identity(users, tmp_path, "ada")
        return
    found = find_identity(users, tmp_path, "ada")
    if has_account and (named or login in LOGINS_WITH_ACCOUNTS):
        assert (found.uid, found.gid, found.groups) == (1500, 1600, (1700,))
    else:
        assert found == UserIdentity(name="ada", uid=UID_FIRST, gid=UID_FIRST, group_names=("ada",))


@pytest.mark.parametrize("login", PROVIDERS)
def test_unseen_home_of_an_account_needs_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str
) -> None:
    """On a file server no UID changes without a word: the text has the lines that keep it, and that change it."""
    add_accounts(monkeypatch, ("ada.l", 1500, 1500))
    users = UserSettings(login=login, allowed=("ada.l",), uid_first=UID_FIRST)  # type: ignore[arg-type]
    with pytest.raises(NotAllowed) as refusal:
        find_identity(users, tmp_path, "ada.l", sees_home=False)
    assert '`"ada.l" = "ada.l"` below [users.accounts]' in str(refusal.value)
    assert '`"ada.l" = false`' in str(refusal.value)
    assert list(tmp_path.iterdir()) == []
    for account, uid in (("ada.l", 1500), (False, UID_FIRST)):
        decided = users.model_copy(update={"accounts": {"ada.l": account}})
        assert find_identity(decided, tmp_path, "ada.l", sees_home=False).uid == uid


def test_uid_does_not_change_when_an_account_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of a provider keeps the UID that gpuhub gave."""
    users = UserSettings(login="github", allowed=("ada",), uid_first=UID_FIRST)
    add_accounts(monkeypatch)
    before = find_identity(users, tmp_path, "ada")
    add_accounts(monkeypatch, ("ada", 1500, 1500))
    assert find_identity(users, tmp_path, "ada") == before


def test_accounts_may_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home has the user's name, and no two users share an account."""
    add_accounts(monkeypatch, ("lab\\ada", 70_000, 70_000), groups={"lab\\ada": [70_001]})
    users = UserSettings(login="oidc", allowed=("ada",), accounts={"ada_uni.edu": "lab\\ada"})
    found = find_identity(users, tmp_path, "ada_uni.edu")
    assert (found.name, found.uid, found.groups, found.home) == ("ada_uni.edu", 70_000, (70_001,), "/home/ada_uni.edu")
    with pytest.raises(ValidationError, match="each would own the other's files"):
        UserSettings(login="oidc", allowed=("ada",), accounts={"ada": "lab", "ben": "lab"})


def test_accounts_of_a_directory_are_not_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installer's account in /etc/passwd is no user of the provider, also where both share a directory."""
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/sh\nlabadmin:x:1000:1000::/home/labadmin:/bin/sh\n")
    monkeypatch.setattr(identity, "_PASSWD", passwd)
    add_accounts(monkeypatch, ("labadmin", 1000, 1000), ("ada", 70_000, 70_000))
    users = UserSettings(login="oidc", allowed_groups=("lab",), directory_accounts=True, uid_first=UID_FIRST)
    assert find_identity(users, tmp_path, "ada").uid == 70_000
    assert find_identity(users, tmp_path, "labadmin").uid == UID_FIRST
    with pytest.raises(NotAllowed, match="does not prove"):
        find_identity(users, tmp_path, "labadmin", sees_home=False)


@pytest.mark.parametrize("login", ["github", "password", "first-use"])
def test_directory_accounts_need_names_of_the_site(login: str) -> None:
    with pytest.raises(ValidationError, match="any person can have any name"):
        UserSettings(login=login, allowed=("ada",), directory_accounts=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("uid", "gid"),
    [
        *((uid, 1500) for uid in (0, 999, 60_000, 61_184, 65_534, 65_535, 2**32 - 2)),
        *((1500, gid) for gid in (0, 27, 999, 65_534)),
    ],
)
@pytest.mark.parametrize("login", ["pam", "ldap", "github"])
def test_numbers_of_services_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str, uid: int, gid: int
) -> None:
    """Also where cluster.toml names the account."""
    add_accounts(monkeypatch, ("ada", uid, gid))
    accounts = {} if login in LOGINS_WITH_ACCOUNTS else {"ada": "ada"}
    users = UserSettings.model_validate(
        {"login": login, "allowed": ("ada",), "uid_first": UID_FIRST, "accounts": accounts}
    )
    with pytest.raises(NotAllowed, match=r"system (account|group)"):
        find_identity(users, tmp_path, "ada")


def test_the_group_users_is_an_ordinary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some distributions give it to each account as the primary group."""
    add_accounts(monkeypatch, ("ada", 1500, 100))
    assert find_identity(USERS, tmp_path, "ada").gid == 100


def test_user_without_account_gets_a_stable_uid(tmp_path: Path) -> None:
    """The same one each time, another for each user."""
    first = find_identity(USERS, tmp_path, NOBODY_HAS)
    other = find_identity(USERS, tmp_path, "gpuhub-nobody-y")
    assert first.uid == first.gid >= UID_FIRST
    assert find_identity(USERS, tmp_path, NOBODY_HAS) == first
    assert other.uid != first.uid


def test_user_without_account_or_uid_range_is_refused(tmp_path: Path) -> None:
    """The administrator is told what to do."""
    with pytest.raises(NotAllowed, match="adduser"):
        find_identity(UserSettings(allowed=("ada",)), tmp_path, NOBODY_HAS)


def test_system_groups_are_not_passed_to_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Being in the head node's docker or disk group means nothing in a container."""
    account = pwd.struct_passwd(("ada", "x", 1500, 1500, "Ada", "/home/ada", "/bin/sh"))
    monkeypatch.setattr(identity.pwd, "getpwnam", lambda _name: account)
    monkeypatch.setattr(identity.os, "getgrouplist", lambda _name, _gid: [1500, 6, 0, 999, 60_001, 65_534, UID_FIRST])
    found = find_identity(USERS, tmp_path, "ada")
    assert (found.uid, found.gid, found.groups) == (1500, 1500, (UID_FIRST,))


def test_all_supplementary_groups_are_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has no limit of 16; only an NFS server that trusts the request does, as docs/storage.md says."""
    account = pwd.struct_passwd(("ada", "x", 1500, 1500, "Ada", "/home/ada", "/bin/sh"))
    many = [1_900_001_000 + number for number in range(40)]
    monkeypatch.setattr(identity.pwd, "getpwnam", lambda _name: account)
    monkeypatch.setattr(identity.os, "getgrouplist", lambda _name, _gid: [*reversed(many), 1500])
    found = find_identity(USERS, tmp_path, "ada")
    assert found.groups == tuple(many)
    assert len(found.group_names) == 41
    assert found.group_names[1] == "g1900001000"


def test_archive_folders_belong_to_the_user() -> None:
    """A new volume is root's, and nobody in the container could change that."""
    ada = UserIdentity(name="ada", uid=1001, gid=1002, group_names=("ada",))
    with tarfile.open(fileobj=io.BytesIO(build_identity_archive(ada, private_folders=("/scratch",)))) as archive:
        folder = archive.getmember("scratch")
    assert (folder.isdir(), folder.uid, folder.gid, folder.mode) == (True, 1001, 1002, 0o700)


@pytest.mark.parametrize("name", ["ada.lovelace", "a..b", "a.", "a-b_c.d"])
def test_dots_and_dashes_do_not_make_container_names_collide(tmp_path: Path, name: str) -> None:
    """They mean nothing in a path, and two users never share a container's name."""
    found = find_identity(USERS, tmp_path, name)
    assert (found.home, Path(found.home).parent) == (f"/home/{name}", Path("/home"))
    assert names.make_slug(name) != names.make_slug(name.replace(".", "-"))
    assert names.make_slug(name) != name


def test_lowest_free_uid_is_allocated() -> None:
    """Neither a known user's nor a number that an account or group has elsewhere."""
    assert choose_uid({"a": 10, "b": 12}, 10, lambda number: number == 11) == 13
    assert choose_uid({"a": 59_999}, 59_999, lambda _: False) == 65_536, "those between belong to services"


def test_known_uids_are_those_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that gpuhub chose, of accounts that the settings name, and of members of the system's groups."""
    add_accounts(monkeypatch, ("ada", 1500, 1500), ("ben", 1501, 1700), ("cyd", 1502, 1502), ("labadmin", 1000, 1000))
    lab = grp.struct_group(("lab", "x", 1700, ["cyd", "gone"]))
    monkeypatch.setattr(identity.grp, "getgrnam", lambda name: {"lab": lab}[name])
    (tmp_path / "uids.json").write_text(json.dumps({"labadmin": UID_FIRST, "dan": UID_FIRST + 1}))
    pam = UserSettings(login="pam", allowed=("ada",), allowed_groups=("lab", "of-the-server"))
    chosen = {"dan": UID_FIRST + 1}
    assert find_known_uids(pam, tmp_path) == {"ada": 1500, "ben": 1501, "cyd": 1502, "labadmin": 1000, **chosen}
    github = UserSettings(login="github", allowed=("ada",), allowed_groups=("lab",), accounts={"cyd-x": "cyd"})
    assert find_known_uids(github, tmp_path) == {"cyd": 1502, "labadmin": UID_FIRST, **chosen}


def test_uid_file_is_replaced_atomically(tmp_path: Path) -> None:
    """No half-written file stays behind."""
    allocate_uid(tmp_path, UID_FIRST, "ada")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["uids.json", "uids.lock"]


def test_user_name_is_found_by_uid(tmp_path: Path) -> None:
    """An account's on the head node, or one that gpuhub has given."""
    assert find_user_name(tmp_path, UID_FIRST) is None
    number = allocate_uid(tmp_path, UID_FIRST, "ada")
    assert find_user_name(tmp_path, number) == "ada"
    assert find_user_name(tmp_path, 0) == "root"


def test_the_archive_names_user_and_groups() -> None:
    """Two files for libnss-extrausers, owned by root."""
    ada = UserIdentity(name="ada", uid=1001, gid=1001, groups=(2000,), group_names=("ada", "lab"))
    with tarfile.open(fileobj=io.BytesIO(build_identity_archive(ada))) as archive:
        texts = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            texts[member.name] = file.read().decode()
            assert (member.uid, member.mode) == (0, 0o644)
    assert texts == {
        "var/lib/extrausers/passwd": "ada:x:1001:1001:ada:/home/ada:/bin/bash\n",
        "var/lib/extrausers/group": "ada:x:1001:\nlab:x:2000:ada\n",
    }
