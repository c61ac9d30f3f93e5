"""The debugger's prompt in cells: launches, rank sessions, and where nobody can type."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.launch.kernel import Kernel
from tests.support.launch.lab_kernel import INTERRUPT, LabKernel
from tests.support.launch.local_cluster import Notebook, until

REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1) * (rank + 1)
breakpoint()
dist.all_reduce(value)
print("sum", value.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def kernel(notebook: Notebook) -> Iterator[LabKernel]:
    """A kernel of a notebook with one GPU."""
    started = LabKernel(notebook, gpus=("GPU-rig1",))
    yield started
    started.close()


def text_of(outputs: list[dict[str, Any]]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def test_breakpoint_of_all_ranks_opens_one_prompt(kernel: LabKernel, notebook: Notebook) -> None:
    """Rank 0 is changed at the prompt while rank 1 waits in the collective, and gets what rank 0 sends."""
    notebook.script("train.py", REDUCE)
    shown = text_of(kernel.run("%gpu_launch --nnodes 2 train.py", ["p rank", "!value *= 10", "n", "c"]))
    assert "gpu_launch: rank 0 on rig1 stopped at train.py:6; rank 1, which stopped as well, continues\n" in shown, (
        shown
    )
    assert "torch's own: 10 min with NCCL, 30 min with gloo" in shown
    assert "q lets the rank run" in shown
    assert shown.count("(rank 0) ") == 4 and "(rank 1) " not in shown
    assert "\n-> dist.all_reduce(value)\n" in shown and "\n-> print(" in shown
    # Equal lines of both ranks are shown as one where they come together.
    assert sum(int(number or 1) for number in re.findall(r"(?:×(\d+)\] )?sum 12\.0", shown)) == 2


def test_rank_that_is_chosen_opens_where_it_fails(kernel: LabKernel, notebook: Notebook) -> None:
    """breakpoint() stops that rank alone; the cell fails with the usual traceback afterwards."""
    notebook.script("train.py", REDUCE.replace("dist.destroy", "assert rank == 0, value\ndist.destroy"))
    outputs, error = kernel.try_run("%gpu_launch --nnodes 2 --debug 1 train.py", ["c", "p value.item() + 4", "c"])
    shown = text_of(outputs)
    assert "rank 1 on rig2 stopped at train.py:6\n" in shown and "with --debug" not in shown
    assert "rank 1 failed at train.py:9: AssertionError: tensor([3.])\n" in shown
    assert "7.0\n" in shown and "(rank 0) " not in shown
    assert "rank 1 on rig2 failed" in error and "AssertionError" in error
    _, error = kernel.try_run("%gpu_launch --nnodes 2 --debug 2 train.py")
    assert "--debug 2: the launch has 2 ranks, from 0." in error


def test_interrupt_at_the_prompt_ends_the_launch(kernel: LabKernel, notebook: Notebook) -> None:
    notebook.script("train.py", REDUCE)
    _, error = kernel.try_run("%gpu_launch --nnodes 2 train.py", [INTERRUPT])
    assert "KeyboardInterrupt: every rank is stopped" in error
    shown = text_of(kernel.run("%gpu_launch --nnodes 2 train.py", ["q"]))
    assert "Rank 0 continues, and stops at no breakpoint() any more.\n" in shown
    assert "sum 3.0" in shown


def test_rank_session_stops_in_a_cell_and_after_it(kernel: LabKernel) -> None:
    """`%gpu_debug` shows the frames of the last cell's failure; the variables stay."""
    shown = text_of(
        kernel.run("%%gpu_ranks --nnodes 2\nx = rank\nif rank:\n    breakpoint()\n    x += 1", ["!x = 40", "c"])
    )
    assert "rank 1 on rig2 stopped at " in shown and "(rank 1) " in shown
    _, error = kernel.try_run("%%gpu_ranks\ndef divide(by):\n    return x / by\ndivide(1 - rank)")
    assert "ZeroDivisionError" in error and "process group is usable" in error
    shown = text_of(kernel.run("%gpu_debug 1", ["p x, by", "up", "c"]))
    assert "(41, 0)\n" in shown and "-> return x / by" in shown and "-> divide(1 - rank)" in shown
    _, error = kernel.try_run("%gpu_debug 0")
    assert "in which a person can type" in error
    # An interrupt leaves the rank as it is.
    _, error = kernel.try_run("%gpu_debug 1", [INTERRUPT])
    assert "KeyboardInterrupt" in error
    shown = text_of(kernel.run("%%gpu_ranks --ranks 1\nx"))
    assert "41" in shown
    # An interrupt at the prompt of a running cell ends the cell on all ranks.
    _, error = kernel.try_run("%%gpu_ranks\nif rank:\n    breakpoint()\nprint('ran on')", [INTERRUPT])
    assert "KeyboardInterrupt: the cell is stopped on every rank" in error, error


def test_without_a_person_the_rank_waits_and_says_how_to_reach_it(notebook: Notebook) -> None:
    """As in a detached job, and in a notebook that a program runs."""
    notebook.script("train.py", REDUCE)
    with contextlib.closing(Kernel(notebook)) as kernel:
        shown = kernel.good("import os; os.environ['GPU_LAUNCH_DEBUG_WAIT_S'] = '2'\n%gpu_launch --nnodes 2 train.py")
    (run,) = notebook.broker.groups
    assert "rank 0 on rig1 stopped at train.py:6; rank 1, which stopped as well, continues\n" in shown
    assert f"gpu_launch: it waits for the debugger: gpu-launch debug {run} --rank 0\n" in shown
    assert "no debugger came within 2 s, the rank continues" in shown
    assert "sum 3.0" in shown
    until(lambda: not notebook.left(), "no process left")
