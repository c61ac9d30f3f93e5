"""One node of a task file: `setup`, then `run` when all nodes are ready, each by bash in the job's folder.

`python -m gpu_launch.detached.task RUN_FOLDER`, started once a node (`Way.TASK`).
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

from gpu_launch import environment, network, order
from gpu_launch.runs import RunFolder
from gpu_launch.taskfile import variables

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05  # seconds between looks for the other nodes
#: What torch's launcher sets for a rank: the commands are none, and may start torchrun themselves.
_RANK_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
_RANK_NAMES = frozenset({"RANK", "WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})


def main() -> None:
    """Run this node's part; ends with the exit code of what failed first, `setup` or `run`."""
    run = RunFolder(root=Path(sys.argv[1]))
    sys.exit(_Node(run, order.parse_order(run.order.read_text())).work())


class _Node:
    """This node among those of one start."""

    def __init__(self, run: RunFolder, job: order.Order) -> None:
        self._task, self._name, self._run_id = job.task or order.Task(), job.name, run.run_id
        self._rank, self._nodes = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
        self._place = run.root / f"task-{os.environ['GPU_LAUNCH_ATTEMPT']}"
        self._bash = Bash()

    def work(self) -> int:
        """The exit code."""
        env = environment.read()
        environ = variables.environ(
            rank=self._rank,
            ips=self._meet("address", network.own(env.subnet).address),
            gpus_per_node=len(env.gpu_uuids),
            task_id=variables.build_task_id(self._run_id, self._name),
            user=env.home.name,
        )
        if self._task.setup and (code := self._bash.run(self._task.setup, environ)):
            sys.stderr.write(f"setup failed with exit code {code}\n")
            return code
        self._meet("ready", "")
        return self._bash.run(self._task.run, environ)

    def _meet(self, what: str, said: str) -> tuple[str, ...]:
        """Wait until all nodes have said this; what they said, by rank. A node that never does ends us all."""
        self._place.mkdir(exist_ok=True)
        draft = self._place / f".{what}-{self._rank}"
        draft.write_text(said)
        draft.rename(self._place / f"{what}-{self._rank}")
        files = [self._place / f"{what}-{rank}" for rank in range(self._nodes)]
        # Listing the folder, rather than looking for names, makes an NFS client ask the server again.
        while not {file.name for file in files} <= {entry.name for entry in self._place.iterdir()}:
            time.sleep(_POLL_S)
        return tuple(file.read_text() for file in files)


class Bash:
    """Runs scripts one after another; SIGTERM and SIGINT reach everything that the present one has started."""

    def __init__(self) -> None:
        self._group = 0
        self._told = 0
        # What a script leaves behind is ours to wait for.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, script: str, environ: dict[str, str]) -> int:
        """Its exit code; 128 + N when it was ended by a signal. One that is told to end has the time that it takes."""
        if self._told:
            return 128 + self._told
        bash = subprocess.Popen(["bash", "-c", script], env=without_rank(os.environ) | environ, start_new_session=True)
        self._group = bash.pid
        if self._told:
            self._pass_on(self._told, None)
        code = bash.wait()
        if self._told:
            # Bash ends at once; a training that it started may still write its checkpoint.
            self._wait_for_group()
            code = code or 128 + self._told
        self._group = 0
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._told = number
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)

    def _wait_for_group(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self._group, 0)


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what is set for ranks alone. Pure."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_NAMES and not name.startswith(_RANK_PREFIXES)
    }


if __name__ == "__main__":
    main()
