"""What of a working directory is sent, and how."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from gpu_launch.cli.submission import upload
from gpu_launch.errors import UsageError


def _make(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _names(root: Path) -> list[str]:
    return [entry.name.as_posix() for entry in upload.scan_project(root).entries if not entry.is_folder]


def test_ignore_files_apply_at_every_level(tmp_path: Path) -> None:
    """Deeper ones over higher ones, later lines over earlier, anchored and not; .gpulaunchignore over .gitignore."""
    _make(
        tmp_path,
        {
            ".gitignore": "*.log\n/data/\n!keep.log\nbuild\n",
            ".gpulaunchignore": "!data/\n/secret.txt\n",
            "train.py": "",
            "a.log": "",
            "keep.log": "",
            "secret.txt": "",
            "data/x.bin": "",
            "sub/.gitignore": "!b.log\n/only-here\n",
            "sub/b.log": "",
            "sub/c.log": "",
            "sub/only-here": "",
            "sub/deep/only-here": "",
            "sub/data/y.bin": "",
            "sub/build/z": "",
            ".git/config": "",
            "sub/.git/config": "",
            "sub/__pycache__/m.pyc": "",
        },
    )
    assert _names(tmp_path) == [
        ".gitignore",
        ".gpulaunchignore",
        "data/x.bin",
        "keep.log",
        "sub/.gitignore",
        "sub/b.log",
        "sub/data/y.bin",
        "sub/deep/only-here",
        "train.py",
    ]


def test_parent_ignore_rules_apply_within_a_repository(tmp_path: Path) -> None:
    """Up to the folder with .git, with its info/exclude; not beyond it."""
    _make(
        tmp_path,
        {
            ".gitignore": "*\n",
            "repository/.git/info/exclude": "*.private\n",
            "repository/.gitignore": "/project/out/\n*.tmp\n",
            "repository/project/out/x": "",
            "repository/project/a.tmp": "",
            "repository/project/b.private": "",
            "repository/project/train.py": "",
        },
    )
    assert _names(tmp_path / "repository" / "project") == ["train.py"]
    assert _names(tmp_path / "repository") == [".gitignore", "project/train.py"]


@pytest.mark.parametrize(
    ("rules", "sent"),
    [
        ("*.pt\n.env\n/*\n!/src\n", ["src/a/train.py", "src/train.py"]),
        ("src/a\n!src/\n", [".env", "data/keep.txt", "data/x.pt", "src/.env", "src/train.py", "src/x.pt"]),
        ("src/**\n!src/train.py\n*.pt\n", [".env", "data/keep.txt", "src/train.py"]),
        ("data/**\n!data/keep.txt\nsrc\n", [".env", "data/keep.txt"]),
        ("*\n!*/\n!*.py\n", ["src/a/train.py", "src/train.py"]),
    ],
)
def test_rules_name_a_folder_and_not_what_is_in_it(tmp_path: Path, rules: str, sent: list[str]) -> None:
    """As for Git: a folder that is sent again may have files that another rule names."""
    files = ("src/train.py", "src/a/train.py", "src/x.pt", "src/.env", "data/keep.txt", "data/x.pt", ".env")
    _make(tmp_path, dict.fromkeys(files, "") | {".git/info/exclude": rules})
    assert _names(tmp_path) == sent


def test_parent_ignore_rules_do_not_apply_outside_a_repository(tmp_path: Path) -> None:
    """A stray .gitignore above is nobody's."""
    _make(tmp_path, {".gitignore": "*\n", "project/train.py": ""})
    assert _names(tmp_path / "project") == ["train.py"]


def test_virtual_environments_are_excluded_and_reported(tmp_path: Path) -> None:
    """They are of this machine."""
    _make(tmp_path, {"env/pyvenv.cfg": "", "env/bin/python": "", "train.py": ""})
    load = upload.scan_project(tmp_path)
    assert load.excluded == ("env (a virtual environment)",)
    assert load.files == 1


def test_links_within_are_sent_as_links(tmp_path: Path) -> None:
    """Also absolute ones, which would point nowhere there."""
    _make(tmp_path, {"data/x": "x", "sub/y": "y"})
    (tmp_path / "sub" / "relative").symlink_to("../data/x")
    (tmp_path / "sub" / "absolute").symlink_to(tmp_path / "data")
    (tmp_path / "broken").symlink_to("nothing")
    links = {entry.name.as_posix(): entry.link for entry in upload.scan_project(tmp_path).entries if entry.link}
    assert links == {"sub/relative": "../data/x", "sub/absolute": "../data", "broken": "nothing"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, target: str) -> None:
    """With what to do; not when an ignore file names them."""
    root = tmp_path / "root"
    _make(root, {"train.py": "", "sub/x": ""})
    (root / "link").symlink_to(target)
    with pytest.raises(UsageError, match=r"link is a link to .*, outside of the uploaded folder"):
        upload.scan_project(root)
    _make(root, {".gpulaunchignore": "link\n"})
    assert "link" not in _names(root)


def test_home_and_root_cannot_be_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before they are looked through."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, text in ((tmp_path, "your whole home"), (Path("/"), "the root of all files")):
        with pytest.raises(UsageError, match=text):
            upload.scan_project(folder)


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set, most likely."""
    monkeypatch.setattr(upload, "MAX_FILES", 3)
    _make(tmp_path, {f"data/{number}": "" for number in range(4)})
    with pytest.raises(UsageError, match="more than 3 files"):
        upload.scan_project(tmp_path)


def test_too_large_upload_lists_the_largest_files(tmp_path: Path) -> None:
    """With sizes, and what to do."""
    _make(tmp_path, {"small": "x", "data/large": "x" * 5000, "model.pt": "x" * 3000})
    load = upload.scan_project(tmp_path)
    upload.check_size(load, limit=load.size)
    with pytest.raises(UsageError) as caught:
        upload.check_size(load, limit=4096)
    text = str(caught.value)
    assert "has 7.8 KiB to upload, more than 4.0 KiB. The largest: data/large (4.9 KiB), model.pt (2.9 KiB)" in text
    assert ".gpulaunchignore" in text
    assert "--max-size" in text


def test_tar_is_complete(tmp_path: Path) -> None:
    """Strange names, empty folders, executables, nobody's uid; the bytes are counted as they go."""
    names = ["a b.py", "ä'\"$.txt", "x" * 150, "new\nline"]
    _make(tmp_path, {name: name for name in names} | {"run.sh": "#!/bin/sh\n"})
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.sh").chmod(0o700)
    (tmp_path / "link").symlink_to("run.sh")
    counted: list[int] = []
    buffer = io.BytesIO()
    load = upload.scan_project(tmp_path)
    with tarfile.open(fileobj=buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        upload.write_tar(tar, load, on_bytes=counted.append)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as tar:
        found = {member.name: member for member in tar}
        for name in names:
            opened = tar.extractfile(found[name])
            assert opened is not None
            assert opened.read().decode() == name
    assert sum(counted) == load.size
    assert found["empty"].isdir()
    assert (found["run.sh"].mode, found["a b.py"].mode) == (0o755, 0o644)
    assert found["link"].linkname == "run.sh"
    assert {(member.uid, member.gid, member.uname) for member in found.values()} == {(0, 0, "")}


def test_file_that_changes_during_the_upload(tmp_path: Path) -> None:
    """One that grew is sent as it was counted; one that shrank or went away is an error that names it."""
    _make(tmp_path, {"grows": "1234", "shrinks": "1234"})
    load = upload.scan_project(tmp_path)
    (tmp_path / "grows").write_text("123456")
    (tmp_path / "shrinks").write_text("1")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w|") as tar:
        upload.write_entry(tar, load.entries[0])
        with pytest.raises(UsageError, match="shrinks became shorter during the upload"):
            upload.write_entry(tar, load.entries[1])
    (tmp_path / "shrinks").unlink()
    with pytest.raises(UsageError, match="shrinks disappeared"), tarfile.open(fileobj=io.BytesIO(), mode="w|") as tar:
        upload.write_entry(tar, load.entries[1])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3_565_158, "3.4 MiB"),
        (30 * 1024**2, "30.0 MiB"),
        (2000 * 1024**3, "2000.0 GiB"),
    ],
)
def test_format_upload_sizes(size: int, text: str) -> None:
    """As people read them."""
    assert upload.format_size(size) == text
