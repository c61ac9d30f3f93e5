"""Ranks on this machine as a launch starts them, each as if it had a node of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_launch.common.network import find_free_port

_ROOT = Path(__file__).parents[3]
_DEADLINE_S = 300


@dataclass(frozen=True)
class RankOutput:
    """What a rank wrote, and its exit code."""

    code: int
    stdout: str
    stderr: str


def run_launched(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    *,
    address: str = "127.0.0.1",
    interface: str = "lo",
    prefixes: Sequence[Sequence[str]] = (),
    cwd: Path = _ROOT,
) -> list[RankOutput]:
    """Run a script, or `-m` and a module, with its arguments in every rank, and return what became of each.

    `prefixes` are words before each rank's command, such as those that enter a network namespace; then `address` is rank
    0's, on the `interface` of all of them. `cwd` is their working directory.
    """
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(find_free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
    }
    started = [
        subprocess.Popen(
            [*(prefixes[rank] if prefixes else ()), sys.executable, "-m", "gpu_launch.worker.rank_main", *command],
            cwd=cwd,
            env=common | {"RANK": str(rank)} | dict(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [_finish(process) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def _finish(process: subprocess.Popen[str]) -> RankOutput:
    out, err = process.communicate(timeout=_DEADLINE_S)
    return RankOutput(process.returncode, out, err)
