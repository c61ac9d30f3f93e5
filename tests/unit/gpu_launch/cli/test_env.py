"""A user's own Python environments: what `gpu-launch env` makes, lists and removes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_launch import environment
from gpu_launch.cli import env, main
from gpu_launch.common import run_folder
from gpu_launch.errors import GpuLaunchError, UsageError

pytestmark = pytest.mark.process

OWN_CODE = "import sys, click, mine; print(sys.prefix, click.__file__, mine.WORD)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user on the cluster."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPUHUB_BROKER_URL", "http://127.0.0.1:1/services/broker")
    return tmp_path


def test_an_environment_has_the_images_packages_and_its_own_first(home: Path) -> None:
    """And its kernel has the form that Jupyter expects, with the environment's programs first."""
    made = env.create_environment(home, "mine")
    (packages,) = made.folder.glob("lib/python3*/site-packages")
    (packages / "mine.py").write_text("WORD = 'own'")
    run = subprocess.run([made.python, "-c", OWN_CODE], check=True, capture_output=True, text=True)
    prefix, click_file, word = run.stdout.split()
    assert (prefix, word) == (str(made.folder), "own")
    assert not Path(click_file).is_relative_to(made.folder)
    (packages / "click.py").write_text("")
    run = subprocess.run([made.python, "-c", OWN_CODE], check=True, capture_output=True, text=True)
    assert run.stdout.split()[1] == str(packages / "click.py")
    kernel = json.loads((home / ".local/share/jupyter/kernels/mine/kernel.json").read_text())
    assert kernel["argv"] == [f"{home}/envs/mine/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    assert kernel["env"] == {"VIRTUAL_ENV": f"{home}/envs/mine", "PATH": f"{home}/envs/mine/bin:${{PATH}}"}


def test_environments_are_listed_with_what_is_wrong_and_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second creation completes one without a kernel; one without its Python has to be removed."""
    assert main.run_command(["env", "list"]) == 0
    assert "No environments" in capsys.readouterr().out
    assert main.run_command(["env", "create", "mine"]) == 0
    (home / ".local/share/jupyter/kernels/mine/kernel.json").unlink()
    (home / "envs/old/bin").mkdir(parents=True)
    (home / "envs/old/bin/python").symlink_to("/usr/bin/python2.7")
    capsys.readouterr()
    assert main.run_command(["env", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["problem"].partition(":")[0]) for row in listed] == [
        ("mine", "it is no kernel"),
        ("old", "its Python is missing"),
    ]
    assert main.run_command(["env", "create", "mine"]) == 0
    assert env.find_environments(home)[0].problem == ""
    with pytest.raises(UsageError, match="gpu-launch env remove old removes it"):
        env.create_environment(home, "old")
    for name in ("mine", "old"):
        assert main.run_command(["env", "remove", name]) == 0
    assert env.find_environments(home) == []
    assert not (home / ".local/share/jupyter/kernels/mine").exists()
    assert main.run_command(["env", "remove", "mine"]) == 2


@pytest.mark.parametrize("name", ["", "python3", "..", "a/b", "A", "-a", "a" * 32, "a b"])
def test_names_that_are_no_folder_and_kernel_are_refused(name: str) -> None:
    """`python3` would stand beside the image's own kernel under the same name."""
    with pytest.raises(UsageError, match="a name has 1 to 31"):
        env.check_name(name)


def test_a_laptop_has_no_environments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They are in the home on the cluster."""
    monkeypatch.delenv("GPUHUB_BROKER_URL", raising=False)
    assert main.run_command(["env", "create", "mine"]) == 2
    assert "in a terminal of JupyterLab" in capsys.readouterr().err


def test_the_reason_of_uv_is_shown(home: Path) -> None:
    """Such as a full disk, or a folder that cannot be written."""
    (home / "envs").write_text("a file")
    with pytest.raises(GpuLaunchError, match="uv venv failed: "):
        env.create_environment(home, "mine")


def test_workers_use_an_interpreter_in_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes have the home; another interpreter is the image's, which each worker has itself."""
    assert environment.find_own_interpreter(home) == ""
    assert "python" not in run_folder.build_settings()
    monkeypatch.setattr(sys, "executable", f"{home}/envs/mine/bin/python")
    python = environment.find_own_interpreter(home)
    assert run_folder.build_settings(python=python)["python"] == f"{home}/envs/mine/bin/python"
