"""What the doctor reads of the folder of homes on the head node, and what it says about it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from gpuhub.config.settings import StorageSettings
from gpuhub.ops.doctor import home_checks
from gpuhub.ops.doctor.findings import Severity
from gpuhub.ops.doctor.home_checks import HomeFacts, ServerClock, check_homes, find_mount, parse_mounts

#: Lines as proc(5) has them: a root, homes on ext4 with quotas, an export from a NAS, one mounted over it, a space.
MOUNTS = r"""
27 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw,errors=remount-ro
28 27 259:2 / /srv/homes rw,relatime shared:2 master:3 - ext4 /dev/nvme0n1p2 rw,usrjquota=aquota.user,jqfmt=vfsv1
29 27 0:51 / /nas/homes rw,noatime - nfs4 192.168.1.9:/export/home rw,vers=4.2,hard,addr=192.168.1.9
30 27 0:52 / /nas/v6 rw - nfs4 [fd00::9]:/export/a:b rw
31 27 0:53 / /over rw - tmpfs tmpfs rw
32 31 8:1 / /over rw - xfs /dev/sda1 rw,attr2,noquota
33 27 8:2 / /my\040disk rw - xfs /dev/sda2 rw,prjquota
""".strip()


@pytest.mark.parametrize(
    ("path", "device", "has_quota"),
    [
        ("/none/such", "259:1", False),
        ("/srv/homes-of-others", "259:1", False),
        ("/srv/homes", "259:2", True),
        ("/srv/homes/ada", "259:2", True),
        ("/over/it", "8:1", False),
        ("/my disk/homes", "8:2", True),
    ],
)
def test_file_system_of_a_folder_is_found(path: str, device: str, has_quota: bool) -> None:
    mount = find_mount(Path(path), parse_mounts(MOUNTS))
    assert mount is not None
    assert (mount.device, mount.has_quota) == (device, has_quota)


def test_this_machines_mounts_are_parsed() -> None:
    """The kernel's own list: the device of a mount is that of its files."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    found = find_mount(Path("/proc/self"), mounts)
    assert found is not None
    assert (found.point, found.kind) == (PurePosixPath("/proc"), "proc")
    device = os.stat("/proc").st_dev  # noqa: PTH116
    assert found.device == f"{os.major(device)}:{os.minor(device)}"


async def test_neighbours_of_homes_are_read(tmp_path: Path) -> None:
    """Folders that exist on the same file system; `/proc` is another one, and a missing folder is on none."""
    storage = StorageSettings(home=str(tmp_path / "home/{username}"))
    (tmp_path / "home").mkdir()
    folders = {"Docker": str(tmp_path), "the kernel": "/proc", "nothing": str(tmp_path / "missing")}
    facts = await home_checks.read_home_facts(storage, folders)
    assert facts is not None
    assert (facts.folder, facts.neighbours, facts.error) == (str(tmp_path / "home"), ("Docker",), "")
    assert list((tmp_path / "home").iterdir()) == []


async def test_homes_that_the_head_node_does_not_see_are_not_checked() -> None:
    facts = await home_checks.read_home_facts(StorageSettings(home="nfs://192.168.1.9/export/home/{username}"), {})
    assert facts is None
    assert list(check_homes(facts)) == []


async def test_homes_that_do_not_answer_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel answers for an export that was replaced."""

    def fail(_root: Path, _folders: object) -> HomeFacts:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(home_checks, "_read_facts", fail)
    storage = StorageSettings(home=str(tmp_path / "{username}"))
    [finding] = check_homes(await home_checks.read_home_facts(storage, {}))
    assert (finding.check, finding.severity) == ("homes", Severity.FAILED)
    assert "Stale file handle" in finding.value


def test_full_homes_that_stop_others_are_a_warning() -> None:
    """Unless quotas limit homes, or nothing else is there."""
    facts = HomeFacts(folder="/home", neighbours=("the broker", "Docker"))
    [finding] = check_homes(facts)
    assert (finding.check, finding.severity) == ("homes", Severity.WARNING)
    assert finding.value == "/home is on one file system with the data of the broker and Docker, and has no quotas"
    assert finding.advice.startswith("a full home stops the broker and Docker")
    assert list(check_homes(replace(facts, has_quota=True))) == []
    assert list(check_homes(replace(facts, neighbours=()))) == []


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "severity", "text"),
    [
        (0.01, 0.02, Severity.OK, "the file server 192.168.1.9's is as the head node's"),
        (-1.5, 0.1, Severity.OK, "the file server 192.168.1.9's is 1.5 s behind the head node's"),
        (2.0, 0.0, Severity.WARNING, "the file server 192.168.1.9's is 2.0 s ahead of the head node's"),
        (-40.0, 0.1, Severity.WARNING, "the file server 192.168.1.9's is 40.0 s behind the head node's"),
        # A server that takes long to answer proves nothing.
        (3.0, 1.5, Severity.OK, "the file server 192.168.1.9's is 3.0 s ahead of the head node's"),
    ],
)
def test_clock_of_the_file_server_is_compared(ahead_s: float, within_s: float, severity: Severity, text: str) -> None:
    clock = ServerClock(server="192.168.1.9", ahead_s=ahead_s, within_s=within_s)
    [finding] = check_homes(HomeFacts(folder="/home", clock=clock))
    assert (finding.check, finding.severity, finding.value) == ("clock", severity, text)


@pytest.mark.parametrize("ahead_s", [0.0, 5.0, -5.0])
def test_clock_is_read_from_a_file_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """A file server with another clock is simulated where it sets the time; the caller names none."""
    real = os.utime

    def touch(handle: int, *times: object) -> None:
        assert times == ()
        real(handle)
        stamp = os.fstat(handle).st_mtime + ahead_s
        real(handle, (stamp, stamp))

    monkeypatch.setattr(os, "utime", touch)
    clock = home_checks.read_server_clock(tmp_path, "[fd00::9]:/export/a:b")
    assert clock is not None
    assert clock.server == "[fd00::9]"
    # The kernel's time of files is that of its last tick.
    assert abs(clock.ahead_s - ahead_s) <= clock.within_s + 0.1
    assert list(tmp_path.iterdir()) == []


def test_clock_is_not_read_where_the_head_node_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with root_squash. Other errors are the folder's trouble."""

    def refuse(number: int) -> None:
        def make(**_options: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(home_checks.tempfile, "mkstemp", make)

    refuse(13)
    assert home_checks.read_server_clock(tmp_path, "nas:/home") is None
    refuse(116)
    with pytest.raises(OSError, match="Stale file handle"):
        home_checks.read_server_clock(tmp_path, "nas:/home")
