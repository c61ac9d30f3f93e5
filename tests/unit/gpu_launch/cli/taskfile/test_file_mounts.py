"""`file_mounts`, and paths of SkyPilot's machines in commands."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

import pytest

from gpu_launch.cli.taskfile import file_mounts, parser
from gpu_launch.cli.taskfile.file_mounts import FileMount, PlacedMount
from gpu_launch.errors import UsageError

FOLDER = "gpu-launch/train-3f2a91"


def _place(remote: str, local: str, here: Path, *, commands: str = "", **environ: str) -> PlacedMount:
    mount = FileMount(remote=remote, local=local, line=7)
    return file_mounts.place_mount(mount, environ=environ, here=here, commands=commands)


@pytest.mark.parametrize(
    ("remote", "name"),
    [
        ("data/set", "data/set"),
        ("./data/", "data"),
        ("~/sky_workdir/data", "data"),
        ("${WHERE}/data", "inputs/data"),
        ("$HOME/sky_workdir/data", "data"),
    ],
)
def test_relative_mounts_lie_in_the_working_directory(tmp_path: Path, remote: str, name: str) -> None:
    """However the working directory is written."""
    (tmp_path / "x").mkdir()
    placed = _place(remote, "$LOCAL", tmp_path, WHERE="inputs", LOCAL="./x")
    assert placed == PlacedMount(source=tmp_path / "x", name=PurePosixPath(name))


def test_mounts_below_the_home_lie_in_the_jobs_folder(tmp_path: Path) -> None:
    """The commands name them there; nothing in the home itself changes."""
    (tmp_path / "x").write_text("x")
    placed = _place("~/a/conf", "x", tmp_path, commands="cat ~/a/conf\n")
    assert placed == PlacedMount(source=tmp_path / "x", name=PurePosixPath(".file_mounts/a/conf"), home_path="a/conf")
    assert [entry.name.as_posix() for entry in file_mounts.list_entries([placed])] == [".file_mounts/a/conf"]


@pytest.mark.parametrize(
    ("remote", "local", "error"),
    [
        ("a", "missing", "line 7: file_mounts.a is to be "),
        ("/data", ".", "line 7: file_mounts./data is not below your home, where jobs write"),
        ("../data", ".", "line 7: file_mounts.../data is not below your home"),
        ("~/../data", ".", "is not below your home"),
        ("~", ".", "is a whole folder of the job"),
        ("~/sky_workdir", ".", "is a whole folder of the job: name a path in it, or use `workdir`"),
        ("$X/data", ".", "needs a value for $X: give it with --env X=VALUE"),
        ("~/.gitconfig", ".", "is named neither in `setup` nor in `run`, and your home is shared by all your jobs"),
    ],
)
def test_mounts_that_a_job_cannot_have_are_refused(tmp_path: Path, remote: str, local: str, error: str) -> None:
    """With what works instead."""
    with pytest.raises(UsageError) as caught:
        _place(remote, local, tmp_path, commands="cat ~/.gitconfig.old x~/.gitconfig /~/.gitconfig")
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "/data: s3://bucket",
            "line 2: file_mounts./data is data in a bucket, which is not mounted here: keep a copy in /d",
        ),
        ("/data: {source: 'gs://b', mode: MOUNT}", "file_mounts./data is data in a bucket"),
        ("/data: {name: b}", "file_mounts./data is data in a bucket"),
        ("/data: https://x/y", "file_mounts./data is data in a bucket"),
        ("/data:", "line 2: file_mounts./data needs the path of a file or folder on this machine"),
        ("[a]", "line 1: file_mounts is a mapping of paths"),
    ],
)
def test_buckets_are_refused(text: str, error: str) -> None:
    """With the folder for data sets."""
    with pytest.raises(UsageError) as caught:
        parser.parse_task_files(f"file_mounts:\n  {text}\nrun: x\n")
    assert error in str(caught.value)


MOUNTS = (
    PlacedMount(source=Path("x"), name=PurePosixPath(".file_mounts/data"), home_path="data"),
    PlacedMount(source=Path("y"), name=PurePosixPath(".file_mounts/data/b.c"), home_path="data/b.c"),
    PlacedMount(source=Path("z"), name=PurePosixPath("rel")),
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cd ~/sky_workdir", f"cd ~/{FOLDER}"),
        ('ls "$HOME/sky_workdir/x" ${HOME}/sky_workdir/', f'ls "$HOME/{FOLDER}/x" ${{HOME}}/{FOLDER}/'),
        ("A=~/sky_workdir:~/data", f"A=~/{FOLDER}:~/{FOLDER}/.file_mounts/data"),
        ("cat ~/data/b.c ~/data/x", f"cat ~/{FOLDER}/.file_mounts/data/b.c ~/{FOLDER}/.file_mounts/data/x"),
        ("[[ -d ~/sky_workdir ]]; ls ~/data;", f"[[ -d ~/{FOLDER} ]]; ls ~/{FOLDER}/.file_mounts/data;"),
        ("ls sky_workdir ~/sky_workdirs ~/data-2 /mnt/~/data ~/rel ~/datab.c", None),
    ],
)
def test_commands_name_the_jobs_own_folder(before: str, after: str | None) -> None:
    """Whole names below the home only; the form is kept, so that quotes mean the same."""
    assert file_mounts.replace_paths(before, folder=FOLDER, mounts=MOUNTS) == (before if after is None else after)


@pytest.mark.process
def test_two_runs_of_one_home_read_their_own_files(tmp_path: Path) -> None:
    """By the commands as bash runs them, with all ways to name the home."""
    script = 'cat ~/sky_workdir/x "$HOME/sky_workdir/x" ${HOME}/data\n'
    for run in ("first", "second"):
        (tmp_path / f"gpu-launch/{run}/.file_mounts").mkdir(parents=True)
        (tmp_path / f"gpu-launch/{run}/x").write_text(f"{run} ")
        (tmp_path / f"gpu-launch/{run}/.file_mounts/data").write_text(f"data of {run}")
    for run in ("first", "second"):
        commands = file_mounts.replace_paths(script, folder=f"gpu-launch/{run}", mounts=MOUNTS)
        result = subprocess.run(
            ["bash", "-c", commands],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            check=True,
        )
        assert result.stdout.decode() == f"{run} {run} data of {run}"
