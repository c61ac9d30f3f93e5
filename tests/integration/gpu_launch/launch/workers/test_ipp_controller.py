"""The controller of a worker pool leaves no process behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import local_cluster

DEADLINE_S = 60.0


def wait_for(home: Path, count: range, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while len(found := local_cluster.find_processes(home)) not in count:
        assert time.monotonic() < end, f"not within {DEADLINE_S:.0f} s: {what}; there are {len(found)}"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_schedulers_end_with_the_controller(tmp_path: Path, number: signal.Signals) -> None:
    """This holds at any moment: the first scheduler may be killed before it handles signals."""
    command = [sys.executable, "-m", "gpu_launch.launch.workers.ipp_controller", "--ip=127.0.0.1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as controller:
        try:
            wait_for(tmp_path, range(3, 99), "schedulers")
            os.kill(controller.pid, number)
            controller.wait(DEADLINE_S)
        finally:
            controller.kill()
    wait_for(tmp_path, range(1), "nothing is left")
