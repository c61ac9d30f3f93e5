"""Communication modes and predictions in whole launches on this machine."""

from __future__ import annotations

import re

from tests.support.launch.local_cluster import Notebook

TRAINING = """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    gradient = model.module.weight.grad
    print("rounded", bool((gradient == gradient.bfloat16().float()).all()), "of", dist.get_world_size())
    dist.destroy_process_group()
"""


def test_unmodified_script_communicates_in_the_mode_that_is_named(notebook: Notebook) -> None:
    """Forked and under torchrun; one rank says what that changes."""
    notebook.script("train.py", TRAINING)
    code, out, err = notebook.run(notebook.call("train.py", nnodes=2, comm="bf16"))
    assert code == 0, out + err
    assert out.count("rounded True of 2") == 1
    assert err.count("gpu_launch: --comm bf16: gradients are rounded to bfloat16") == 1


def test_bench_then_prediction_then_the_mode_that_it_found(notebook: Notebook) -> None:
    """A notebook measures two cards, profiles its script on its own, and trains as the prediction advises."""
    notebook.script("train.py", TRAINING)
    code, out, err = notebook.run(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpu_launch")
        shell.run_cell("%gpu_launch --nnodes 2 --comm auto train.py")
        shell.run_line_magic("gpu_bench", "--nnodes 2")
        shell.run_line_magic("gpu_launch", "--predict train.py")
        shell.run_line_magic("gpu_launch", "--dry-run --nnodes 2 --comm local train.py")
        shell.run_line_magic("gpu_launch", "--nnodes 2 --comm auto train.py")
        """
    )
    assert code == 0, out + err
    assert "there is none. Make one with %gpu_launch --predict" in out
    assert "rank  node  device" in out
    assert "kept for --predict" in out
    assert "One step of train.py: the median of 20 on rig1 (CPU)" in out
    assert re.search(r"Predicted on .* for 2 cards with --comm local: \d+\.\d ms for a step, \d+\.\d\d times", out)
    assert re.search(r"GPU_LAUNCH_COMM=local +after 100 exact steps, each node trains alone", out)
    # The profile ends the script before its last line.
    assert out.count("rounded") == 1
    assert [len(group.nodes) for group in notebook.broker.groups.values()] == [1, 1]
