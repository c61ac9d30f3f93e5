"""Ranks on this machine as a launch starts them, by a fork server, each as if it had a node of its own."""

from __future__ import annotations

import atexit
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpu_launch.common.network import find_free_port
from gpu_launch.worker.forkserver.client import ChildExit, ForkServerClient
from gpu_launch.worker.forkserver.protocol import CommandKind, RankSpec

_ROOT = Path(__file__).parents[3]
_DEADLINE_S = 300
#: Imported once: each of these takes longer than most scripts here run.
_MODULES = ("transformers.trainer", "transformers.models.llama.modeling_llama", "peft", "matplotlib.pyplot")


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
    environs = [common | {"RANK": str(rank)} | dict(environ) for rank in range(ranks)]
    if not prefixes:
        return _fork(command, environs, cwd)
    started = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "gpu_launch.worker.rank_main", *command],
            cwd=cwd,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for prefix, variables in zip(prefixes, environs, strict=False)
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


@cache
def _start_server() -> ForkServerClient:
    """Return the fork server of this process, with what most scripts here import."""
    with tempfile.NamedTemporaryFile(prefix="fork-server-", suffix=".log", delete=False) as log:
        server = ForkServerClient(mark="tests", log=Path(log.name))
    atexit.register(Path(log.name).unlink)
    atexit.register(server.close)
    problem = server.import_modules(_MODULES, _DEADLINE_S)
    assert not problem, problem
    return server


def _fork(command: Sequence[str], environs: Sequence[Mapping[str, str]], cwd: Path) -> list[RankOutput]:
    is_module = command[0] == "-m"
    with tempfile.TemporaryDirectory() as folder:
        logs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(len(environs))]
        specs = [
            RankSpec(
                kind=CommandKind.MODULE if is_module else CommandKind.SCRIPT,
                command=tuple(command[1:] if is_module else command),
                cwd=str(cwd),
                environ=dict(variables),
                stdout=str(out),
                stderr=str(err),
            )
            for variables, (out, err) in zip(environs, logs, strict=True)
        ]
        ended: queue.SimpleQueue[ChildExit] = queue.SimpleQueue()
        server, codes = _start_server(), dict[int, int | None]()
        pids = server.fork(specs, ended.put)
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while len(codes) < len(pids):
                end = ended.get(timeout=max(0.0, deadline - time.monotonic()))
                codes[end.pid] = end.code
        finally:
            server.signal(signal.SIGKILL)
        return [
            RankOutput(_known(codes[pid]), out.read_text(), err.read_text())
            for pid, (out, err) in zip(pids, logs, strict=True)
        ]


def _known(code: int | None) -> int:
    assert code is not None, "the fork server has ended"
    return code
