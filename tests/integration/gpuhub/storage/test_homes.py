"""Homes on file systems that the head node can access."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError, StorageUnavailable
from gpuhub.config.settings import StorageSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.storage import homes
from gpuhub.storage.homes import ensure_home, find_home


def current_user(name: str = "ada") -> UserIdentity:
    return UserIdentity(name=name, uid=os.getuid(), gid=os.getgid(), group_names=(name,))


def storage(folder: Path) -> StorageSettings:
    return StorageSettings(home=f"{folder}/homes/{{username}}")


def build_failing_mkdir(number: int) -> object:
    def call(*_arguments: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_missing_home_is_created_for_its_user_only(tmp_path: Path) -> None:
    """The mode is 0700 whatever the umask is, parent folders are readable, and a second call changes nothing."""
    before = os.umask(0o077)
    try:
        ensure_home(storage(tmp_path), current_user())
        ensure_home(storage(tmp_path), current_user())
    finally:
        os.umask(before)
    home = tmp_path / "homes" / "ada"
    assert home.stat().st_mode & 0o7777 == 0o700
    assert (home.stat().st_uid, home.stat().st_gid) == (os.getuid(), os.getgid())
    assert home.parent.stat().st_mode & 0o777 == 0o755


def test_a_home_may_lie_in_a_folder_of_the_user(tmp_path: Path) -> None:
    """Only the home itself belongs to the user."""
    ensure_home(StorageSettings(home=f"{tmp_path}/homes/{{username}}/gpuhub"), current_user())
    modes = [(tmp_path / "homes" / part).stat().st_mode & 0o777 for part in ("ada", "ada/gpuhub")]
    assert modes == [0o755, 0o700]


def test_path_of_homes_on_the_head_node() -> None:
    """The home is that of `home_create`, or of `home` if it is a path."""
    both = StorageSettings(home="nfs://nas/home/{username}", home_create="/export/home/{username}/")
    assert find_home(both, "ada") == homes.HomeLocation(path=Path("/export/home/ada"), root=Path("/export/home"))
    assert find_home(StorageSettings(home="/home/{username}"), "ada") == homes.HomeLocation(
        path=Path("/home/ada"), root=Path("/home")
    )
    assert find_home(StorageSettings(home="nfs://nas/home/{username}"), "ada") is None


def test_home_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    """A symbolic link out of the folder of homes could give a user any folder."""
    (tmp_path / "homes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "homes" / "ada").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="outside"):
        ensure_home(storage(tmp_path), current_user())


def test_folder_of_homes_may_be_a_symlink(tmp_path: Path) -> None:
    """An administrator may link `/home` to another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "homes").symlink_to(tmp_path / "disk")
    ensure_home(storage(tmp_path), current_user())
    assert (tmp_path / "disk" / "ada").is_dir()


@pytest.mark.parametrize("template", ["{username}", "{username}/gpuhub"])
def test_symlink_race_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """Replacing a folder by a link after the check has no effect: nothing is created or changed elsewhere."""
    (tmp_path / "homes").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o711)
    (tmp_path / "homes" / "ada").symlink_to(elsewhere)
    monkeypatch.setattr(homes.os.path, "realpath", os.fspath)  # as if it had not existed at that time
    with pytest.raises(SetupError, match="symbolic link"):
        ensure_home(StorageSettings(home=f"{tmp_path}/homes/{template}"), current_user())
    assert list(elsewhere.iterdir()) == []
    assert elsewhere.stat().st_mode & 0o777 == 0o711


def test_two_starts_at_once_make_one_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start finds a folder that does not belong to its user yet, and waits for the first."""
    ada = UserIdentity(name="ada", uid=os.getuid() + 20000, gid=os.getgid(), group_names=("ada",))
    home = tmp_path / "homes" / "ada"
    home.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(homes, "_CHOWN_WAIT_S", 30.0)
    giving = threading.Timer(0.2, os.chown, (home, ada.uid, ada.gid))
    giving.start()
    ensure_home(storage(tmp_path), ada)
    giving.join()
    assert home.stat().st_uid == ada.uid


def test_home_of_another_owner_is_refused(tmp_path: Path) -> None:
    """A wrong UID is reported and not repaired, because chown is the administrator's decision."""
    (tmp_path / "ada").mkdir()
    stranger = UserIdentity(name="ada", uid=os.getuid() + 1, gid=5000, group_names=("ada",))
    with pytest.raises(SetupError, match="belongs to UID"):
        ensure_home(StorageSettings(home=f"{tmp_path}/{{username}}"), stranger)


def test_home_of_the_account_of_that_name_is_never_given_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is not to change its owner, but to say in cluster.toml whose it is."""
    (tmp_path / "ada").mkdir()
    monkeypatch.setattr(homes, "find_ordinary_accounts", lambda names: dict.fromkeys(names, os.getuid()))
    stranger = UserIdentity(name="ada", uid=os.getuid() + 1, gid=5000, group_names=("ada",))
    with pytest.raises(SetupError) as refusal:
        ensure_home(StorageSettings(home=f"{tmp_path}/{{username}}"), stranger)
    assert "belongs to the head node's account ada" in str(refusal.value)
    assert '`ada = "ada"` below [users.accounts]' in str(refusal.value)
    assert "chown" not in str(refusal.value)


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Docker would mount it without an error."""
    (tmp_path / "ada").write_text("x")
    with pytest.raises(SetupError, match="is not a folder"):
        ensure_home(StorageSettings(home=f"{tmp_path}/{{username}}"), current_user())


def test_homes_on_nfs_without_home_create_are_not_created(tmp_path: Path) -> None:
    """Without home_create the NFS server's homes exist already."""
    ensure_home(StorageSettings(home="nfs://nas/home/{username}"), current_user())
    assert list(tmp_path.iterdir()) == []


def test_export_that_squashes_root_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose owner cannot be changed is removed."""
    monkeypatch.setattr(homes.os, "fchown", build_failing_mkdir(errno.EPERM))
    with pytest.raises(SetupError, match=r"root as nobody.*no_root_squash"):
        ensure_home(storage(tmp_path), current_user())
    assert list((tmp_path / "homes").iterdir()) == []
    monkeypatch.setattr(homes.os, "mkdir", build_failing_mkdir(errno.EACCES))
    with pytest.raises(SetupError, match=r"cannot be created or checked.*no_root_squash"):
        ensure_home(storage(tmp_path), current_user())


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ESTALE, "stale file handle"),
        (errno.EIO, "input/output error"),
        (errno.ENOTCONN, "mount it again"),
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EROFS, "read-only"),
        (errno.EMFILE, "Too many open files"),
    ],
)
def test_file_system_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    """It is reported as a temporary error that the user did not cause; nothing is made, changed or deleted."""
    other = tmp_path / "homes" / "ben"
    other.mkdir(parents=True)
    (other / "kept").write_text("as before")
    monkeypatch.setattr(homes.os, "mkdir", build_failing_mkdir(number))
    with pytest.raises(StorageUnavailable, match=f"homes/ada cannot be used: .*{says}"):
        ensure_home(storage(tmp_path), current_user())
    assert {file: file.is_file() and file.read_text() for file in (tmp_path / "homes").rglob("*")} == {
        other: False,
        other / "kept": "as before",
    }
