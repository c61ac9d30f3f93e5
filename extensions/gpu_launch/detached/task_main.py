"""One node of a task file: `setup`, then `run` when all nodes are ready, each by bash in the job's folder.

`python -m gpu_launch.detached.task_main RUN_FOLDER`, started once a node (`Way.TASK`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from gpu_launch import environment
from gpu_launch.common import job_manifest, network
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.taskfile import variables

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05  # seconds between polls for the other nodes
#: Set by torch's launcher for ranks. The commands are not ranks, and may start torchrun themselves.
_RANK_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
_RANK_NAMES = frozenset({"RANK", "WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})


def main() -> None:
    """Run this node's commands, and end with the exit code of the first that fails, `setup` or `run`."""
    run = RunFolder(root=Path(sys.argv[1]))
    sys.exit(_Node(run, job_manifest.parse_manifest(run.manifest.read_text())).work())


class _Node:
    """One node of a start."""

    def __init__(self, run: RunFolder, job: job_manifest.JobManifest) -> None:
        self._task, self._name, self._run_id = job.task or job_manifest.TaskCommands(), job.name, run.run_id
        self._rank, self._nodes = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
        self._place = run.root / f"task-{os.environ['GPU_LAUNCH_ATTEMPT']}"
        self._bash = Bash()

    def work(self) -> int:
        """Run the commands; return the exit code."""
        env = environment.read()
        environ = variables.build_variables(
            rank=self._rank,
            ips=self._exchange("address", network.find_own_interface(env.subnet).address),
            gpus_per_node=len(env.gpu_uuids),
            task_id=variables.build_task_id(self._run_id, self._name),
            user=env.home.name,
        )
        if self._task.setup and (code := self._bash.run(self._task.setup, environ)):
            sys.stderr.write(f"setup failed with exit code {code}\n")
            return code
        self._exchange("ready", "")
        return self._bash.run(self._task.run, environ)

    def _exchange(self, what: str, value: str) -> tuple[str, ...]:
        """Wait until all nodes have written this value; return the values by rank. The launch ends for a lost node."""
        self._place.mkdir(exist_ok=True)
        draft = self._place / f".{what}-{self._rank}"
        draft.write_text(value)
        draft.rename(self._place / f"{what}-{self._rank}")
        files = [self._place / f"{what}-{rank}" for rank in range(self._nodes)]
        # A listing of the folder makes an NFS client ask the server again; opening a file by name does not.
        while not {file.name for file in files} <= {entry.name for entry in self._place.iterdir()}:
            time.sleep(_POLL_S)
        return tuple(file.read_text() for file in files)


class Bash:
    """A runner of scripts, one after another; SIGTERM and SIGINT reach all processes of the current one."""

    def __init__(self) -> None:
        self._group = 0
        self._signal = 0
        # Processes that a script leaves behind become children of this one, which waits for them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, script: str, environ: dict[str, str]) -> int:
        """Run a script; return its exit code, 128 + N when signal N ended it. After a signal it may take any time."""
        if self._signal:
            return 128 + self._signal
        bash = subprocess.Popen(["bash", "-c", script], env=without_rank(os.environ) | environ, start_new_session=True)
        self._group = bash.pid
        if self._signal:
            self._pass_on(self._signal, None)
        code = bash.wait()
        if self._signal:
            # Bash ends at once; a training that it started may still write its checkpoint.
            self._wait_for_group()
            code = code or 128 + self._signal
        self._group = 0
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)

    def _wait_for_group(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self._group, 0)


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of ranks."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_NAMES and not name.startswith(_RANK_PREFIXES)
    }


if __name__ == "__main__":
    main()
