"""The commands of a task file on one node: their variables, exit codes and signals."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.detached import task_main


def test_task_has_skypilot_variables() -> None:
    """All that SkyPilot documents for `setup` and `run`, the head node's address first."""
    found = task_main.build_variables(
        rank=1, ips=["10.0.0.2", "10.0.0.3"], gpus_per_node=4, task_id="sky-1_x_1", cluster="lab", user="ada"
    )
    assert json.loads(found.pop("SKYPILOT_CLUSTER_INFO"))["cluster_name"] == "lab"
    assert found == {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.3",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_SETUP_NODE_RANK": "1",
        "SKYPILOT_SETUP_NODE_IPS": "10.0.0.2\n10.0.0.3",
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_TASK_ID": "sky-1_x_1",
        "SKYPILOT_USER": "ada",
    }
    assert task_main.build_task_id("run-20261121-120000-abc123", "train") == "sky-20261121-120000-abc123_train_1"


def test_task_has_no_variables_of_the_torch_launcher():
    """It may start torchrun itself, which must not take itself for a rank of another."""
    left = task_main.without_rank(
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "x",
            "TORCHELASTIC_RUN_ID": "r",
            "NCCL_DEBUG": "INFO",
            "HOME": "h",
        }
    )
    assert left == {"NCCL_DEBUG": "INFO", "HOME": "h"}


@pytest.fixture
def bash() -> Iterator[task_main.Bash]:
    """A runner of scripts; the signal handlers of the tests come back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield task_main.Bash(kept=("LR",))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.process
def test_exit_codes_are_those_of_a_shell(bash: task_main.Bash, tmp_path: Path):
    """Whatever ended it."""
    home = {"HOME": str(tmp_path)}
    assert bash.run('exit "$CODE"', home | {"CODE": "5"}) == 5
    assert bash.run("kill -9 $$", home) == 137
    assert bash.run("kill -TERM $PPID; exec sleep 60", home) == 143
    assert bash.run("touch never", home) == 143, "nothing more is started"


@pytest.mark.process
def test_scripts_see_what_the_script_before_wrote_into_bashrc(
    bash: task_main.Bash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As SkyPilot's `setup` prepares `run`; the task's own variables and the node's rank stay."""
    monkeypatch.setenv("LR", "0.1")
    environ = {"HOME": str(tmp_path), "SKYPILOT_NODE_RANK": "1", "OUT": str(tmp_path / "out")}
    assert (
        bash.run("echo 'export TEST_VAR=a LR=9 SKYPILOT_NODE_RANK=9; twice() { echo $1$1; }' >> ~/.bashrc", environ)
        == 0
    )
    script = '#!/bin/bash\n{ echo "$TEST_VAR $LR $SKYPILOT_NODE_RANK $-"; twice b; } >"$OUT" 2>&1\nexit 7'
    assert bash.run(script, environ) == 7
    first, *rest = (tmp_path / "out").read_text().splitlines()
    assert first.startswith("a 0.1 1 ") and "i" not in first.split()[-1]
    assert rest[0] == "bb"


@pytest.mark.process
def test_signal_while_bashrc_is_read_starts_no_commands(bash: task_main.Bash, tmp_path: Path):
    """The processes that read the file are killed: an interactive bash ignores the signal."""
    (tmp_path / ".bashrc").write_text("kill -TERM $PPID\nsleep 1000\n")
    assert bash.run("touch ~/never", {"HOME": str(tmp_path)}) == 143
    assert not (tmp_path / "never").exists()


@pytest.mark.process
def test_scripts_run_without_a_temporary_folder(
    bash: task_main.Bash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without what the file defines, which is said."""
    (tmp_path / ".bashrc").write_text("export TEST_VAR=a\n")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        assert bash.run('exit "${TEST_VAR:-4}"', {"HOME": str(tmp_path)}) == 4
    assert "~/.bashrc is not read" in capsys.readouterr().err
