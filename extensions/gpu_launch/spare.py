"""Starting the torchrun that imports torch while the engine is still on its way. Light: a worker does it first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_launch import environment, processes, runs


def spawn(run_id: str) -> subprocess.Popen[bytes]:
    """A `gpu_launch.torchrun` that waits for its arguments on stdin."""
    mark = processes.mark(run_id, environment.read().worker)
    with log(run_id).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "gpu_launch.torchrun"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment.without_secrets(os.environ) | {processes.MARK: mark},
            start_new_session=True,
        )


def log(run_id: str) -> Path:
    """Where this container's torchrun itself writes."""
    env = environment.read()
    return runs.folder(env.home, run_id).log(f"torchrun-{'notebook' if env.worker is None else env.worker}")
