"""Tab completion, as JupyterLab's kernel asks for it."""

from __future__ import annotations

import threading

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from gpu_launch.magics import completion
from gpu_launch.options import definition

FILES = ("train.py", "trial.py", "data.csv", "a b.py", ".hidden.py", "sub/deep.py")


@pytest.fixture
def sources(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    return completion.CompletionSources(
        models=lambda: ("RTX 5090", "RTX 5070", "H200"),
        names=lambda: ("model", "_private", "momentum"),
        runs=lambda: ("run-1", "run-2"),
        jobs=lambda: ("run-2",),
        folder=lambda: tmp_path,
    )


@pytest.fixture(params=[True, False], ids=["jedi", "no jedi"])
def ask(request, sources):
    """What the kernel answers for a cell with the cursor at its end: the texts, and what they replace."""
    settings = Config()
    settings.HistoryManager.enabled = False
    shell = InteractiveShell(config=settings)
    shell.Completer.use_jedi = request.param
    completion.install(shell, sources)

    def call(cell):
        with provisionalcompleter():
            found = list(shell.Completer.completions(cell, len(cell)))
        assert len({(one.start, one.end) for one in found}) <= 1
        return [one.text for one in found], cell[found[0].start :] if found else None

    yield call
    shell.restore_sys_module_state()
    shell.history_manager.end_session()


@pytest.mark.parametrize(
    ("cell", "texts", "replaced"),
    [
        ("%gpu_launch --nn", ["--nnodes"], "--nn"),
        ("%%gpu_launch --loc", ["--local-ranks-filter"], "--loc"),
        ("import torch\n%gpu_launch --det", ["--detach"], "--det"),
        ("%gpu_launch --model R", ['"RTX 5090"', '"RTX 5070"'], "R"),
        ("%gpu_launch --model=h", ["H200"], "h"),
        ('%gpu_launch --model "RTX 50', ['"RTX 5090"', '"RTX 5070"'], '"RTX 50'),
        ('%gpu_launch --model "RTX 5090,H', ['"RTX 5090,H200"'], '"RTX 5090,H'),
        ("%gpu_launch -t ", ["0", "1", "2", "3"], ""),
        ("%gpu_launch --keep ", ["0s", "10m", "30m", "1h", "4h", "1d"], ""),
        ("%gpu_launch --send mo", ["model", "momentum"], "mo"),
        ("%gpu_launch --send momentum,mod", ["model"], "mod"),
        ("%gpu_launch --cold tr", ["train.py", "trial.py"], "tr"),
        ("%gpu_launch ", ['"a b.py"', "sub/", "train.py", "trial.py"], ""),
        ("%gpu_launch sub/", ["sub/deep.py"], "sub/"),
        ('%gpu_launch "a', ['"a b.py"'], '"a'),
        ("%gpu_launch .h", [".hidden.py"], ".h"),
        ("%gpu_launch --nnodes 2 train.py --data da", ["data.csv"], "da"),
        ("%gpu_launch --log-dir s", ["sub/"], "s"),
        ("%%gpu_ranks --re", ["--restart", "--return", "--redirects"], "--re"),
        ("%%gpu_ranks --restart --model H", ["H200"], "H"),
        ("%gpu_ranks --sto", ["--stop"], "--sto"),
        ("%gpu_stacks ", ["--full", "run-2"], ""),
        ("%%gpu --g", ["--gpus"], "--g"),
        ("%%gpu --gpus 2 --model H", ["H200"], "H"),
        ("%gpu_logs r", ["run-1", "run-2"], "r"),
        ("%gpu_logs --ra", ["--rank"], "--ra"),
        ("%gpu_cancel ", ["all", "run-2"], ""),
        ("%gpu_release run", ["run-2"], "run"),
    ],
)
def test_completions_by_context(ask, cell, texts, replaced):
    """Flags, what they take, files and runs; nothing of IPython's own beside them."""
    assert ask(cell) == (texts, replaced)


def test_other_lines_are_left_to_ipython(ask):
    """Python too that looks a little like ours."""
    assert "print" in ask("pri")[0]
    assert not any(text.startswith("--") for text in ask("gpu_launch --nn")[0])


def test_every_flag_can_be_completed(sources):
    """In the order of the help."""
    found = completion.complete("%gpu_launch --", sources)
    assert found.texts == tuple(option.flag for option in definition.OPTIONS)


def test_installing_twice_has_no_effect(sources):
    """%reload_ext does it."""
    settings = Config()
    settings.HistoryManager.enabled = False
    shell = InteractiveShell(config=settings)
    completion.install(shell, sources)
    completion.install(shell, sources)
    assert len(shell.Completer.custom_matchers) == 1
    shell.restore_sys_module_state()
    shell.history_manager.end_session()


def test_cluster_is_polled_at_most_every_half_minute():
    """Half a minute by the clock; not for every key."""
    now, asked = [0.0], []

    def ask():
        asked.append(now[0])
        return ("H200",)

    models = completion.CachedCall(ask, clock=lambda: now[0])
    assert [models.get(), models.get()] == [("H200",)] * 2
    # The answer comes before the thread's end, and one that lives is not followed by another.
    models._renewal.join()
    now[0] = 29.0
    models.get()
    assert asked == [0.0]
    now[0] = 31.0
    models.get()
    models._renewal.join()
    assert asked == [0.0, 31.0]


def test_unresponsive_cluster_does_not_delay_completion(monkeypatch):
    """The key press ends without completions, and the answer is there for a later one."""
    monkeypatch.setattr(completion, "_WAIT_S", 0.01)
    answers = threading.Event()
    models = completion.CachedCall(lambda: [answers.wait(10), "H200"][1:])
    assert list(models.get()) == []
    answers.set()
    models._renewal.join()
    assert models.get() == ["H200"]


def test_failing_cluster_gives_no_completions():
    """And is not asked again at once."""
    asked = []

    def ask():
        asked.append(1)
        raise OSError

    models = completion.CachedCall(ask)
    assert [list(models.get()), list(models.get())] == [[], []]
    assert len(asked) == 1
