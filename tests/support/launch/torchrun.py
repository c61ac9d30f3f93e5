"""Several ranks of torch.distributed on this machine, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_DEADLINE_S = 300


def run_ranks(module: str, folder: Path, ranks: int) -> None:
    """Run a module in this number of processes, each with one thread; its only argument is a folder for its results.

    A rank that fails raises an AssertionError with all output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        # Without it, torchrun leaves a folder in /tmp.
        [*command, f"--log-dir={folder / 'torchrun'}", "--module", module, str(folder)],
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
