"""Launches from the kernel of a user's own environment: engines and ranks run in it as well."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.launch.local_cluster import NODES, PYTHON, Notebook

RANKS = """
    import os, sys, mine, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    print(os.environ["RANK"], "in", sys.prefix, mine.WORD)
    dist.destroy_process_group()
"""
CREATE = "from pathlib import Path; from gpu_launch.cli.env import create_environment; create_environment(Path({!r}), 'mine')"


@pytest.fixture
def own(either: Notebook) -> Path:
    """The folder of an environment with a module of its own; the notebook runs in it."""
    subprocess.run([PYTHON, "-c", CREATE.format(str(either.home))], check=True)
    folder = either.home / "envs" / "mine"
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "mine.py").write_text("WORD = 'own'")
    either.python = str(folder / "bin" / "python")
    return folder


def test_ranks_run_in_the_environment_of_the_kernel(either: Notebook, own: Path) -> None:
    """On the notebook's own node and on another one."""
    either.script("ranks.py", RANKS)
    code, out, err = either.run(either.call("ranks.py", nnodes=2))
    assert code == 0, out + err
    for rank, node in enumerate(NODES[:2]):
        assert f"[rank {rank} · {node}] {rank} in {own} own\n" in out
