"""The archive's format: what is refused, and that nothing gets out of its folder."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.ops.backup import archive, encryption
from gpuhub.ops.backup.archive import (
    ArchivedFile,
    Manifest,
    describe_file,
    extract_archive,
    is_encrypted,
    write_archive,
)

PASSPHRASE = "four plain words here"


def build_manifest(*files: ArchivedFile, **changes: object) -> Manifest:
    values = {
        "format": archive.FORMAT, "version": "0.2.0", "instance": "gpuhub", "host": "head", "created_at": 1.0,
        "revision": None,
    }  # fmt: skip
    return Manifest.model_validate({**values, **changes, "files": files})


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    (tmp_path / "small").write_bytes(b"token")
    # Larger than a chunk of the encryption and a block of the reader.
    (tmp_path / "large").write_bytes(os.urandom(archive._BLOCK + 70_000))
    return [tmp_path / "small", tmp_path / "large"]


def describe(sources: list[Path]) -> list[ArchivedFile]:
    return [
        describe_file("state/secrets/proxy-token", sources[0], 0o600),
        describe_file("databases/broker.sqlite", sources[1], 0o600),
    ]


@pytest.mark.parametrize("passphrase", [None, PASSPHRASE])
def test_round_trip(tmp_path: Path, sources: list[Path], passphrase: str | None) -> None:
    """Everything comes back as it was; only the owner can read the file, and nothing else is left."""
    file, folder = tmp_path / "out" / "b.tar.gz", tmp_path / "into"
    file.parent.mkdir()
    folder.mkdir()
    manifest = build_manifest(*describe(sources))
    write_archive(file, manifest, sources, passphrase)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    assert is_encrypted(file) == (passphrase is not None)
    assert (b"proxy-token" in gzip.decompress(file.read_bytes())) if passphrase is None else True
    assert extract_archive(file, folder, passphrase) == manifest
    assert (folder / "state/secrets/proxy-token").read_bytes() == b"token"
    assert (folder / "databases/broker.sqlite").read_bytes() == sources[1].read_bytes()


def test_existing_file_is_refused(tmp_path: Path, sources: list[Path]) -> None:
    """A backup replaces no file."""
    (tmp_path / "b").write_text("mine")
    with pytest.raises(SettingsError, match="exists: name another file"):
        write_archive(tmp_path / "b", build_manifest(*describe(sources)), sources, None)
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_systems_without_links(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Those of USB sticks have none; there, too, no file is replaced, also one that was made in the meantime."""

    def refuse(_source: Path, target: Path) -> None:
        if target.name == "taken":
            target.write_text("mine")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.link", refuse)
    folder = tmp_path / "stick"
    folder.mkdir()
    write_archive(folder / "b", build_manifest(*describe(sources)), sources, None)
    assert stat.S_IMODE((folder / "b").stat().st_mode) == 0o600
    with pytest.raises(SettingsError, match="exists: name another file"):
        write_archive(folder / "taken", build_manifest(*describe(sources)), sources, None)
    assert (folder / "taken").read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["b", "taken"]


def test_wrong_passphrase_and_damage(tmp_path: Path, sources: list[Path]) -> None:
    """A wrong passphrase, a changed byte, a missing end and swapped chunks are each refused."""
    file = tmp_path / "b"
    write_archive(file, build_manifest(*describe(sources)), sources, PASSPHRASE)
    (tmp_path / "into").mkdir()
    with pytest.raises(SettingsError, match="the passphrase is wrong, or the file is damaged"):
        extract_archive(file, tmp_path / "into", "another passphrase")
    whole = file.read_bytes()
    header, chunk = len(encryption.MAGIC) + 16 + 7, encryption._CHUNK + 16
    swapped = whole[:header] + whole[header + chunk : header + 2 * chunk] + whole[header : header + chunk]
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    mistakes = (bytes(changed), whole[: header + chunk], whole[:-1], swapped + whole[header + 2 * chunk :])
    for number, wrong in enumerate(mistakes):
        file.write_bytes(wrong)
        folder = tmp_path / f"into{number}"
        folder.mkdir()
        with pytest.raises(SettingsError, match="cannot be decrypted"):
            extract_archive(file, folder, PASSPHRASE)


def test_short_passphrase_is_refused() -> None:
    """The file has every secret of the cluster."""
    with pytest.raises(SettingsError, match="has 7 characters: at least 12"):
        encryption.check_passphrase("secret!")


def pack(file: Path, manifest: Manifest | bytes, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Write an archive as another program could."""
    text = manifest if isinstance(manifest, bytes) else manifest.model_dump_json().encode()
    first = tarfile.TarInfo(archive.MANIFEST)
    first.size = len(text)
    with tarfile.open(file, "w:gz") as tar:
        tar.addfile(first, io.BytesIO(text))
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return file


def member(name: str, content: bytes = b"token", kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info


def entry(name: str, content: bytes = b"token") -> ArchivedFile:
    return ArchivedFile(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest(), mode=0o600)


@pytest.mark.parametrize(
    "name", ["../etc/passwd", "state/../../x", "/etc/passwd", "state//x", "state", "else/x", "state/a\x00b"]
)
def test_path_outside_is_refused(tmp_path: Path, name: str) -> None:
    """Only names that a backup has are extracted."""
    file = pack(tmp_path / "b", build_manifest(entry(name)), (member(name.replace("\x00", "")), b"token"))
    (tmp_path / "into").mkdir()
    with pytest.raises(SettingsError, match="which no backup has"):
        extract_archive(file, tmp_path / "into", None)
    assert list((tmp_path / "into").iterdir()) == []


def test_members_that_differ_from_the_manifest(tmp_path: Path) -> None:
    """A link, another size, another content, a member more and one less are each refused."""
    manifest = build_manifest(entry("state/a"))
    cases = {
        "state/a does not follow": [
            ((member("state/a", b"", tarfile.SYMTYPE, "/etc"), b""),),
            ((member("state/a", b"longer"), b"longer"),),
            (),
        ],
        "the checksum of state/a is wrong": [((member("state/a"), b"other"),)],
        "more than it lists": [((member("state/a"), b"token"), (member("state/b"), b"token"))],
    }
    number = 0
    for text, variants in cases.items():
        for members in variants:
            number += 1
            folder = tmp_path / f"into{number}"
            folder.mkdir()
            with pytest.raises(SettingsError, match=text):
                extract_archive(pack(tmp_path / f"b{number}", manifest, *members), folder, None)


def test_later_format_and_other_files(tmp_path: Path) -> None:
    """A later format names its version; what is no backup is called that."""
    file = pack(tmp_path / "later", build_manifest(format=2, version="9.9"))
    with pytest.raises(SettingsError, match=r"install gpuhub 9\.9"):
        extract_archive(file, tmp_path, None)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "half").write_bytes(file.read_bytes()[:40])
    for name in ("text", "half"):
        with pytest.raises(SettingsError, match="not a whole backup"):
            extract_archive(tmp_path / name, tmp_path, None)
    with pytest.raises(SettingsError, match="not a backup of gpuhub"):
        extract_archive(pack_other(tmp_path / "other"), tmp_path, None)
    with pytest.raises(SettingsError, match="is not valid"):
        extract_archive(pack(tmp_path / "bad", b"{}"), tmp_path, None)
    with pytest.raises(SettingsError, match="cannot be read"):
        is_encrypted(tmp_path / "missing")


def pack_other(file: Path) -> Path:
    with tarfile.open(file, "w:gz") as tar:
        tar.addfile(member("x"), io.BytesIO(b"token"))
    return file


def test_small_file_does_not_become_a_large_one(tmp_path: Path) -> None:
    """What is unpacked before and besides the listed files is bounded; what is listed must fit on the disk."""
    file = tmp_path / "bomb"
    with gzip.open(file, "wb") as packed:
        header = tarfile.TarInfo("pax")
        header.type, header.size = tarfile.XHDTYPE, 1 << 30
        packed.write(header.tobuf())
        packed.write(bytes(64 << 20))
    with pytest.raises(SettingsError, match="more than it lists"):
        extract_archive(file, tmp_path, None)
    huge = ArchivedFile(name="state/a", size=1 << 50, sha256="0" * 64, mode=0o600)
    with pytest.raises(SetupError, match="the backup needs"):
        extract_archive(pack(tmp_path / "huge", build_manifest(huge)), tmp_path, None)
