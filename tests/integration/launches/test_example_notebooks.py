"""The notebooks about language models and sweeps, executed as they are, on three nodes without GPUs."""

from __future__ import annotations

import re

from tests.support.launch.example_notebooks import execute
from tests.support.launch.local_cluster import Notebook, until, use_image_settings

#: Imports of transformers by several processes at once are slow on a busy machine.
LIMIT_S = 900


def test_fine_tuning_notebook_runs_to_its_end(notebook: Notebook) -> None:
    """It estimates memory, trains adapters on one and two nodes, and continues a divided model on fewer nodes."""
    output = execute(notebook, "07-fine-tune-an-llm.ipynb", limit_s=LIMIT_S)
    assert re.search(r"^LoRA +\d", output, re.MULTILINE), output
    assert "does not fit: training all weights with 1 × 2048 tokens needs" in output
    assert "One step of lora.py: the median of 20" in output
    assert re.search(r"^two-nodes +loss \d\.\d{3}", output, re.MULTILINE), output
    assert "begins at step 20 with 2 ranks" in output
    assert "begins at step 30 with 2 ranks" in output
    assert "40 steps on 3 and then 2 nodes" in output


def test_scaling_notebook_runs_to_its_end(notebook: Notebook) -> None:
    """It trains in each way on one and two nodes, predicts it, and writes what the second one brings."""
    name = "08-when-does-a-second-machine-pay.ipynb"
    output = execute(notebook, name, limit_s=LIMIT_S, changes={"MOST = 3": "MOST = 2"})
    for way in ("exact", "bf16", "powersgd", "local", "LoRA"):
        assert re.search(rf"^{way} +2 +[\d.]+ +\d+\.\d\d +\d\.\d\d +[0-4]\.\d{{3}}$", output, re.MULTILINE), output
        assert re.search(rf"^{way} +a second machine (pays|does).* Two give \d\.\d\d times", output, re.MULTILINE), (
            output
        )
    assert "One step of train.py: the median of 20" in output
    assert re.search(r"\b2 +diloco +\d", output), output
    assert re.search(r"All weights train fastest with \w+ on [12] node", output), output


def test_optuna_notebook_runs_to_its_end(notebook: Notebook) -> None:
    """Trials run on two nodes at a time, some are pruned, and the study in the home has all of them."""
    use_image_settings(notebook)
    output = execute(notebook, "09-tune-with-optuna.ipynb", limit_s=LIMIT_S)
    nodes = re.search(r"trial 12 of 12 is over; trials by node: \{(.*)\}", output)
    assert nodes is not None, output
    assert set(re.findall(r"rig\d", nodes[1])) == {"rig1", "rig2"}
    states = re.search(r"^12 trials: \{(.*)\}", output, re.MULTILINE)
    assert states is not None, output
    assert "'COMPLETE': " in states[1]
    assert re.search(r"best: trial \d+, loss 0\.\d+, \{'rate': ", output), output
    assert (notebook.home / "studies" / "spirals.journal").stat().st_size > 0
    until(lambda: not notebook.left(), "no process left")
