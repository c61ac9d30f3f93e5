"""Trains over the GPUs of this machine with NCCL, one process on each, and checks what only they can show.

`python -m tests.gpus.training`, with a Python that has a CUDA build of torch, torchft and JAX; two GPUs or more.
Every mode of `--comm`, `gpu_launch.balance`, and JAX.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gpu_launch.common.network import find_free_port
from gpu_launch.training.comm_modes import VARIABLE, CommMode
from gpu_launch.worker.jax_cluster import COORDINATOR_ADDRESS
from tests.support.launch import balanced_training, comm_training
from tests.support.launch.launched_ranks import RankOutput, run_launched

#: Loss at the end over that with exact gradients, at most; as tests with gloo have it.
MOST_LOSS = {CommMode.BF16: 1.02, CommMode.POWERSGD: 1.15, CommMode.LOCAL: 1.05, CommMode.DILOCO: 1.15}
#: Products of two 2048² matrices that the first GPU and the others compute for each sample.
WORK = (1, 3)
_JAX = """
    import jax
    from jax.experimental.multihost_utils import process_allgather

    jax.distributed.initialize()
    print("SUM", process_allgather(jax.numpy.ones(3) * (jax.process_index() + 1)).sum(), jax.local_devices())
    jax.distributed.shutdown()
"""


class BusyLayer(torch.nn.Module):
    """Passes its inputs on, and computes for every sample, as a slower GPU would."""

    def __init__(self, work: int) -> None:
        super().__init__()
        self.work = work

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        matrix = torch.ones(2048, 2048, device=inputs.device)
        for _ in range(self.work * len(inputs)):
            torch.mm(matrix, matrix)
        return inputs


def train_balanced(folder: Path) -> None:
    """Train in this rank with given speeds, and with GPUs that are measured."""
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    work = WORK[0] if rank == 0 else WORK[1]
    results = {
        "given": balanced_training.train(batch=18, device="cuda", speeds=tuple(range(size, 0, -1))),
        "measured": balanced_training.train(
            batch=64, samples=64 * 24, epochs=3, device="cuda", layer=BusyLayer(work).cuda()
        ),
    }
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def run(command: list[str], environ: dict[str, str]) -> list[RankOutput]:
    """Run a program in a rank for each GPU, which sees that GPU alone, and check that all succeed."""
    count = torch.cuda.device_count()
    prefixes = [("env", f"CUDA_VISIBLE_DEVICES={number}") for number in range(count)]
    ranks = run_launched(command, count, environ, prefixes=prefixes)
    assert [rank.code for rank in ranks] == [0] * count, "\n".join(rank.stdout + rank.stderr for rank in ranks)
    return ranks


def check_modes(folder: Path) -> None:
    """Each mode of `--comm` learns nearly as well as exact gradients."""
    losses = {}
    for mode in CommMode:
        begin = time.monotonic()
        run(["-m", comm_training.__name__, str(folder), "cuda"], {VARIABLE: mode, "NCCL_SOCKET_IFNAME": "lo"})
        ranks = [torch.load(path, map_location="cpu") for path in sorted(folder.glob("rank-*.pt"))]
        losses[mode] = statistics.mean(rank["losses"][-1] for rank in ranks)
        print(f"--comm {mode}: loss {losses[mode]:.3f} after {time.monotonic() - begin:.0f} s")
        if mode in MOST_LOSS:
            assert losses[mode] < MOST_LOSS[mode] * losses[CommMode.EXACT]
        if mode is CommMode.DILOCO:
            assert all(len(set(at)) == 1 for at in list(zip(*(rank["losses"] for rank in ranks), strict=True))[1:3])


def check_balance(folder: Path) -> None:
    """Gradients are those of one process, and shares follow the work of each GPU."""
    run([__file__, str(folder)], {"NCCL_SOCKET_IFNAME": "lo"})
    ranks = [torch.load(path, map_location="cpu") for path in sorted(folder.glob("rank-*.pt"))]
    for name in ("given", "measured"):
        balanced_training.check_against_one_process([rank[name] for rank in ranks])
    first, last = ranks[0]["measured"]["shares"][0], ranks[0]["measured"]["shares"][-1]
    print(f"balance: shares {first}, then {last} for work {WORK[0]} : {WORK[1]} a sample")
    assert last[0] > 1.5 * last[1]


def check_jax(folder: Path) -> None:
    """Each rank has its own GPU, and all take part in a sum."""
    script = folder / "jax_sum.py"
    script.write_text(textwrap.dedent(_JAX))
    address = f"127.0.0.1:{find_free_port()}"
    ranks = run([str(script)], {COORDINATOR_ADDRESS: address, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    for rank in ranks:
        print("JAX:", rank.stdout.strip())
        assert f"SUM {3.0 * sum(range(1, len(ranks) + 1))} " in rank.stdout


def main() -> None:
    """Run all checks; the first one that fails raises."""
    count = torch.cuda.device_count()
    assert count > 1, f"{count} GPUs are in this machine: this needs two or more, and a CUDA build of torch"
    with tempfile.TemporaryDirectory() as folder:
        for check in (check_modes, check_balance, check_jax):
            check(Path(folder))


if __name__ == "__main__":
    if sys.argv[1:]:
        train_balanced(Path(sys.argv[1]))
    else:
        main()
