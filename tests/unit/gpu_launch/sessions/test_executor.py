"""Cells on a rank behave as in a notebook."""

from __future__ import annotations

import inspect
import linecache
import signal
import threading
from types import ModuleType

import pytest

from gpu_launch.sessions.executor import CellOutcome, SessionExecutor


class Prompt:
    """Runs cells one after another."""

    def __init__(self):
        self.module = ModuleType("__main__")
        self.executor = SessionExecutor(self.module)
        self.number = 0

    def run(self, body, *, skipped=1):
        """A cell below its magic's own line."""
        self.number += 1
        label = f"Cell In[{self.number}]"
        source = "%%gpu_ranks\n" * skipped + body
        return self.executor.run(
            self.number, lambda: self.executor.execute(body, label=label, source=source, skipped=skipped)
        )


@pytest.fixture
def prompt(monkeypatch):
    """A prompt whose signal handler and shown values are the test's own."""
    before = signal.getsignal(signal.SIGINT)
    yield Prompt()
    signal.signal(signal.SIGINT, before)


def test_names_persist_and_the_last_value_is_shown(prompt, capsys):
    """From cell to cell; nothing is shown for None, a statement, or a line that ends with a semicolon."""
    assert prompt.run("x = [1]\nprint('made')").outcome is CellOutcome.DONE
    assert prompt.run("x.append('é')\nx").outcome is CellOutcome.DONE
    prompt.run("x;  # quiet")
    prompt.run("None")
    prompt.run("_[0]")
    prompt.run("")
    prompt.run("# only a comment")
    assert capsys.readouterr().out == "made\n[1, 'é']\n1\n"


def test_a_traceback_has_the_cells_own_lines(prompt):
    """Numbered as the notebook shows them, also those of functions that an earlier cell made; none of ours."""
    prompt.run("def f(x):\n    return 1 / x\n")
    outcome = prompt.run("y = 2\nf(0)")
    assert (outcome.outcome, outcome.at_ns > 0) == (CellOutcome.FAILED, True)
    # Python marks the place within some lines; versions differ in which.
    assert [line for line in outcome.error.splitlines() if not set(line) <= set(" ~^")] == [
        "Traceback (most recent call last):",
        "  Cell In[2], line 3",
        "    f(0)",
        "  Cell In[1], line 3, in f",
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]
    assert vars(prompt.module)["y"] == 2


def test_chained_exceptions_are_shown(prompt):
    """Chained errors, each with its lines."""
    error = prompt.run("try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('bad') from e").error
    assert "Cell In[1], line 3\n    {}['k']" in error
    assert "direct cause" in error
    assert error.endswith("ValueError: bad")


def test_a_syntax_error_shows_its_line(prompt):
    """And nothing of the cell runs."""
    outcome = prompt.run("z = 1\nz = = 2")
    assert outcome.outcome is CellOutcome.FAILED
    assert outcome.error.startswith("  Cell In[1], line 3\n    z = = 2\n")
    assert outcome.error.endswith("SyntaxError: invalid syntax")
    assert "z" not in vars(prompt.module)


@pytest.mark.parametrize(
    ("body", "how", "said"),
    [
        ("import sys; sys.exit()", CellOutcome.DONE, ""),
        ("raise SystemExit(0)", CellOutcome.DONE, ""),
        ("raise SystemExit(3)", CellOutcome.FAILED, "SystemExit: 3"),
        ("raise SystemExit('no data')", CellOutcome.FAILED, "SystemExit: no data"),
        ("raise KeyboardInterrupt", CellOutcome.INTERRUPTED, "KeyboardInterrupt"),
        ("class E(BaseException): pass\nraise E('odd')", CellOutcome.FAILED, "E: odd"),
    ],
)
def test_no_exception_of_a_cell_ends_the_rank(prompt, body, how, said):
    """Every end is told."""
    outcome = prompt.run(body)
    assert outcome.outcome is how
    assert outcome.error.endswith(said)
    assert prompt.run("1").outcome is CellOutcome.DONE


def test_exception_whose_text_raises_is_reported(prompt):
    """Its text raises."""
    outcome = prompt.run("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E")
    assert outcome.outcome is CellOutcome.FAILED
    assert "exception str() failed" in outcome.error


def test_interrupt_stops_only_its_own_cell(prompt):
    """In its system call; one that comes late or too early does nothing."""
    entered = threading.Event()
    vars(prompt.module)["entered"] = entered

    def press():
        entered.wait()
        prompt.executor.interrupt(99)
        prompt.executor.interrupt(1)

    thread = threading.Thread(target=press)
    thread.start()
    outcome = prompt.run("import time\nentered.set()\ntime.sleep(60)")
    thread.join()
    assert outcome.outcome is CellOutcome.INTERRUPTED
    assert "Cell In[1], line 4\n    time.sleep(60)" in outcome.error
    prompt.executor.interrupt(1)
    signal.raise_signal(signal.SIGINT)
    assert prompt.run("x = 1").outcome is CellOutcome.DONE


def test_signal_handler_of_a_cell_does_not_persist(prompt):
    """The next one can be interrupted."""
    prompt.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert prompt.run("signal.raise_signal(signal.SIGINT)").outcome is CellOutcome.INTERRUPTED


def test_future_statements_apply_to_later_cells(prompt):
    """As in a notebook."""
    prompt.run("from __future__ import annotations")
    assert prompt.run("def f(x: Unknown): pass").outcome is CellOutcome.DONE


def test_source_can_be_looked_up(prompt):
    """`inspect.getsource` works on a cell's functions, as torch's own tools need it."""
    prompt.run("def f():\n    return 1\n")
    assert inspect.getsource(vars(prompt.module)["f"]) == "def f():\n    return 1\n"
    linecache.checkcache()
    assert linecache.getline("Cell In[1]", 3) == "    return 1\n"
