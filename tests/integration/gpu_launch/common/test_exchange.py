"""Values exchanged between a notebook and ranks: real processes, and cells of a real IPython."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from gpu_launch.common import exchange
from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.magics import notebook

pytestmark = pytest.mark.torch


@pytest.fixture
def shell():
    """A notebook's shell without a history on disk."""
    settings = Config()
    settings.HistoryManager.enabled = False
    # For pickle, the notebook's `__main__` is the shell's module.
    before = sys.modules["__main__"]
    made = InteractiveShell(config=settings)
    yield made
    made.restore_sys_module_state()
    sys.modules["__main__"] = before
    made.history_manager.end_session()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "exchange"


@pytest.fixture
def run(tmp_path, folder):
    """Return a function that runs a script in the given number of ranks, one after another, and returns their results."""

    def call(body, *arguments, ranks=1, module=False, environ=None):
        (tmp_path / "script.py").write_text(textwrap.dedent(body))
        words = ["--exchange", str(folder), *(["-m", "script"] if module else ["script.py"]), *arguments]
        return [
            subprocess.run(
                [sys.executable, "-m", "gpu_launch.worker.rank_main", *words],
                cwd=tmp_path,
                env=os.environ | {"RANK": str(rank)} | (environ or {}),
                capture_output=True,
                text=True,
                check=False,
            )
            for rank in range(ranks)
        ]

    return call


def test_variables_are_sent_and_returned_by_rank(folder, run):
    """An object that two variables share is shared in the ranks too; only the owner can read the folder."""
    shared = [1]
    exchange.build_exchange(send={"first": shared, "pair": (shared, {"é": b"\0"})}, returns=("found", "first")).write(
        folder
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    ends = run("import os; first.append(int(os.environ['RANK'])); found = pair", ranks=2)
    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * 2
    results, returned = exchange.collect_results(folder, 2)
    assert results == []
    assert returned == {"found": [([1, 0], {"é": b"\0"}), ([1, 1], {"é": b"\0"})], "first": [[1, 0], [1, 1]]}
    assert not folder.exists()


def test_no_variables_create_no_exchange():
    """No folder is created either."""
    assert exchange.build_exchange() is None


def test_a_function_of_the_notebook_is_called_in_every_rank(shell, folder, run):
    """Its globals, closures, classes and keyword arguments are sent, and results have the notebook's classes."""
    shell.run_cell(
        "import dataclasses\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "offset = 10\n"
        "def make(step):\n    def train(rank_text, *, scale):\n        import os\n"
        "        return Point(offset + step * scale * int(os.environ[rank_text]))\n    return train\n"
        "train = make(3)",
        store_history=True,
    )
    call = exchange.FunctionCall(function=shell.user_ns["train"], arguments=("RANK",), keywords={"scale": 2})
    exchange.build_exchange(call=call, labels=notebook.labels(shell)).write(folder)
    assert [end.stderr for end in run("", ranks=3)] == [""] * 3
    results, returned = exchange.collect_results(folder, 3)
    assert results == [shell.user_ns["Point"](x) for x in (10, 16, 22)]
    assert returned == {}


def test_rank_can_unpickle_classes_of_the_notebook(shell, folder, run):
    """torch.save of a whole model requires this."""
    shell.run_cell("import pickle\nclass Net:\n    pass\ndef train():\n    return len(pickle.dumps(Net())) > 0\n")
    exchange.build_exchange(call=exchange.FunctionCall(function=shell.user_ns["train"])).write(folder)
    (end,) = run("")
    assert end.stderr == ""
    assert exchange.collect_results(folder, 1)[0] == [True]


def test_traceback_shows_the_lines_of_the_cell(shell, folder, run):
    """The traceback has the cell's name and no frame of gpu_launch."""
    shell.run_cell("1", store_history=True)
    shell.run_cell("# a comment\ndef train():\n    raise ValueError('bad é')", store_history=True)
    exchange.build_exchange(
        call=exchange.FunctionCall(function=shell.user_ns["train"]), labels=notebook.labels(shell)
    ).write(folder)
    (end,) = run("")
    assert end.returncode == 1
    assert end.stderr == (
        "Traceback (most recent call last):\n"
        '  File "Cell In[2]", line 3, in train\n'
        "    raise ValueError('bad é')\n"
        "ValueError: bad é\n"
    )


def test_line_numbers_match_the_notebooks_cell(folder, run):
    """Line 1 is the line of the magic."""
    cell = exchange.CellSource(label="Cell In[7]", source="%%gpu_launch\nx = 1\nx / 0\n", skipped=1)
    exchange.build_exchange(cell=cell).write(folder)
    (end,) = run("x = 1\nx / 0\n")
    assert 'File "Cell In[7]", line 3, in <module>\n    x / 0\n' in end.stderr
    assert end.stderr.startswith('Traceback (most recent call last):\n  File "Cell In[7]"')
    assert "script.py" not in end.stderr


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (threading.Lock(), "a cannot be pickled"),
        ({"x": [1, threading.Lock()]}, "a['x'][1] cannot be pickled"),
        (type("Box", (), {"__init__": lambda self: setattr(self, "lock", threading.Lock())})(), "a.lock cannot"),
        ((number for number in ()), "a cannot be pickled: cannot pickle 'generator' object"),
    ],
    ids=["itself", "inside", "attribute", "generator"],
)
def test_unpicklable_variable_is_refused_before_the_start(value, part):
    """The error names the variable, the part of it, and the reason."""
    with pytest.raises(UsageError) as raised:
        exchange.build_exchange(send={"fine": 1, "a": value})
    assert str(raised.value).startswith("--send a: ")
    assert part in str(raised.value)


def test_function_with_an_unpicklable_global_is_refused(shell):
    """The error names the notebook's variable."""
    shell.run_cell("import threading\nlock = threading.Lock()\ndef train():\n    return lock\n")
    with pytest.raises(UsageError, match="lock, which train uses, cannot be pickled"):
        exchange.build_exchange(call=exchange.FunctionCall(function=shell.user_ns["train"]))
    with pytest.raises(UsageError, match="argument 1 of train cannot be pickled"):
        shell.run_cell("def train(a, b):\n    pass\n")
        exchange.build_exchange(
            call=exchange.FunctionCall(function=shell.user_ns["train"], arguments=(1, threading.Lock()))
        )


def test_too_large_variables_are_refused_with_a_remedy(monkeypatch):
    """The size is checked before anything is copied."""
    monkeypatch.setattr(exchange, "MAX_BYTES", 1000)
    with pytest.raises(UsageError, match=r"--send big: that is more than .*torch\.save"):
        exchange.build_exchange(send={"big": bytes(2000)})


def test_failure_of_one_value_keeps_the_others(folder, run):
    """Each failure is reported with its rank, and the other values stay in the folder."""
    exchange.build_exchange(returns=("loss", "lock", "nowhere")).write(folder)
    (end,) = run("import threading\nloss = 0.5\nlock = threading.Lock()")
    assert (end.returncode, end.stderr) == (0, "")
    with pytest.raises(LaunchFailed) as raised:
        exchange.collect_results(folder, 1)
    said = str(raised.value)
    assert "rank 0: lock cannot be pickled: cannot pickle '_thread.lock' object" in said
    assert "rank 0: the script has no variable nowhere at its end" in said
    assert str(folder) in said
    told = pickle.loads((folder / "result-0.pkl").read_bytes())
    assert exchange.load_value(told["returned"]["loss"]) == 0.5


def test_value_that_the_notebook_cannot_unpickle_is_reported(folder, run, tmp_path):
    """The value's class is in a module that only the ranks have."""
    exchange.build_exchange(returns=("box",)).write(folder)
    (tmp_path / "rank_only_module.py").write_text("class Box: pass")
    (end,) = run("import rank_only_module; box = rank_only_module.Box()")
    assert end.stderr == ""
    with pytest.raises(LaunchFailed, match=r"rank 0: box cannot be read here \(ModuleNotFoundError"):
        exchange.collect_results(folder, 1)


def test_rank_without_returned_values_is_reported(folder, monkeypatch):
    """The rank exited with status 0 before it wrote its values."""
    monkeypatch.setattr(exchange, "_VISIBLE_TIMEOUT_S", 0.0)
    exchange.build_exchange(returns=("x",)).write(folder)
    with pytest.raises(LaunchFailed, match=r"rank 0: no result; did the script end with os\._exit"):
        exchange.collect_results(folder, 1)


def test_variable_that_the_rank_cannot_unpickle_is_reported(folder, run):
    """The error has the reason and the origin of the variable."""
    module = type(sys)("only_in_the_notebook")
    value = type("Box", (), {"__module__": "only_in_the_notebook"})
    module.Box = value
    sys.modules["only_in_the_notebook"] = module
    try:
        exchange.build_exchange(send={"box": value()}).write(folder)
    finally:
        del sys.modules["only_in_the_notebook"]
    (end,) = run("")
    assert end.returncode == 1
    assert "No module named 'only_in_the_notebook'" in end.stderr
    assert "gpu_launch: what --send gave cannot be read in the rank" in end.stderr


@pytest.mark.parametrize(("code", "comes"), [("0", True), ("None", True), ("3", False), ("'bye'", False)])
def test_values_return_from_a_script_that_calls_sys_exit(folder, run, code, comes):
    """Values return if the exit code is 0, and the exit code is the script's."""
    exchange.build_exchange(returns=("x",)).write(folder)
    (end,) = run(f"import sys\nx = 1\nsys.exit({code})")
    assert end.returncode == {"3": 3, "'bye'": 1}.get(code, 0)
    assert (folder / "result-0.pkl").exists() is comes


def test_tensors_are_sent_and_returned(folder, run):
    """Tensors keep their values."""
    exchange.build_exchange(send={"weights": torch.arange(4.0)}, returns=("back",)).write(folder)
    (end,) = run("back = [weights + 1]")
    assert end.stderr == ""
    assert exchange.collect_results(folder, 1)[1]["back"][0][0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_tensors_arrive_on_the_cpu(monkeypatch):
    """Tensors arrive on the CPU from any device, because the receiver has other GPUs than the sender."""
    places, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **named: places.append(named["map_location"]) or load(*a, **named))
    assert exchange.load_value(exchange.dump_value({"w": torch.ones(2)}, "w"))["w"].tolist() == [1.0, 1.0]
    assert places == ["cpu"]


def test_exchange_files_describe_the_cell(folder):
    """The exchange's files describe the cell for `ranks.script`."""
    cell = exchange.CellSource(label="Cell In[3]", source="%%gpu_launch\npass\n", skipped=1)
    exchange.build_exchange(returns=("x",), cell=cell).write(folder)
    assert json.loads((folder / "returns.json").read_text()) == ["x"]
    assert json.loads((folder / "sources.json").read_text()) == {
        "cell": {"label": "Cell In[3]", "skipped": 1},
        "sources": {"Cell In[3]": "%%gpu_launch\npass\n"},
    }
