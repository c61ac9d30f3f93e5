"""The notebook's variables, functions and cells over three nodes of this machine, forked and under torchrun."""

from __future__ import annotations

import re
import textwrap

from tests.support.launch.local_cluster import Notebook

#: Runs the cells of a notebook in a process: `run(text)` prints what a cell would show, errors included.
SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
shell.run_line_magic("load_ext", "gpu_launch")
def run(text):
    return shell.run_cell(text, store_history=True)
"""


def cells(notebook: Notebook, *texts: str) -> tuple[int, str, str]:
    """Run cells, with FLAGS replaced by the options of this notebook's start method."""
    flags = "--cold " if notebook.is_cold else ""
    sources = [textwrap.dedent(text).strip("\n").replace("FLAGS ", flags) for text in texts]
    return notebook.run(SHELL + "\n".join(f"run({text!r})" for text in sources))


def test_variables_reach_all_nodes_and_return_by_rank(either: Notebook) -> None:
    """Variables of a script and of a cell reach all nodes and return by rank, with a class of the notebook."""
    either.keep_s = 60
    either.script("train.py", "import os\nloss = [config.scale * int(os.environ['RANK']), type(config).__name__]\n")
    code, out, err = cells(
        either,
        "class Config:\n    scale = 10\nconfig = Config()",
        "%gpu_launch FLAGS --nnodes 3 --send config --return loss train.py",
        "print('LOSS', loss)",
        "%%gpu_launch FLAGS --nnodes 2 --send config --return node,config\nimport os\nnode = os.environ['RANK']",
        "print('NODES', node, [type(one) is Config for one in config])",
    )
    assert code == 0, out + err
    assert "LOSS [[0, 'Config'], [10, 'Config'], [20, 'Config']]" in out
    assert "NODES ['0', '1'] [True, True]" in out


def test_a_function_of_the_notebook_is_called_on_all_nodes(notebook: Notebook) -> None:
    """The function may use collectives, and its results are listed by rank."""
    code, out, err = cells(
        notebook,
        """
        import gpu_launch
        base = 100
        def train(add, *, more):
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(total)
            found = base + add + more + total.item() + dist.get_rank()
            dist.barrier()
            dist.destroy_process_group()
            return found, total
        """,
        "found = gpu_launch.run(train, [10], kwargs={'more': 1}, nnodes=3)",
        "print('RESULTS', [(value, total.tolist()) for value, total in found.results])",
    )
    assert code == 0, out + err
    assert "RESULTS [(114.0, [3.0]), (115.0, [3.0]), (116.0, [3.0])]" in out


def test_a_failure_in_a_cell_shows_its_own_line_once(notebook: Notebook) -> None:
    """The traceback shows the cell's name and line number once, whichever node it comes from."""
    code, out, err = cells(
        notebook,
        "pass",
        """
        %%gpu_launch FLAGS --nnodes 3
        import os
        def step(rank):
            return 1 / (rank - 1)
        if os.environ["RANK"] == "1":
            step(1)
        """,
    )
    shown = out + err
    assert code == 0, shown
    assert shown.count('File "Cell In[2]", line 4, in step') == 1
    assert shown.count("    return 1 / (rank - 1)\n") == 1
    assert shown.count("ZeroDivisionError: division by zero") == 1
    assert "gpu_launch/worker" not in shown


def test_dry_run_requests_nothing_and_shows_pooled_workers(notebook: Notebook) -> None:
    """A dry run shows placeholders before a launch and the workers' addresses after it, and requests nothing."""
    notebook.keep_s = 60
    notebook.script("train.py", "")
    code, out, err = cells(
        notebook,
        "%gpu_launch --dry-run --nnodes 3 train.py",
        "print('LAUNCH')",
        "%gpu_launch --nnodes 3 train.py",
        "print('STANDS')",
        "%gpu_launch --dry-run --nnodes 3 train.py",
        "%gpu_status",
        "%gpu_release",
    )
    assert code == 0, out + err
    before, _, rest = out.partition("LAUNCH\n")
    launched, _, after = rest.partition("STANDS\n")
    assert "--local-addr=NODE1 " in before
    assert "Free now: rig2, rig3. It would start at once." in before
    assert "NODE1 " not in after
    assert after.count("  torchrun --nnodes=3 --node-rank=") == 3
    assert "It would run at once on idle workers of this notebook: rig1 RTX 5090, rig2 RTX 5070, rig3 RTX 5060" in after
    assert re.search(r"stay (5\d s|1 min) more", after)
    assert "freed: rig1 RTX 5090, rig2 RTX 5070, rig3 RTX 5060\n" in after
    assert notebook.broker.calls.count("POST /jobs") == 1
    assert "done in" in launched
