"""One node of a task file: `setup`, then `run` when all nodes are ready, each by bash in the job's folder.

`python -m gpu_launch.detached.task_main RUN_FOLDER`, started once a node (`StartMethod.TASK`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType

from gpu_launch import environment
from gpu_launch.common import job_manifest, network
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.detached.bashrc import read_bashrc
from gpu_launch.training import comm_modes

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05  # seconds between polls for the other nodes
#: Prefixes of variables that torch's launcher sets for ranks. The commands are not ranks, and may start torchrun
#: themselves.
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
        # The file's own values take precedence over those of ~/.bashrc.
        self._bash = Bash(kept=job.environ)

    def work(self) -> int:
        """Run the commands; return the exit code."""
        env = environment.read()
        environ = build_variables(
            rank=self._rank,
            ips=self._exchange("address", network.find_own_interface(env.rank_subnet).address),
            gpus_per_node=len(env.gpu_uuids),
            task_id=build_task_id(self._run_id, self._name),
            user=env.home.name,
        )
        if self._task.setup and (code := self._bash.run(self._task.setup, environ)):
            sys.stderr.write(f"setup failed with exit code {code}\n")
            return code
        self._exchange("ready", "")
        return self._bash.run(add_communication(self._task.run, os.environ), environ)

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
    """A runner of scripts, one after another; SIGTERM and SIGINT reach all processes of the current one.

    Each script has the variables and functions that the user's `~/.bashrc` defines at its start.

    Args:
        kept: Names of variables that the `~/.bashrc` does not change, besides those that `run` gets.
    """

    def __init__(self, kept: Collection[str] = ()) -> None:
        self._kept = frozenset(kept)
        self._group = 0
        self._is_reading = False
        self._signal = 0
        # Processes that a script leaves behind become children of this one, which waits for them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, script: str, environ: dict[str, str]) -> int:
        """Run a script; return its exit code, 128 + N when signal N ended it. After a signal it may take any time."""
        if self._signal:
            return 128 + self._signal
        try:
            folder = tempfile.mkdtemp(prefix="gpu-launch-")
        except OSError as error:
            sys.stderr.write(f"~/.bashrc is not read, because there is no temporary folder: {error}\n")
            return self._run_script(script, without_rank(os.environ) | environ)
        try:
            return self._run_after_bashrc(script, without_rank(os.environ) | environ, environ.keys(), Path(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_after_bashrc(self, script: str, environ: dict[str, str], kept: Collection[str], folder: Path) -> int:
        self._is_reading = True
        state = read_bashrc(environ, kept=self._kept | set(kept), folder=folder, on_start=self._set_group)
        self._group, self._is_reading = 0, False
        if self._signal:
            return 128 + self._signal
        if state.functions is not None:
            # On the script's first line, so that bash's messages have the script's line numbers.
            script = f". {shlex.quote(str(state.functions))}; {script}"
        return self._run_script(script, state.environ)

    def _run_script(self, script: str, environ: dict[str, str]) -> int:
        bash = subprocess.Popen(["bash", "-c", script], env=environ, start_new_session=True)
        self._set_group(bash.pid)
        code = bash.wait()
        if self._signal:
            # Bash ends at once; a training that it started may still write its checkpoint.
            self._wait_for_group()
            code = code or 128 + self._signal
        self._group = 0
        return code if code >= 0 else 128 - code

    def _set_group(self, group: int) -> None:
        """Remember the process group of the current bash; a signal that came before it exists reaches it now."""
        self._group = group
        if self._signal:
            self._pass_on(self._signal, None)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                # An interactive bash, which reads ~/.bashrc, ignores SIGTERM.
                os.killpg(self._group, signal.SIGKILL if self._is_reading else number)

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


def add_communication(script: str, environ: Mapping[str, str]) -> str:
    """Return the script such that its Python programs apply the mode of `--comm`, if `environ` names one.

    The path is set on the script's first line, after `~/.bashrc` was read, which may set one too.
    """
    if not environ.get(comm_modes.VARIABLE):
        return script
    folder = shlex.quote(str(Path(comm_modes.__file__).parent / "startup"))
    return f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}; {script}"


def build_variables(
    *,
    rank: int,
    ips: Sequence[str],
    gpus_per_node: int,
    task_id: str,
    cluster: str = "gpuhub",
    user: str = "",
) -> dict[str, str]:
    """Return the variables of `setup` and `run` on the node of this rank.

    SkyPilot gives `setup` the variables with SETUP in their names and `run` the others. Here both get all of them: a
    task has the same nodes in both, and commands that test whether a variable is set work.

    Args:
        rank: The node's rank.
        ips: Addresses of all nodes by rank.
        gpus_per_node: GPUs on each node.
        task_id: The same for all starts of the task.
        cluster: Name of the cluster.
        user: Owner of the task.
    """
    addresses = "\n".join(ips)
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": addresses,
        "SKYPILOT_NUM_NODES": str(len(ips)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus_per_node),
        "SKYPILOT_SETUP_NODE_RANK": str(rank),
        "SKYPILOT_SETUP_NODE_IPS": addresses,
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": str(gpus_per_node),
        "SKYPILOT_TASK_ID": task_id,
        "SKYPILOT_CLUSTER_INFO": json.dumps({"cluster_name": cluster, "cloud": "gpuhub", "region": "", "zone": ""}),
        "SKYPILOT_USER": user,
    }


def build_task_id(run_id: str, name: str) -> str:
    """Return an id in SkyPilot's format: `sky-20260314-101500-3f2a91_train_1` for a task named train."""
    return f"sky-{run_id.removeprefix('run-')}_{name or 'task'}_1"


if __name__ == "__main__":
    main()
