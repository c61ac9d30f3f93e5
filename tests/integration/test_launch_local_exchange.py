"""The notebook's variables, functions and cells over three nodes of this machine, forked and under torchrun."""

from __future__ import annotations

import re
import textwrap

from tests.support.local_cluster import Notebook

#: A notebook in a process, cell by cell: `run(text)` shows what a cell would, its error too.
SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
shell.run_line_magic("load_ext", "gpu_launch")
def run(text):
    return shell.run_cell(text, store_history=True)
"""


def cells(notebook: Notebook, *texts: str) -> tuple[int, str, str]:
    """Run cells of a notebook, with FLAGS replaced by what makes a line run this notebook's way."""
    flags = "--cold " if notebook.is_cold else ""
    found = [textwrap.dedent(text).strip("\n").replace("FLAGS ", flags) for text in texts]
    return notebook.run(SHELL + "\n".join(f"run({text!r})" for text in found))


def test_variables_go_to_all_nodes_and_come_back_by_rank(either: Notebook) -> None:
    """A script's and a cell's, with a class of the notebook among them."""
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


def test_a_function_of_the_notebook_is_called_on_all_nodes(either: Notebook) -> None:
    """With collectives in it; its results are by rank."""
    code, out, err = cells(
        either,
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
        f"found = gpu_launch.run(train, [10], kwargs={{'more': 1}}, nnodes=3, cold={either.is_cold})",
        "print('RESULTS', [(value, total.tolist()) for value, total in found.results])",
    )
    assert code == 0, out + err
    assert "RESULTS [(114.0, [3.0]), (115.0, [3.0]), (116.0, [3.0])]" in out


def test_a_failure_in_a_cell_shows_its_own_line_once(either: Notebook) -> None:
    """By the cell's name and the notebook's count of lines, from whichever node it comes."""
    code, out, err = cells(
        either,
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
    assert "gpu_launch/ranks" not in shown


def test_a_dry_run_asks_for_nothing_and_knows_workers_that_stand(notebook: Notebook) -> None:
    """Placeholders before, the workers' own addresses after a launch; status and release tell of them."""
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
    assert "It would run at once on workers that stand already: rig1 RTX 5090, rig2 RTX 5070, rig3 RTX 5060" in after
    assert re.search(r"stay [56]\d s more", after)
    assert "freed: rig1 RTX 5090, rig2 RTX 5070, rig3 RTX 5060\n" in after
    assert notebook.broker.calls.count("POST /jobs") == 1
    assert "done in" in launched
