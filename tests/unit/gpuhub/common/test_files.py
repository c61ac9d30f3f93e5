"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuhub.common.files import replace_file


def test_file_is_replaced_with_its_permissions(tmp_path: Path) -> None:
    """Whatever the umask, and the permissions of the file before; no other file is left."""
    file = tmp_path / "secret"
    before = os.umask(0o077)
    try:
        replace_file(file, "grün", mode=0o644)
        assert (file.read_text(encoding="utf-8"), file.stat().st_mode & 0o777) == ("grün", 0o644)
        replace_file(file, b"\xff", owner=(os.getuid(), os.getgid()))
    finally:
        os.umask(before)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"\xff", 0o600)
    assert list(tmp_path.iterdir()) == [file]


def test_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a full disk; the incomplete file is removed."""
    file = tmp_path / "state"
    file.write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, "new")
    assert (file.read_text(), list(tmp_path.iterdir())) == ("old", [file])
