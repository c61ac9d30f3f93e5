"""Variables and functions of a user's `~/.bashrc`, read by a real bash in a home of the test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpu_launch.detached.bashrc import ShellState, read_bashrc

pytestmark = pytest.mark.process

#: The beginning of Debian's own `~/.bashrc`.
GUARD = 'case $- in\n    *i*) ;;\n      *) return;;\nesac\n[ -z "$PS1" ] && return\n'


def _read(tmp_path: Path, text: str | None, *, timeout_s: float = 60.0, **variables: str) -> ShellState:
    folder = tmp_path / "folder"
    folder.mkdir()
    if text is not None:
        (tmp_path / ".bashrc").write_text(text)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)} | variables
    return read_bashrc(environ, kept={"KEPT"}, folder=folder, timeout_s=timeout_s)


def test_variables_and_functions_are_read_behind_the_guard_for_terminals(tmp_path: Path):
    """Also with values of several lines, patterns of completion scripts, and much output."""
    state = _read(
        tmp_path,
        GUARD
        + "export TEST_VAR=$'two\\nlines' KEPT=changed GONE=\nunset LEAVES\nexport PATH=/opt/tool/bin:$PATH\nlocal_var=x\n"
        + 'shopt -s extglob\ngreet() { case $1 in @(a|b)) echo "hello $1 $TEST_VAR";; esac; }\necho noise; echo noise >&2\n',
        KEPT="task",
        LEAVES="x",
    )
    assert state.environ["TEST_VAR"] == "two\nlines"
    assert (state.environ["KEPT"], state.environ["GONE"]) == ("task", "")
    assert not {"LEAVES", "local_var", "PS1", "SHLVL", "PWD"} & state.environ.keys()
    assert state.environ["PATH"].startswith("/opt/tool/bin:")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["functions.sh"], "no file keeps values"
    result = subprocess.run(
        ["bash", "-c", f". {state.functions}; greet a"], env=state.environ, capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("hello a two\nlines\n", "")


@pytest.mark.parametrize("text", [None, "export A=b\nexit 3\n", "export A=b\nexec false\n", "kill -9 $$\n"])
def test_missing_or_failing_file_changes_nothing_and_fails_nothing(tmp_path: Path, text: str | None):
    """The commands run as they would without it."""
    state = _read(tmp_path, text, KEPT="task")
    assert state == ShellState(environ={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KEPT": "task"})


def test_a_failing_command_in_the_file_does_not_end_it(tmp_path: Path):
    """As in a terminal; after an error of syntax the rest is missing."""
    state = _read(tmp_path, "false\nno-such-program\nexport AFTER=1\nif\n")
    assert state.environ["AFTER"] == "1" and state.functions is not None


def test_a_file_that_does_not_end_is_killed(tmp_path: Path):
    """With the processes that it waits for."""
    state = _read(tmp_path, "export A=b\nsleep 1000\n", timeout_s=0.2)
    assert "A" not in state.environ and state.functions is None


def test_group_of_the_reading_bash_is_reported(tmp_path: Path):
    """So that a signal reaches it."""
    (tmp_path / ".bashrc").write_text("export MINE=$$\n")
    groups: list[int] = []
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    state = read_bashrc(environ, kept=(), folder=tmp_path, on_start=groups.append)
    assert groups == [int(state.environ["MINE"])]
