"""`gpu-launch cp`, both ways, and what is refused of a tar."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import cp, main
from gpu_launch.common import job_manifest
from gpu_launch.errors import GpuLaunchError, UsageError
from tests.support.hub.fake_hub import TOKEN, FakeHub, served

RUN = "run-20260101-000000-abc123"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one job, whose folder holds results; the current folder is an empty one."""
    home, here = tmp_path / "home", tmp_path / "here"
    (home / "gpu-launch/train-1/results/deep").mkdir(parents=True)
    (home / "gpu-launch/train-1/results/a").write_text("a")
    (home / "gpu-launch/train-1/results/deep/b.sh").write_text("b")
    (home / "gpu-launch/train-1/results/deep/b.sh").chmod(0o755)
    here.mkdir()
    monkeypatch.chdir(here)
    with served(FakeHub(home=home)) as found:
        found.add(RUN, name="train")
        found.write("")
        ordered = job_manifest.JobManifest(name="train", folder="gpu-launch/train-1")
        (home / ".gpu_launch/jobs" / RUN / "job.json").write_text(job_manifest.dump_json(ordered))
        monkeypatch.setenv("GPUHUB_URL", found.url)
        monkeypatch.setenv("GPUHUB_TOKEN", TOKEN)
        yield found


@pytest.mark.parametrize(
    ("source", "target", "there"),
    [
        ("train:results", "copy", ["copy/a", "copy/deep/b.sh"]),
        ("train:results", "into/", ["into/results/a", "into/results/deep/b.sh"]),
        ("train:results", ".", ["results/a", "results/deep/b.sh"]),
        ("train:.", "all", ["all/results/a", "all/results/deep/b.sh"]),
        ("train:results/.", ".", ["a", "deep/b.sh"]),
        ("abc123:results/a", "renamed", ["renamed"]),
        ("home:gpu-launch/train-1/results/a", ".", ["a"]),
        ("home:~/gpu-launch/train-1/results/a", ".", ["a"]),
    ],
)
def test_cp_from_the_cluster(hub: FakeHub, source: str, target: str, there: list[str]) -> None:
    """A folder or file under another name, or into a folder, or a folder's content."""
    assert main.run_command(["cp", source, target]) == 0
    assert sorted(path.as_posix() for path in Path().rglob("*") if path.is_file()) == there


def test_downloads_keep_content_and_executable_bit(hub: FakeHub) -> None:
    """And what was there is replaced."""
    Path("copy/deep").mkdir(parents=True)
    Path("copy/deep/b.sh").write_text("old and longer")
    assert main.run_command(["cp", "train:results", "copy"]) == 0
    assert main.run_command(["cp", "train:results/.", "copy"]) == 0
    assert Path("copy/deep/b.sh").read_text() == "b"
    assert Path("copy/deep/b.sh").stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("source", "target", "there"),
    [
        ("data", "home:sets", "sets/x"),
        ("data", "home:sets/", "sets/data/x"),
        ("data", "home:", "data/x"),
        ("data/x", "home:sets/y", "sets/y"),
        ("data/x", "train:in/", "gpu-launch/train-1/in/x"),
        ("data/x", "train:", "gpu-launch/train-1/x"),
    ],
)
def test_cp_to_the_cluster(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], source: str, target: str, there: str
) -> None:
    """A folder that ends with / is copied into; ignore files do not count."""
    Path("data").mkdir()
    Path("data/x").write_text("x")
    Path(".gitignore").write_text("data\n")
    assert main.run_command(["cp", "--json", source, target]) == 0
    assert (hub.home / there).read_text() == "x"
    told = json.loads(capsys.readouterr().out)
    assert (told["files"], told["bytes"]) == (1, 1)


@pytest.mark.parametrize(
    ("source", "there"), [("latest", "latest"), ("linked", "linked/x"), ("linked/x", "x"), ("..", "here/latest")]
)
def test_links_have_their_own_names(hub: FakeHub, source: str, there: str) -> None:
    """Not those of what they lead to, such as `step-400.pt` of `latest.pt`."""
    Path("work/here/data").mkdir(parents=True)
    Path("work/here/data/x").write_text("x")
    Path("work/here/latest").symlink_to("data/x")
    Path("work/here/linked").symlink_to("data")
    os.chdir("work/here/data" if source == ".." else "work/here")
    assert main.run_command(["cp", source, "home:sets/"]) == 0
    assert (hub.home / "sets" / there).read_text() == "x"


def test_size_limit_error_of_the_broker_is_shown(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Its limit is its administrator's."""
    hub.limit = 10
    Path("large").write_text("x" * 11)
    assert main.run_command(["cp", "large", "home:"]) == 1
    assert capsys.readouterr().err.endswith("gpu-launch: more than the 10 bytes that may be sent at once\n")


def test_cp_of_a_missing_file_is_an_error(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """On either side."""
    assert main.run_command(["cp", "train:nothing", "."]) == 1
    assert capsys.readouterr().err == "gpu-launch: there is no 'gpu-launch/train-1/nothing' in the home\n"
    assert main.run_command(["cp", "nothing", "home:"]) == 2
    assert main.run_command(["cp", "train:results", "no/such/folder"]) == 2
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("home:x", cp.RemotePath(root="home", path="x")),
        ("run-1:a:b", cp.RemotePath(root="run-1", path="a:b")),
        ("train.py:.", cp.RemotePath(root="train.py", path=".")),
        (r"C:\data", Path(r"C:\data")),
        ("./a:b", Path("a:b")),
        ("/a:b", Path("/a:b")),
    ],
)
def test_parse_local_and_remote_paths(text: str, end: object) -> None:
    """A drive's letter is no run."""
    assert cp.parse_path(text) == end


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc"])
def test_remote_paths_outside_the_home_are_refused(path: str) -> None:
    """Said before anything is asked."""
    with pytest.raises(UsageError):
        cp.resolve_remote_path("gpu-launch/x", path)


def _tar(*members: tuple[str, bytes, str]) -> tarfile.TarFile:
    """Name, type and link of each; files hold `x`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"x"))
    buffer.seek(0)
    return tarfile.open(fileobj=buffer, mode="r|")


@pytest.mark.parametrize(
    "members",
    [
        [("../x", tarfile.REGTYPE, "")],
        [("/x", tarfile.REGTYPE, "")],
        [("top/../../x", tarfile.REGTYPE, "")],
        [("top/link", tarfile.SYMTYPE, "/etc")],
        [("top/link", tarfile.SYMTYPE, "../../../x")],
        [("top/hard", tarfile.LNKTYPE, "/etc/passwd")],
        [("top/device", tarfile.CHRTYPE, "")],
        [("top/pipe", tarfile.FIFOTYPE, "")],
        [("top/link", tarfile.SYMTYPE, "."), ("top/link/x", tarfile.REGTYPE, "")],
    ],
)
@pytest.mark.parametrize("into", [True, False])
def test_malicious_tar_cannot_write_outside_the_target(
    tmp_path: Path, members: list[tuple[str, bytes, str]], into: bool
) -> None:
    """A worker that somebody else has taken over must not reach the laptop's files."""
    target = tmp_path / "a" / "target"
    target.mkdir(parents=True)
    with _tar(*members) as tar, pytest.raises(GpuLaunchError):
        cp.unpack(tar, target, into=into)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert written == []


_CHAIN = (("top/b", "."), ("top/a", "b/.."), ("top/c", "a/outside"))
_DEEP_CHAIN = (("top/b", "sub/deep"), ("top/sub/deep", "../.."), ("top/a", "b/../.."), ("top/c", "a/outside"))


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize(
    "links", [*itertools.permutations(_CHAIN), *itertools.permutations(_DEEP_CHAIN)], ids=lambda links: links[0][0]
)
def test_no_chain_of_links_leads_out_of_the_folder(
    tmp_path: Path, links: tuple[tuple[str, str], ...], into: bool
) -> None:
    """A link may change where another one leads, before it or after it; nothing outside can be read through them."""
    (tmp_path / "a").mkdir()
    target = tmp_path / "a" / "target"
    target.mkdir()
    for folder in (tmp_path, tmp_path / "a", *([] if into else [target.parent])):
        (folder / "outside").write_text("secret")
    with (
        _tar(("top/sub", tarfile.DIRTYPE, ""), *((name, tarfile.SYMTYPE, link) for name, link in links)) as tar,
        contextlib.suppress(GpuLaunchError),
    ):
        cp.unpack(tar, target, into=into)
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target.resolve()), f"{path} leads to {path.resolve()}"


def test_link_through_a_link_of_the_user_is_refused(tmp_path: Path) -> None:
    """The user's own link in the target folder leads out; a member that uses it would as well."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "data").symlink_to(tmp_path)
    with _tar(("x", tarfile.SYMTYPE, "data/outside")) as tar, pytest.raises(GpuLaunchError, match="leads out"):
        cp.unpack(tar, tmp_path / "target", into=True)


def test_links_with_detours_are_written_without_them(tmp_path: Path) -> None:
    """They lead to the same file."""
    with _tar(("sub/x", tarfile.REGTYPE, ""), ("sub/link", tarfile.SYMTYPE, "../sub/./gone/../x")) as tar:
        cp.unpack(tar, tmp_path, into=True)
    assert (tmp_path / "sub" / "link").readlink() == Path("../sub/x")
    assert (tmp_path / "sub" / "link").read_text() == "x"


def test_relative_links_within_the_folder_are_downloaded(tmp_path: Path) -> None:
    """Relative ones."""
    with _tar(("top/x", tarfile.REGTYPE, ""), ("top/sub/link", tarfile.SYMTYPE, "../x")) as tar:
        assert cp.unpack(tar, tmp_path, into=True) == (2, 1)
    assert (tmp_path / "top/sub/link").read_text() == "x"
