"""Detached jobs on this machine: worker processes with the environment of worker containers, on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from gpu_launch.common import job_manifest, run_folder
from gpu_launch.detached import job_files
from tests.support.launch.local_cluster import kill_all

DEADLINE_S = 120.0
#: In the environment of all processes of a worker's container.
CONTAINER = "GPU_LAUNCH_TEST_CONTAINER"
PYTHON = os.environ.get("GPU_LAUNCH_TEST_PYTHON", sys.executable)


class Job:
    """A detached job as the broker runs it."""

    def __init__(self, home: Path, nodes: int) -> None:
        self.home, self.nodes = home, nodes
        self.work = home / "work"
        self.work.mkdir(parents=True)
        self.run = run_folder.open_run(home, run_folder.new_run_id())
        self.processes: list[subprocess.Popen[bytes]] = []
        self.preemptions = 0
        #: Tries after failures, such as `1/3`.
        self.retries = ""
        self.sleeps = ""

    def write(self, name: str, source: str) -> None:
        """Write a script in the job's working folder."""
        (self.work / name).write_text(textwrap.dedent(source))

    def send(
        self,
        *words: str,
        task: job_manifest.TaskCommands | None = None,
        cell: str | None = None,
        secret_names: tuple[str, ...] = (),
        **more: str,
    ) -> None:
        """Write the job's folder as a laptop does."""
        given = job_manifest.JobManifest(
            name="train.py", words=words, task=task, cell=cell, folder="work", environ=more, secret_names=secret_names
        )
        self.run.root.mkdir(parents=True)
        for name, data in job_files.build_files(given).items():
            (self.run.root / name).write_bytes(data)

    def start(self) -> None:
        """Start the containers with the driver's last: the order must not matter."""
        self.processes = []
        for index in reversed(range(self.nodes)):
            environ = {
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "IPYTHONDIR": str(self.home / ".ipython"),
                "GPUHUB_NETWORK_SUBNET": "127.0.0.0/8",
                "GPUHUB_NODE": f"rig{index + 1}",
                "GPUHUB_GPU_UUIDS": f"GPU-{index}",
                "GPU_LAUNCH_RUN": self.run.run_id,
                "GPU_LAUNCH_WORKER": str(index),
                "GPU_LAUNCH_ROSTER": json.dumps([self._worker(number) for number in range(self.nodes)]),
                "GPU_LAUNCH_PREEMPTIONS": str(self.preemptions),
                "GPU_LAUNCH_RETRIES": self.retries,
                "GPU_LAUNCH_SLEEPS": self.sleeps,
                CONTAINER: self._container(index),
            }
            command = [PYTHON, "-m", "gpu_launch.worker.main"]
            started = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
            self.processes.insert(0, started)

    def end(self, within_s: float = DEADLINE_S) -> int:
        """Wait for worker 0 for `within_s` seconds at most, remove all containers, and return its exit code."""
        try:
            return self.processes[0].wait(within_s)
        finally:
            self.close()

    def stop(self) -> int:
        """Send SIGTERM to all containers, as for a cancelled or preempted job, wait, and return worker 0's exit code."""
        for process in self.processes:
            process.terminate()
        return self.end()

    def lose(self, index: int) -> None:
        """Lose a node at once."""
        kill_all(f"{CONTAINER}={self._container(index)}")
        self.processes[index].wait(DEADLINE_S)

    def close(self) -> None:
        """Remove the containers with all their processes."""
        for index, process in enumerate(self.processes):
            kill_all(f"{CONTAINER}={self._container(index)}")
            process.wait(DEADLINE_S)

    @property
    def output(self) -> str:
        """Return the output of `gpu-launch logs`."""
        return self.run.output.read_text() if self.run.output.exists() else ""

    @property
    def state(self) -> job_manifest.JobStatus:
        """Return the status file's content."""
        return job_manifest.parse_status(self.run.status.read_text())

    def await_output(self, text: str) -> None:
        """Wait until the output contains this text."""
        self.until(lambda: text in self.output, f"{text!r} in the output")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition while the driver runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            is_over = self.processes[0].poll() is not None or time.monotonic() > deadline
            assert not is_over or condition(), f"{what} did not come: {self.output}\n{self._logs()}"
            time.sleep(0.02)

    def _logs(self) -> str:
        return "".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.run.logs.glob("*.log"))

    def _container(self, index: int) -> str:
        return f"{self.run.run_id}-{self.preemptions}-{index}"

    def _worker(self, index: int) -> dict[str, object]:
        node = f"rig{index + 1}"
        gpu = {"uuid": f"GPU-{index}", "node": node, "model": "RTX 5090", "memory_mib": 32_607}
        return {"index": index, "node": node, "gpus": [gpu], "state": "running"}
