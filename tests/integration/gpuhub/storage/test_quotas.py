"""Usage and limits of homes."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from gpuhub.config.settings import StorageSettings
from gpuhub.storage import home_usage
from gpuhub.storage.blocking_calls import BlockingCallPool
from gpuhub.storage.home_usage import (
    DiskQuota,
    DiskSpace,
    HomeUsage,
    describe_home_usage,
    measure_home,
    parse_quota,
    read_home_usage,
)
from gpuhub.storage.homes import HomeLocation

GIB = 1024**3
HOME = PurePosixPath("/export/home/ada")
DISK = DiskSpace(size=1000 * GIB, free=500 * GIB)
#: As quota's documentation describes its output with our options, which was never run here: limits in KiB, an asterisk after an exceeded value.
OUTPUT = """Disk quotas for user ada (uid 1001):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
   /export/home 12582912  41943040 52428800       0    1201       0       0       0
        /export 99* 50 100 1699999999 1 0 0 0
           /var   100       0       0       0      12       0       0       0
"""


def test_limits_are_read() -> None:
    """The hard limit precedes the soft one, and file systems without a limit are ignored."""
    assert parse_quota(OUTPUT) == [
        DiskQuota(mount=PurePosixPath("/export/home"), used=12 * GIB, limit=50 * GIB),
        DiskQuota(mount=PurePosixPath("/export"), used=99 * 1024, limit=100 * 1024),
    ]
    soft = "/home 10 20 0 0 1 0 0 0"
    assert parse_quota(soft) == [DiskQuota(mount=PurePosixPath("/home"), used=10 * 1024, limit=20 * 1024)]


@pytest.mark.parametrize(
    "output", ["", "Disk quotas for user ada (uid 1001): none\n", "/home x y z 0 0 0 0 0", "nas:/home 1 2 3 0 1 0 0 0"]
)
def test_unknown_quota_output_is_ignored(output: str) -> None:
    """Output of later versions is ignored too."""
    assert parse_quota(output) == []


def test_home_with_a_quota_reports_it() -> None:
    """The quota is that of the home's file system; of two, the one that is closer to its limit counts."""
    assert describe_home_usage(HOME, parse_quota(OUTPUT), DISK, DISK) == HomeUsage(text="Home: 12 GiB of 50 GiB")
    own = DiskSpace(size=20 * GIB, free=15 * GIB)
    assert describe_home_usage(HOME, [], own, DISK) == HomeUsage(text="Home: 5 GiB of 20 GiB")
    assert describe_home_usage(HOME, parse_quota(OUTPUT), DiskSpace(size=20 * GIB, free=2 * GIB), DISK).text.endswith(
        "20 GiB"
    )


def test_without_a_quota_only_a_nearly_full_disk_is_reported() -> None:
    """A nearly full disk is reported to all users."""
    assert describe_home_usage(HOME, [], DISK, DISK) == HomeUsage()
    full = DiskSpace(size=1000 * GIB, free=49 * GIB)
    assert describe_home_usage(HOME, [], full, full) == HomeUsage(
        warning="The disk with all users' homes is nearly full: 49 GiB of 1000 GiB are left. "
        "Please delete files that you do not need."
    )
    assert describe_home_usage(HOME, parse_quota(OUTPUT), full, full).warning.startswith("The disk with all users'")


def test_nearly_exhausted_quota_is_reported() -> None:
    """A quota that is exceeded during the grace period is reported too."""
    near = [DiskQuota(mount=PurePosixPath("/export"), used=49 * GIB, limit=50 * GIB)]
    assert describe_home_usage(HOME, near, DISK, DISK).warning == "Your home is nearly full: 1 GiB are left."
    over = [DiskQuota(mount=PurePosixPath("/export"), used=51 * GIB, limit=50 * GIB)]
    assert describe_home_usage(HOME, over, DISK, DISK).warning == "Your home is nearly full: 0 B are left."


def test_an_empty_file_system_is_not_full() -> None:
    """Some file systems have no size, such as autofs."""
    assert describe_home_usage(HOME, [], DiskSpace(size=0, free=0), DiskSpace(size=0, free=0)) == HomeUsage()


def place(folder: Path) -> HomeLocation:
    return HomeLocation(path=folder / "ada", root=folder)


def test_file_system_of_the_home_itself_is_found(tmp_path: Path) -> None:
    """The home is a real file system of 16 MiB inside a larger one."""
    home = tmp_path / "ada"
    home.mkdir()
    assert measure_home(place(tmp_path)).text == ""
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", str(home)), check=True)
    try:
        (home / "file").write_bytes(bytes(4 * 1024**2))
        assert measure_home(place(tmp_path)) == HomeUsage(text="Home: 4 MiB of 16 MiB")
        (home / "more").write_bytes(bytes(12 * 1024**2 - 4096 * 4))
        assert measure_home(place(tmp_path)).warning.startswith("Your home is nearly full")
    finally:
        subprocess.run(("umount", str(home)), check=True)


def test_quota_output_is_used_whatever_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 means that a limit is exceeded or that there is none; the query is about the home's owner."""
    (tmp_path / "ada").mkdir()
    program = tmp_path / "quota"
    mount = os.path.realpath(tmp_path)
    program.write_text(
        f'#!/bin/sh\nfor uid; do :; done\n[ "$uid" = {os.getuid()} ] && echo "{mount} 1024 0 4096 0 1 0 0 0"\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert measure_home(place(tmp_path)).text == "Home: 1 MiB of 4 MiB"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert measure_home(place(tmp_path)).text == ""


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Return an event that hung calls wait for; it is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


async def test_hanging_disk_does_not_delay_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    """The page shows a warning, and starts have a separate time limit."""
    monkeypatch.setattr(home_usage, "BLOCKING_CALLS", BlockingCallPool())
    storage = StorageSettings(home=f"{tmp_path}/{{username}}")
    monkeypatch.setattr(home_usage, "READ_TIMEOUT_S", 30.0)
    assert await read_home_usage(storage, "ada") == HomeUsage()
    monkeypatch.setattr(home_usage, "READ_TIMEOUT_S", 0.1)
    monkeypatch.setattr(home_usage, "measure_home", lambda _place: released.wait())
    assert "does not answer: a start may fail" in (await read_home_usage(storage, "ada")).warning
    assert "does not answer: a start may fail" in (await read_home_usage(storage, "ada")).warning


async def test_homes_on_a_file_server_are_not_inspected() -> None:
    """Only the file server knows their usage."""
    assert await read_home_usage(StorageSettings(home="nfs://nas/home/{username}"), "ada") == HomeUsage()
