"""Programs of frameworks for training start under a launch as they are, on two nodes without GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import framework_scripts
from tests.support.launch.local_cluster import Notebook, until
from tests.support.launch.rank_scripts import count_ranks

DOCS = Path(__file__).parents[3] / "docs" / "launch.md"
#: Imports of such frameworks by two processes at once are slow on a busy machine.
LIMIT_S = 300


@pytest.mark.parametrize(
    "script",
    [framework_scripts.LIGHTNING, framework_scripts.ACCELERATE, framework_scripts.TRANSFORMERS],
    ids=["lightning", "accelerate", "transformers"],
)
def test_training_uses_all_ranks_without_changes(notebook: Notebook, script: str) -> None:
    """Both ranks find each other, divide the data, and end with the same weights."""
    notebook.script("train.py", script)
    code, out, err = notebook.run(notebook.call("train.py", nnodes=2), limit_s=LIMIT_S)
    assert code == 0, out + err
    assert [count_ranks(out, f"RANK {rank} of 2") for rank in range(2)] == [1, 1], out
    (weights,) = set(re.findall(r"WEIGHTS (\S+)", out))
    assert count_ranks(out, f"WEIGHTS {weights}") == 2
    until(lambda: not notebook.left(), "no process left")


def test_jax_cell_of_the_docs_trains_on_both_ranks(notebook: Notebook) -> None:
    """The cell, as it is in docs/launch.md, returns the same weights from both ranks."""
    (cell,) = re.findall(r"```python\n(%%gpu_launch [^`]*jax\.distributed[^`]*)```", DOCS.read_text())
    notebook.script("cell.txt", cell)
    code, out, err = notebook.run(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpu_launch")
        assert shell.run_cell(open("cell.txt").read()).success
        first, second = shell.user_ns["weights"]
        assert first == second
        print("FOUND", [round(weight, 1) for weight in first])
        """,
        limit_s=LIMIT_S,
    )
    assert code == 0, out + err
    assert re.search(r"loss 0\.\d{4} with 2 processes", out), out
    assert "FOUND [1.0, 1.0, 1.0, 1.0]" in out
