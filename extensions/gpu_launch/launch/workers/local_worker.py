"""The worker in this process's own container: a notebook's, or that of a detached job's driver."""

from __future__ import annotations

import os
import subprocess
import sys

from gpu_launch import environment
from gpu_launch.common import run_folder

_LOCAL_S = 5.0  # seconds for the own worker to end


def start_local_worker(run: run_folder.RunFolder) -> subprocess.Popen[bytes]:
    """Start the worker in this process's own container."""
    environ = environment.remove_secrets(os.environ) | {"GPU_LAUNCH_RUN": run.run_id}
    environ.pop("GPU_LAUNCH_WORKER", None)
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_launch.worker.main"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_local_worker(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end after SIGTERM, and kill it when that takes too long."""
    try:
        process.wait(_LOCAL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
