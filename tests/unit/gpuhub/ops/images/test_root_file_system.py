"""What the base image's file system has, where it comes from, and what is removed of earlier ones."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from gpuhub.ops.images import root_file_system
from gpuhub.ops.images.build_plan import ImageSources


@pytest.mark.parametrize(
    ("targets", "mirror"),
    [
        ("http://a.example/debian-security/ bookworm-security\nhttp://a.example/debian/ bookworm\n", "http://a.example/debian/"),
        ("http://archive.example/ubuntu/ noble\n", None),
        ("mirror+file:/etc/apt/list bookworm\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_mirror_is_the_one_apt_uses(targets: str, mirror: str | None):
    """On other distributions Debian's own servers are used."""
    assert root_file_system.find_mirror(targets, "bookworm") == mirror


def test_debian_comes_with_its_updates_checked_with_its_own_keys():
    """Also on hosts whose apt trusts other keys; one whose apt lacks a part of the suite uses Debian's own servers."""
    mirrors = "".join(
        f"http://a.example/{folder}/ bookworm{part}\n"
        for folder, part in (("debian", ""), ("debian", "-updates"), ("security", "-security"))
    )
    command = root_file_system.build_mmdebstrap_command(Path("/r"), "bookworm", ["git", "curl"], mirrors)
    assert "--include=git,curl" in command
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert command[-3:] == [
        f"deb [signed-by={keyring}] http://a.example/debian/ bookworm main",
        f"deb [signed-by={keyring}] http://a.example/debian/ bookworm-updates main",
        f"deb [signed-by={keyring}] http://a.example/security/ bookworm-security main",
    ]
    without = root_file_system.build_mmdebstrap_command(
        Path("/r"), "bookworm", ["git"], mirrors.replace("-updates", "-other")
    )
    assert without[-2:] == ["bookworm", "/r"]


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("./usr/bin/git", True),
        ("./usr/share/doc/git/copyright", True),
        ("./usr/share/doc/git/changelog.gz", False),
        ("./usr/share/man/man1/git.1.gz", False),
        ("./usr/share/man", True),
        ("./etc/resolv.conf", False),
        ("./usr/lib/gcc/x86_64-linux-gnu/12/cc1plus", True),
        ("./usr/lib/gcc/x86_64-linux-gnu/12/lto1", False),
        ("./usr/lib/gcc/x86_64-linux-gnu/12/libtsan.a", False),
        ("./usr/lib/gcc/x86_64-linux-gnu/12/libgcc.a", True),
        ("./usr/lib/x86_64-linux-gnu/libasan.so.8.0.0", False),
        ("./usr/lib/python3.11/config-3.11-x86_64-linux-gnu/libpython3.11.a", False),
        ("./usr/lib/python3.11/config-3.11-x86_64-linux-gnu/Makefile", True),
        ("./etc/ssh/ssh_config", True),
        ("./etc/ssh/ssh_host_ed25519_key", False),
        ("./etc/ssh/ssh_host_ed25519_key.pub", False),
        ("./tmp", True),
        ("./tmp/x", False),
    ],
)
def test_the_base_image_has_programs_and_licences_but_no_manuals(name: str, is_kept: bool):
    """And no files of the machine that built it."""
    assert (root_file_system.filter_entry(tarfile.TarInfo(name)) is not None) == is_kept


def test_nothing_in_the_base_image_is_setuid():
    """The sticky bit of /tmp stays."""
    entry = tarfile.TarInfo("usr/bin/su")
    entry.mode = 0o7755
    kept = root_file_system.filter_entry(entry)
    assert kept is not None
    assert kept.mode == 0o1755


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path):
    """Old files and the folder of a build that was killed go; the finished tar stays."""
    (tmp_path / "new.tar").write_bytes(b"new")
    (tmp_path / "old.tar").write_bytes(b"old")
    (tmp_path / "tmpkilled" / "root" / "usr").mkdir(parents=True)
    found = root_file_system.ensure_root_tar(
        tmp_path,
        tag="new",
        suite="bookworm",
        sources=ImageSources(base={}, python={}, notebook={}, extensions={}, lab={}, notebooks={}),
        read_pynvml=lambda: b"",
        report=lambda _step: None,
    )
    assert found == tmp_path / "new.tar"
    assert list(tmp_path.iterdir()) == [found]
