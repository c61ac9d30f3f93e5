"""Users on files."""

from __future__ import annotations

import io
import pwd
import tarfile
from pathlib import Path

import pytest

from gpuhub.common import names
from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.config import identity
from gpuhub.config.identity import (
    UserIdentity,
    allocate_uid,
    build_identity_archive,
    choose_uid,
    find_identity,
    find_user_name,
)
from gpuhub.config.settings import UserSettings

UID_FIRST = 1_900_000_000
USERS = UserSettings(allowed=("ada",), uid_first=UID_FIRST)
NOBODY_HAS = "gpuhub-nobody-x"


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "1a", "a b", "a\n", "a:b", "ä", "-a", "a" * 33, "a'b", 'a"'])
def test_user_names_with_path_characters_are_refused(tmp_path: Path, name: str) -> None:
    """They never come near a file."""
    with pytest.raises(InvalidRequest):
        find_identity(USERS, tmp_path, name)


def test_system_accounts_get_no_notebook(tmp_path: Path) -> None:
    """Root is a valid name with an account, and refused."""
    with pytest.raises(NotAllowed, match="system account"):
        find_identity(USERS, tmp_path, "root")


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
    monkeypatch.setattr(identity.os, "getgrouplist", lambda _name, _gid: [1500, 6, 0, 999, UID_FIRST])
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
