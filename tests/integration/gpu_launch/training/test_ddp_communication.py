"""Four ranks run an unmodified DDP script in each mode of `--comm`, as if each had a node of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from gpu_launch.detached.task_main import add_communication
from gpu_launch.training.comm_modes import MATHEMATICS, POWERSGD_RANK, VARIABLE, CommMode
from tests.support.launch import comm_training
from tests.support.launch.launched_ranks import run_launched

pytestmark = pytest.mark.torch

RANKS = 4
_BEGIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
layer = torch.nn.Linear(2, 2)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By mode, what each rank wrote, and rank 0's messages."""
    results, messages = {}, {}
    for mode in CommMode:
        folder = tmp_path_factory.mktemp(mode)
        ranks = run_launched(["-m", comm_training.__name__, str(folder)], RANKS, {VARIABLE: mode})
        assert [rank.code for rank in ranks] == [0] * RANKS, "\n".join(rank.stderr for rank in ranks)
        results[mode] = [torch.load(folder / f"rank-{rank}.pt") for rank in range(RANKS)]
        messages[mode] = ranks[0].stderr
    return results, messages


def refuse(tmp_path, script, mode):
    """Run a script in two ranks that are both refused; return rank 0's error."""
    path = tmp_path / "train.py"
    path.write_text(_BEGIN + textwrap.dedent(script))
    first, second = run_launched([str(path)], 2, {VARIABLE: mode})
    # torch aborts a process that ends with its process group while gloo's threads still run.
    assert {first.code, second.code} <= {1, -signal.SIGABRT}, first.stdout + first.stderr
    assert "UsageError" in second.stderr
    return first.stderr


@pytest.mark.parametrize(
    ("mode", "most"),
    [(CommMode.BF16, 1.02), (CommMode.POWERSGD, 1.15), (CommMode.LOCAL, 1.05), (CommMode.DILOCO, 1.15)],
)
def test_each_mode_learns_nearly_as_well_as_exact_gradients(trained, mode, most):
    """Loss on text that was not trained on, after the same number of steps; `diloco` has synchronized four times."""
    results, _ = trained
    exact, other = results[CommMode.EXACT][0]["losses"], results[mode][0]["losses"]
    assert exact[-1] < 0.6 * exact[0]
    assert other[-1] < most * exact[-1]


@pytest.mark.parametrize("mode", [CommMode.EXACT, CommMode.BF16, CommMode.POWERSGD])
def test_ranks_stay_equal_where_gradients_are_exchanged(trained, mode):
    """All ranks apply the same mean."""
    first, *others = trained[0][mode]
    for other in others:
        torch.testing.assert_close(other["parameters"], first["parameters"], rtol=0, atol=0)


def test_gradients_in_bfloat16_have_its_precision(trained):
    """The mean is a bfloat16 number."""
    for gradient in trained[0][CommMode.BF16][0]["gradients"]:
        torch.testing.assert_close(gradient, gradient.bfloat16().float(), rtol=0, atol=0)
    assert any(
        (gradient != gradient.bfloat16().float()).any() for gradient in trained[0][CommMode.EXACT][0]["gradients"]
    )


def test_powersgd_approximates_matrices_and_keeps_vectors(trained):
    """The gradient of a matrix has the rank of the approximation, and error feedback does not change that."""
    ranks = [
        int(torch.linalg.matrix_rank(gradient, rtol=1e-4))
        for gradient in trained[0][CommMode.POWERSGD][0]["gradients"]
        if gradient.ndim == 2 and min(gradient.shape) > 16
    ]
    assert ranks == [POWERSGD_RANK, POWERSGD_RANK]


def test_local_steps_end_with_an_average(trained):
    """Nodes have models of their own between two averages; step 204 is the 13th time that 8 steps are over."""
    first, *others = trained[0][CommMode.LOCAL]
    for other in others:
        torch.testing.assert_close(other["parameters"], first["parameters"], rtol=0, atol=0)
        assert any((own != before).any() for own, before in zip(other["before"], first["before"], strict=True))


def test_diloco_makes_all_models_equal_after_a_period(trained):
    """Steps 100 and 200, whose losses are noted, are such steps, and 203 is not."""
    losses = [rank["losses"] for rank in trained[0][CommMode.DILOCO]]
    _, half, whole, end = zip(*losses, strict=True)
    assert (len(set(half)), len(set(whole)), len(set(end))) == (1, 1, RANKS)


def test_diloco_takes_the_ranks_of_a_node_for_one_replica(tmp_path):
    """Two nodes of two ranks: those of one node stay equal, and all are equal after a period."""
    path = tmp_path / "train.py"
    path.write_text(
        _BEGIN
        + textwrap.dedent(
            """
            model = DistributedDataParallel(layer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            random = torch.Generator().manual_seed(dist.get_rank())
            for step in range(51):
                if step in (49, 50):
                    print("SUM", step, repr(sum(value.sum().item() for value in model.parameters())))
                optimizer.zero_grad()
                model(torch.randn(4, 2, generator=random)).square().sum().backward()
                optimizer.step()
            dist.destroy_process_group()
            """
        )
    )
    ranks = run_launched([str(path)], RANKS, {VARIABLE: CommMode.DILOCO, "LOCAL_WORLD_SIZE": "2"})
    assert [rank.code for rank in ranks] == [0] * RANKS, "\n".join(rank.stderr for rank in ranks)
    before, after = zip(*(re.findall(r"SUM \d+ (\S+)", rank.stdout) for rank in ranks), strict=True)
    assert before[0] == before[1] != before[2] == before[3]
    assert len(set(after)) == 1


@pytest.mark.parametrize("mode", [mode for mode in CommMode if mode is not CommMode.EXACT])
def test_rank_0_says_what_changes(trained, mode):
    """Once, and only where something changes."""
    assert trained[1][mode].count(f"gpu_launch: --comm {mode}: {MATHEMATICS[mode]}\n") == 1
    assert "gpu_launch: --comm" not in trained[1][CommMode.EXACT]


@pytest.mark.parametrize(
    ("script", "mode", "reason"),
    [
        (
            "dist.all_reduce(layer(torch.ones(1, 2)).sum())\ntorch.optim.SGD(layer.parameters(), lr=1).step()",
            CommMode.BF16,
            "trains without DistributedDataParallel",
        ),
        (
            """
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
            DistributedDataParallel(layer).register_comm_hook(None, allreduce_hook)
            """,
            CommMode.POWERSGD,
            "registers a communication hook of its own",
        ),
        ("DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))", CommMode.POWERSGD, "sparse gradients"),
        ("torch.optim.LBFGS(layer.parameters())", CommMode.POWERSGD, "LBFGS: it calls backward several times"),
        ("torch.amp.GradScaler('cpu')", CommMode.LOCAL, "GradScaler: it passes over a step"),
        ("torch.amp.GradScaler('cpu')", CommMode.POWERSGD, "GradScaler: it passes over a step whose gradients"),
        (
            """
            from torch.distributed.optim import ZeroRedundancyOptimizer
            ZeroRedundancyOptimizer(layer.parameters(), optimizer_class=torch.optim.SGD, lr=1)
            """,
            CommMode.LOCAL,
            "ZeroRedundancyOptimizer: each rank updates a part",
        ),
        (
            """
            model = DistributedDataParallel(layer)
            optimizer = torch.optim.SGD(layer.parameters(), lr=1)
            optimizer.step()
            optimizer.param_groups[0]["params"].pop()
            optimizer.step()
            """,
            CommMode.DILOCO,
            "the optimizer had 2 parameters of the model in its first step and has 1 now",
        ),
        (
            """
            model = DistributedDataParallel(layer)
            for _ in range(102):
                model(torch.ones(1, 2)).sum().backward()
            """,
            CommMode.LOCAL,
            "no optimizer of torch.optim makes steps",
        ),
    ],
)
def test_what_a_mode_cannot_work_with_is_refused(tmp_path, script, mode, reason):
    """As soon as the script uses it, with what would be right."""
    error = refuse(tmp_path, script, mode)
    assert f"--comm {mode} cannot be used: " in error
    assert reason in error
    assert "or --comm exact." in error


def test_script_without_ddp_is_told_that_nothing_changed(tmp_path):
    """A script that trains nothing with other ranks ends well."""
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    (rank,) = run_launched([str(path)], 1, {VARIABLE: CommMode.BF16})
    assert (rank.code, "--comm bf16 had no effect" in rank.stderr) == (0, True)


def test_commands_of_a_task_apply_the_mode(tmp_path):
    """Python finds gpu_launch by the path that the task's script sets, and runs a `sitecustomize` that this one hides."""
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    script = (
        f"{sys.executable} -c 'import torch; print(torch.nn.parallel.DistributedDataParallel.__init__.__wrapped__)'"
    )
    environ = {VARIABLE: CommMode.BF16, "PYTHONPATH": str(tmp_path)}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["bash", "-c", add_communication(script, environ)]
    done = subprocess.run(command, env=clean | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the other one\n<function DistributedDataParallel.__init__")
    assert add_communication(script, {}) == script
