"""The magics as a notebook runs them, with a launch that runs the ranks on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import gpu_launch
from gpu_launch.common import exchange, run_folder
from gpu_launch.common.exchange import collect_results
from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.launch import notebook_launch, request
from gpu_launch.launch.state import LaunchResult
from gpu_launch.magics import magics
from gpu_launch.options import command
from gpu_launch.output import stack_request
from gpu_launch.output.stacks import RankStacks
from tests.support.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A notebook with the extension, without a history on disk."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = Config()
    settings.HistoryManager.enabled = False
    before = sys.modules["__main__"]
    made = InteractiveShell(config=settings)
    magics.register(made)
    yield made
    made.restore_sys_module_state()
    sys.modules["__main__"] = before
    made.history_manager.end_session()


class RecordedLaunch:
    """Stands for `notebook_launch.launch`: two ranks, one after another, as torchrun's workers."""

    def __init__(self, folder):
        self.folder, self.options, self.cell, self.ends = folder, None, None, []

    def __call__(self, options, *, cell=None, before, exchange=None):
        self.options, self.cell = options, cell
        place = self.folder / "exchange"
        script = options.script
        if cell is not None:
            (self.folder / "cell.py").write_text(cell)
            script = "cell.py"
        if exchange is not None:
            exchange.write(place)
        words = ["--exchange", str(place), script, *options.arguments]
        self.ends = [
            subprocess.run(
                [sys.executable, "-m", "gpu_launch.worker.rank_main", *words],
                env=os.environ | {"RANK": str(rank)},
                capture_output=True,
                text=True,
                check=False,
            )
            for rank in range(2)
        ]
        if any(end.returncode for end in self.ends):
            raise LaunchFailed(self.ends[0].stderr)
        results, returned = collect_results(place, 2)
        return LaunchResult(
            run_id="run", seconds=0.0, ranks=2, nodes=("a",), logs=place, results=results, returned=returned
        )


@pytest.fixture
def launched(monkeypatch, tmp_path):
    found = RecordedLaunch(tmp_path)
    monkeypatch.setattr(notebook_launch, "launch", found)
    return found


def run(shell, text):
    """A cell as a person runs it; its error, None for none."""
    return shell.run_cell(text, store_history=True).error_in_exec


@pytest.mark.process
def test_variables_are_sent_to_a_script_and_returned_as_lists(shell, launched, tmp_path):
    """Into the notebook's own namespace."""
    (tmp_path / "train.py").write_text("import os, sys\nloss = scale * int(os.environ['RANK']) + len(sys.argv)\n")
    assert run(shell, "scale = 5") is None
    assert run(shell, "%gpu_launch --send scale --return loss train.py --epochs 2") is None
    assert shell.user_ns["loss"] == [3, 8]
    assert launched.options.arguments == ("--epochs", "2")


@pytest.mark.process
def test_a_cells_failure_names_the_cell_and_its_line(shell, launched):
    """As the notebook counts both, whatever stands above the magic's line."""
    run(shell, "pass")
    error = run(shell, "%%time\n%%gpu_launch\n\nx = 1\nx / 0\n")
    assert isinstance(error, LaunchFailed)
    assert 'File "Cell In[2]", line 5, in <module>\n    x / 0\n' in str(error)


@pytest.mark.process
def test_cell_run_by_a_program_has_a_name(shell, launched):
    """Run by a program."""
    with pytest.raises(LaunchFailed) as raised:
        shell.run_cell_magic("gpu_launch", "--nnodes 1", "1 / 0\n")
    assert 'File "Cell In[1]", line 2, in <module>\n    1 / 0\n' in str(raised.value)


def test_cell_with_a_syntax_error_starts_nothing(shell, launched):
    """The line is named as the notebook counts."""
    error = run(shell, "%%gpu_launch\nx = 1\nprint(\n")
    assert isinstance(error, UsageError)
    assert str(error) == "Cell In[1], line 3: '(' was never closed\n    print("
    assert launched.options is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = 1\nx = = 2\n", "train.py, line 2: invalid syntax\n    x = = 2"),
        ("x = '\\d'\n", None),
        ("x = 1\0\n", "train.py"),
        ("# -*- coding: latin-1 -*-\nx = '\xe9'\n", None),
    ],
    ids=["syntax", "a warning alone", "a null byte", "an encoding"],
)
def test_script_with_a_syntax_error_starts_nothing(tmp_path, body, said):
    """As far as it can be seen from here."""
    (tmp_path / "train.py").write_bytes(body.encode("latin-1"))
    wanted = command.parse("train.py")
    if said is None:
        assert request.check_command(wanted, cwd=tmp_path, home=tmp_path, shared=True) == "train.py"
        return
    with pytest.raises(UsageError) as raised:
        request.check_command(wanted, cwd=tmp_path, home=tmp_path, shared=True)
    assert str(raised.value).startswith(said)


def test_undefined_variable_is_refused(shell, launched):
    """With the one that may be meant."""
    run(shell, "learning_rate = 1")
    error = run(shell, "%gpu_launch --send learning_rat train.py")
    assert str(error) == ("--send learning_rat: the notebook has no variable learning_rat. Did you mean learning_rate?")
    assert launched.options is None


@pytest.mark.process
def test_run_calls_a_function_of_the_notebook(shell, launched):
    """Called by `gpu_launch.run`, with its results by rank and its own lines in a failure."""
    shell.user_ns["gpu_launch"] = gpu_launch
    run(shell, "import os\ndef train(a, *, b, fail=False):\n    if fail:\n        raise KeyError('why')\n"
               "    return a + b + int(os.environ['RANK'])")  # fmt: skip
    failed = run(shell, "gpu_launch.run(train, [1], kwargs={'b': 2, 'fail': True})")
    assert str(failed).endswith("KeyError: 'why'\n")
    assert run(shell, "found = gpu_launch.run(train, [1], kwargs={'b': 2}, nnodes='1:2', keep='5m')") is None
    assert shell.user_ns["found"].results == [3, 4]
    assert (launched.options.nnodes, launched.options.least_nnodes, launched.options.keep_s) == (2, 1, 300)
    assert launched.cell == "# gpu_launch.run calls train here.\n"


@pytest.mark.process
def test_run_starts_a_script(launched, tmp_path, monkeypatch):
    """Without a notebook; values by name in and out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("y = [x, int(__import__('os').environ['RANK'])]\n")
    result = gpu_launch.run("train.py", ["--a", 1], send={"x": "é"}, returns=["y"], cold=True)
    assert result.returned == {"y": [["é", 0], ["é", 1]]}
    assert launched.options.arguments == ("--a", "1")
    assert launched.options.cold


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        (("train.py", "abc"), {}, "are a list"),
        (("train.py",), {"kwargs": {"a": 1}}, "kwargs are for a function"),
        ((print,), {"module": True}, "this is a function"),
        (("train.py",), {"cold": True, "preload": ["numpy"]}, "exclude each other"),
        (("train.py",), {"send": {"a b": 1}}, "'a b' is not a Python name"),
    ],
)
def test_run_refuses_invalid_arguments(launched, arguments, named, said):
    """Before anything starts."""
    with pytest.raises(UsageError, match=said):
        gpu_launch.run(*arguments, **named)
    assert launched.options is None


def test_help_is_shown_by_flag_and_by_question_mark(shell, capsys):
    """The same text."""
    run(shell, "%gpu_launch --help")
    assert capsys.readouterr().out == command.USAGE
    assert command.USAGE in shell.find_line_magic("gpu_launch").__doc__
    assert command.USAGE in shell.find_cell_magic("gpu_launch").__doc__


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%gpu_status now", "takes no arguments"),
        ("%gpu_cancel", "the id of one run is needed"),
        ("%gpu_cancel a b", "the id of one run is needed"),
        ("%gpu_cancel run-1", "no broker"),
        ("%gpu_release run-1", "no workers called run-1"),
        ("%gpu_logs run-1", "no run run-1"),
        ("%gpu_logs", "no run yet"),
        ("%gpu_logs --lines", "needs a value"),
        ("%gpu_logs --rank x", "whole number"),
        ("%gpu_logs --colour", "is not understood"),
    ],
)
def test_errors_of_other_magics_have_a_remedy(shell, line, said, monkeypatch):
    """And name what would be right."""
    monkeypatch.delenv("GPUHUB_BROKER_URL", raising=False)
    error = run(shell, line)
    assert isinstance(error, UsageError)
    assert said in str(error)


def test_status_and_release_without_jobs(shell, capsys, monkeypatch):
    """Words, not empty tables."""
    monkeypatch.delenv("GPUHUB_BROKER_URL", raising=False)
    assert run(shell, "%gpu_status") is None
    assert run(shell, "%gpu_release") is None
    check_golden(capsys.readouterr().out, GOLDEN / "status-without-jobs.txt")


def test_detach_submits_cell_and_variable_names(shell, monkeypatch, capsys):
    """And says how to see it."""
    from gpu_launch.detached import submit

    seen = {}

    def take(options, *, cell=None, before, exchange=None):
        seen.update(options=options, cell=cell, exchange=exchange)
        return submit.Submitted(
            run_id="run-1", job_id="j", folder=run_folder.open_run(before_home, "run-1").root, state="waiting", position=2,
            waiting_for="waits for 1 GPU",
        )  # fmt: skip

    before_home = run_folder.Path("/nowhere")
    monkeypatch.setattr(submit, "submit_from_notebook", take)
    assert run(shell, "%%gpu_launch --detach\nprint(1)\n") is None
    assert (seen["cell"], seen["options"].detach) == ("print(1)\n", True)
    assert set(seen["exchange"].files) == {exchange.SOURCES}
    assert capsys.readouterr().out == (
        "run-1 runs without this notebook: waiting, at position 2 in the queue, waits for 1 GPU.\n"
        "%gpu_logs run-1 -f shows its output, %gpu_status its state, and %gpu_cancel run-1 ends it.\n"
    )


def test_gpu_stacks_asks_the_latest_active_run(shell, tmp_path, capsys):
    """The request lies in the folder of that run; ended ones are refused."""
    with pytest.raises(UsageError, match="None of your runs is active"):
        shell.run_line_magic("gpu_stacks", "")
    runs = [run_folder.open_run(tmp_path, f"run-2026010{number}-000000-abc12{number}") for number in range(3)]
    for run in runs:
        (run.logs / "node0").mkdir(parents=True)
    runs[1].heartbeat.touch()
    with pytest.raises(UsageError, match=f"{runs[2].run_id} has ended"):
        shell.run_line_magic("gpu_stacks", "abc122")
    with pytest.raises(UsageError, match="the id of one run is needed"):
        shell.run_line_magic("gpu_stacks", "a b")

    def serve():
        while (asked := stack_request.pop(runs[1])) is None:
            pass
        stack_request.answer(runs[1], asked, [RankStacks(rank=0, node="rig1", problem="has ended")])

    thread = threading.Thread(target=serve)
    thread.start()
    shell.run_line_magic("gpu_stacks", "--full")
    thread.join()
    assert capsys.readouterr().out == "where the rank is:\n  rank 0: has ended (rig1)\n"
