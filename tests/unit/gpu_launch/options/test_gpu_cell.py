"""The line of `%%gpu`."""

from __future__ import annotations

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.options import gpu_cell


def test_options_of_worker_and_cell_are_distinguished():
    """Only those of the worker decide whether the one that is there serves the cell."""
    asked = gpu_cell.parse("--gpus 2 --model 'RTX 5090' --keep 5m --send a --return b,c", cell=True)
    assert (asked.options.send, asked.options.returns, asked.start.send) == (("a",), ("b", "c"), ())
    assert (asked.start.nnodes, asked.start.nproc_per_node, asked.start.keep_s) == (1, 2, 300)
    assert gpu_cell.format_flags(asked.start) == "--gpus 2 --model 'RTX 5090' --keep 5m"
    assert gpu_cell.parse("--send x", cell=True).fits(asked.start)
    assert gpu_cell.parse("--gpus 2", cell=True).fits(asked.start)
    assert not gpu_cell.parse("--gpus 1", cell=True).fits(asked.start)
    assert gpu_cell.parse("--stop", cell=False).stop
    assert gpu_cell.parse("--gpus 2 -h", cell=True).help


@pytest.mark.parametrize(
    ("line", "cell", "text"),
    [
        ("--nnodes 2", True, "There is no flag --nnodes"),
        ("--gpus none", True, "--gpus none"),
        ("--gpus 0", True, "--gpus 0"),
        ("train.py", True, "takes no arguments, and 'train.py' is one"),
        ("--stop", True, "--stop stands alone"),
        ("--stop --gpus 1", False, "--stop stands alone"),
        ("--gpus 1", False, "The flags belong to a cell"),
    ],
)
def test_invalid_lines_are_refused(line, cell, text):
    """By name, with what would be right."""
    with pytest.raises(UsageError, match=text):
        gpu_cell.parse(line, cell=cell)
