"""Rank sessions on this machine: cells, failures, losses and interrupts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.broker_api import schemas
from tests.support.launch.kernel import Kernel, is_printed_by_both
from tests.support.launch.local_cluster import CONTAINER, Notebook, kill_all, until

DOCS = Path(__file__).parents[3] / "docs" / "launch.md"
TWO_NODES = "--nnodes 2"


@pytest.fixture
def kernel(notebook: Notebook) -> Iterator[Kernel]:
    """A kernel of a notebook with one GPU."""
    with contextlib.closing(Kernel(notebook)) as started:
        yield started


def test_documented_session_example_runs(kernel: Kernel) -> None:
    """The cells of docs/launch.md build a DDP model one after the other."""
    section = DOCS.read_text().split("## Ranks that stay")[1].split("\n## ")[0]
    first, train, look, weight, stop = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert "There is no rank session" in kernel.good("%gpu_ranks")
    shown = kernel.good(first)
    assert "gpu_launch: 2 ranks run on rig1 RTX 5090, rig2 RTX 5070, and hold their GPUs until" in shown
    assert is_printed_by_both("2", shown)
    assert re.search(r"loss \d+\.\d\d at first, 0\.0\d+ now\n", kernel.good(train))
    kernel.good(look)
    shown = kernel.good(weight)
    assert "[rank 0 · rig1] Parameter containing:\n" in shown
    assert "[rank 1" not in shown
    assert re.search(r"^2 ranks on rig1 RTX 5090, rig2 RTX 5070 for \d+ s, idle for \d+ s\.", kernel.good("%gpu_ranks"))
    assert "the ranks on rig1 RTX 5090, rig2 RTX 5070 have ended\n" in kernel.good(stop)
    assert "There is no rank session" in kernel.good("%gpu_ranks")
    kernel.close()
    until(lambda: not kernel.notebook.broker.jobs(schemas.JobState.RUNNING), "its workers are freed")
    until(lambda: not kernel.notebook.left(), "no process left")


def test_values_reach_the_ranks_and_return(kernel: Kernel) -> None:
    """A function of the notebook keeps its cell's lines in tracebacks; `--ranks` selects whose values return."""
    kernel.good("def scaled(x):\n    return factor / x\nfactor = 6")
    shown = kernel.good(
        f"%%gpu_ranks {TWO_NODES} --send scaled --return found\nfound = torch.full((2,), scaled(rank + 1))"
    )
    assert "2 ranks run" in shown
    assert kernel.good("print([value.tolist() for value in found])") == "[[6.0, 6.0], [3.0, 3.0]]\n"
    kernel.good("%%gpu_ranks --ranks 1 --return rank\nprint('end', end='')")
    assert kernel.good("print(rank)") == "[1]\n"
    failed = kernel.run("%%gpu_ranks\nscaled(0)")
    assert "  Cell In[1], line 2, in scaled\n    return factor / x\n" in failed.error
    failed = kernel.run("%%gpu_ranks --return lock,rank\nimport threading\nlock = threading.Lock()")
    assert "rank 0: lock cannot be pickled" in failed.error


def test_failed_cell_leaves_the_process_group_usable(kernel: Kernel) -> None:
    """The failing rank's traceback comes first and once, with the cell's lines; variables are kept."""
    kernel.good(f"%%gpu_ranks {TWO_NODES}\nx = rank")
    failed = kernel.run("%%gpu_ranks\ny = 1\nif rank == 1:\n    raise ValueError('bad data')\nprint('fine')")
    assert failed.kind == "LaunchFailed"
    assert failed.error.startswith(
        "rank 1 on rig2 failed:\n\nTraceback (most recent call last):\n  Cell In[2], line 4\n"
    )
    assert "The process group is usable, and all variables are kept." in failed.error
    assert (failed.text.count("Traceback"), failed.text.count("[rank 0 · rig1] fine\n")) == (1, 1)
    shown = kernel.good("%%gpu_ranks\nx + y")
    assert "[rank 0 · rig1] 1\n" in shown and "[rank 1 · rig2] 2\n" in shown
    # A cell with a syntax error reaches no rank.
    assert kernel.run("%%gpu_ranks\nx = = 1").kind == "UsageError"
    assert kernel.run("%%gpu_ranks --send missing\n1").error.startswith("--send missing: the notebook has no variable")
    assert kernel.run("%%gpu_ranks --ranks 0,2\n1").error == "--ranks 2: there are ranks 0 to 1."
    assert "add --restart" in kernel.run("%%gpu_ranks --nnodes 3\n1").error
    restarted = kernel.good("%%gpu_ranks --restart --nnodes 1\nworld_size, 'x' in globals()")
    assert "[rank 0 · rig1] (1, False)\n" in restarted


def test_group_restarts_when_ranks_wait_for_a_failed_one(kernel: Kernel) -> None:
    """Ranks that wait in native code cannot be interrupted: the group is restarted, and the user is informed."""
    kernel.good(f"%%gpu_ranks {TWO_NODES}\nx = 1")
    failed = kernel.run("%%gpu_ranks\nif rank == 1:\n    raise ValueError('bad')\ndist.all_reduce(torch.ones(1))")
    assert failed.error.startswith(
        "rank 1 on rig2 failed:\n\nTraceback (most recent call last):\n  Cell In[2], line 3\n"
    )
    assert "rank 0: did not return from the interrupt and was killed\n" in failed.error
    assert "all their variables are gone" in failed.error
    assert is_printed_by_both("False", kernel.good("%%gpu_ranks\n'x' in globals()"))


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(3)", "os._exit(0)"])
def test_group_restarts_when_a_rank_dies_in_a_cell(kernel: Kernel, how: str) -> None:
    """A rank that exits is named, also when its exit code is 0."""
    kernel.good(f"%%gpu_ranks {TWO_NODES}\nimport os, time")
    failed = kernel.run(f"%%gpu_ranks\nif rank == 1: {how}\ntime.sleep(100)")
    assert failed.kind == "LaunchFailed"
    assert "rank 1 on rig2" in failed.error
    assert "all their variables are gone" in failed.error
    assert is_printed_by_both("2", kernel.good("%%gpu_ranks\nworld_size"))


def test_rank_lost_between_cells_is_reported_at_once_and_with_the_next_cell(kernel: Kernel) -> None:
    """The next cell does not run on ranks that have lost their variables."""
    shown = kernel.good(f"%%gpu_ranks {TWO_NODES}\nimport os\nos.getpid()")
    pid = re.search(r"\[rank 1 · rig2\] (\d+)\n", shown)
    assert pid is not None
    os.kill(int(pid[1]), signal.SIGKILL)
    kernel.shows("the rank session is lost: rank 1 on rig2 failed: SIGKILL")
    failed = kernel.run("%%gpu_ranks\nprint('ran')")
    assert "rank 1 on rig2 failed: SIGKILL" in failed.error
    assert "all their variables are gone" in failed.error
    assert "] ran\n" not in failed.text
    assert is_printed_by_both("2", kernel.good("%%gpu_ranks\nworld_size"))


def test_a_node_lost_between_cells_is_named(kernel: Kernel) -> None:
    """The ranks are started again on the remaining nodes."""
    kernel.good(f"%%gpu_ranks {TWO_NODES}\nx = 1")
    (run,) = kernel.notebook.broker.jobs(schemas.JobState.RUNNING)
    kill_all(f"{CONTAINER}={run}-0-0")
    kernel.shows("the rank session is lost: ")
    failed = kernel.run("%%gpu_ranks\nx")
    assert "rig2" in failed.error.splitlines()[0]
    assert "all their variables are gone" in failed.error
    assert is_printed_by_both("2", kernel.good("%%gpu_ranks\nworld_size"))


def test_silent_cells_are_reported_and_idle_ranks_are_not(kernel: Kernel) -> None:
    """Idle for longer than `--stacks-after` they print nothing; each cell that hangs shows where its ranks are."""
    kernel.good("%gpu_ranks --stacks-after 2s")
    time.sleep(4)
    assert kernel.good("1;") == ""
    for seconds in ("600", "601"):
        kernel.begin(f"%%gpu_ranks\nimport time\nprint('sleeps', flush=True)\ntime.sleep({seconds})")
        kernel.shows("sleeps")
        kernel.shows("gpu_launch: no rank has written or reported anything for 2 s")
        kernel.shows(f"time.sleep({seconds})")
        kernel.process.send_signal(signal.SIGINT)
        assert kernel.end().kind == "LaunchInterrupted"


def test_interrupt_stops_the_cell_and_keeps_variables(kernel: Kernel) -> None:
    """Variables survive an interrupt in Python; ranks in native code are restarted after two seconds."""
    kernel.good(f"%%gpu_ranks {TWO_NODES}\nimport time\nx = 1")
    kernel.begin("%%gpu_ranks\nprint('sleeps')\ntime.sleep(100)")
    kernel.shows_both("sleeps")
    began = time.monotonic()
    kernel.process.send_signal(signal.SIGINT)
    stopped = kernel.end()
    assert time.monotonic() - began < 60
    assert stopped.kind == "LaunchInterrupted"
    assert "and all variables are kept" in stopped.error
    assert is_printed_by_both("1", kernel.good("%%gpu_ranks\nx"))
    kernel.begin("%%gpu_ranks\nprint('waits')\ndist.all_reduce(torch.ones(1)) if rank else time.sleep(100)")
    kernel.shows_both("waits")
    kernel.process.send_signal(signal.SIGINT)
    stopped = kernel.end()
    assert stopped.kind == "LaunchInterrupted"
    assert "rank 1: did not return from the interrupt and was killed" in stopped.error
    assert "all their variables are gone" in stopped.error
    assert is_printed_by_both("2", kernel.good("%%gpu_ranks\nworld_size"))


def test_all_output_of_a_cell_is_shown_before_it_ends(kernel: Kernel) -> None:
    """Output that a cell prints at its end, to both streams, is complete."""
    kernel.good(f"%%gpu_ranks {TWO_NODES}\nimport sys")
    for number in range(5):
        shown = kernel.good(
            f"%%gpu_ranks\nfor i in range(2000): print('line', i)\nprint('end {number}', file=sys.stderr)\nprint('last', end='')"
        )
        assert is_printed_by_both("line 1999", shown)
        assert is_printed_by_both(f"end {number}", shown)
        assert is_printed_by_both("last", shown)


def test_ranks_end_with_their_kernel(kernel: Kernel) -> None:
    """No rank is left, and the job is renewed no more."""
    kernel.good(f"%%gpu_ranks {TWO_NODES}\nx = 1")
    kernel.process.kill()
    for run in kernel.notebook.broker.jobs(schemas.JobState.RUNNING):
        # The broker ends the containers of a job that is not renewed.
        kernel.notebook.broker.end(run)
    until(lambda: not kernel.notebook.left(), "no process left")
