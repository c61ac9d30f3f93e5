"""Users on files."""

from __future__ import annotations

import io
import os
import pwd
import tarfile
from pathlib import Path

import pytest

from gpuhub import identity
from gpuhub.errors import InvalidRequest, NotAllowed, SetupError
from gpuhub.identity import Identity, allocate_uid, build_archive, choose_uid, ensure_home, find_identity
from gpuhub.settings import Storage, Users

UID_FIRST = 1_900_000_000
USERS = Users(allowed=("ada",), uid_first=UID_FIRST)
NOBODY_HAS = "gpuhub-nobody-x"


def me(name: str = "ada") -> Identity:
    return Identity(name=name, uid=os.getuid(), gid=os.getgid(), group_names=(name,))


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "1a", "a b", "a\n", "a:b", "ä", "-a", "a" * 33, "a'b", 'a"'])
def test_names_that_could_mean_something_in_a_path_are_refused(tmp_path: Path, name: str) -> None:
    """They never come near a file."""
    with pytest.raises(InvalidRequest):
        find_identity(USERS, tmp_path, name)


def test_system_accounts_get_no_notebook(tmp_path: Path) -> None:
    """Root is a valid name with an account, and refused."""
    with pytest.raises(NotAllowed, match="system account"):
        find_identity(USERS, tmp_path, "root")


def test_without_an_account_a_lasting_uid_is_given(tmp_path: Path) -> None:
    """The same one each time, another for each user."""
    first = find_identity(USERS, tmp_path, NOBODY_HAS)
    other = find_identity(USERS, tmp_path, "gpuhub-nobody-y")
    assert first.uid == first.gid >= UID_FIRST
    assert find_identity(USERS, tmp_path, NOBODY_HAS) == first
    assert other.uid != first.uid


def test_without_an_account_and_without_uids_the_user_is_refused(tmp_path: Path) -> None:
    """The administrator is told what to do."""
    with pytest.raises(NotAllowed, match="adduser"):
        find_identity(Users(allowed=("ada",)), tmp_path, NOBODY_HAS)


def test_groups_of_the_system_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Being in the head node's docker or disk group means nothing in a container."""
    account = pwd.struct_passwd(("ada", "x", 1500, 1500, "Ada", "/home/ada", "/bin/sh"))
    monkeypatch.setattr(identity.pwd, "getpwnam", lambda _name: account)
    monkeypatch.setattr(identity.os, "getgrouplist", lambda _name, _gid: [1500, 6, 0, 999, UID_FIRST])
    found = find_identity(USERS, tmp_path, "ada")
    assert (found.uid, found.gid, found.groups) == (1500, 1500, (UID_FIRST,))


def test_the_least_free_number_is_chosen() -> None:
    """Neither a known user's nor a number that an account or group has elsewhere."""
    assert choose_uid({"a": 10, "b": 12}, 10, lambda number: number == 11) == 13


def test_uids_survive_in_a_file_that_is_replaced_whole(tmp_path: Path) -> None:
    """No half-written file stays behind."""
    allocate_uid(tmp_path, UID_FIRST, "ada")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["uids.json", "uids.lock"]


def test_the_archive_names_user_and_groups() -> None:
    """Two files for libnss-extrausers, owned by root."""
    ada = Identity(name="ada", uid=1001, gid=1001, groups=(2000,), group_names=("ada", "lab"))
    with tarfile.open(fileobj=io.BytesIO(build_archive(ada))) as archive:
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


def test_a_missing_home_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """Mode 0700 whatever the umask, and folders on the way readable; a second call changes nothing."""
    storage = Storage(home=f"{tmp_path}/homes/{{username}}")
    before = os.umask(0o077)
    try:
        ensure_home(storage, me())
        ensure_home(storage, me())
    finally:
        os.umask(before)
    home = tmp_path / "homes" / "ada"
    assert home.stat().st_mode & 0o777 == 0o700
    assert home.parent.stat().st_mode & 0o777 == 0o755


def test_a_home_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """A symbolic link out of the folder of homes could give a user any folder."""
    (tmp_path / "homes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "homes" / "ada").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="outside"):
        ensure_home(Storage(home=f"{tmp_path}/homes/{{username}}"), me())


def test_a_home_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """A wrong UID is told, not mended: chown is the administrator's decision."""
    (tmp_path / "ada").mkdir()
    stranger = Identity(name="ada", uid=os.getuid() + 1, gid=5000, group_names=("ada",))
    with pytest.raises(SetupError, match="belongs to UID"):
        ensure_home(Storage(home=f"{tmp_path}/{{username}}"), stranger)


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Docker would mount it all the same."""
    (tmp_path / "ada").write_text("x")
    with pytest.raises(SetupError, match="no folder"):
        ensure_home(Storage(home=f"{tmp_path}/{{username}}"), me())


def test_homes_elsewhere_are_left_to_the_server(tmp_path: Path) -> None:
    """Without home_create the NFS server's homes exist already."""
    ensure_home(Storage(home="nfs://nas/home/{username}"), me())
    assert list(tmp_path.iterdir()) == []
