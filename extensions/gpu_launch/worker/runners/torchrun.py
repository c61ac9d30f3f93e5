"""Starts ranks with literal torchrun: the runner, the command line, and the process that runs torchrun.

That process, `python -m gpu_launch.worker.runners.torchrun`, imports torch at once and then reads one line of JSON from
stdin: `{"argv": [...], "shutdown_s": null, "cwd": "", "failures": "path"}`. At its end it records which ranks failed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_launch.common.launch_spec import LaunchSpec
from gpu_launch.worker import log_files, processes
from gpu_launch.worker.runners.base import NodeSpec, ProcessExit

_LOG_EXCERPT = 4000  # characters


class TorchrunRunner:
    """Runs one node's torchrun, which reports ranks only at its end."""

    def __init__(self, node: NodeSpec) -> None:
        self._node = node
        self._mark = node.environ[processes.MARK_VARIABLE]
        self._failures_file = node.run.failures_file(node.node_rank, node.spec.attempt)
        self._log = node.run.log_file(f"torchrun-{'notebook' if node.worker is None else node.worker}")
        self._is_terminated = False
        node.logs.mkdir(parents=True, exist_ok=True)
        request = {
            "argv": build_arguments(
                node.spec, node_rank=node.node_rank, local_addr=node.address, capped=node.is_capped
            ),
            "shutdown_s": node.spec.shutdown_s,
            "cwd": node.spec.cwd,
            "failures": str(self._failures_file),
        }
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_launch.worker.runners.torchrun"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(node.environ),
                start_new_session=True,
            )
        assert self._process.stdin is not None  # noqa: S101 - made with a pipe
        # If it has ended already, its exit code shows that.
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(request).encode() + b"\n")
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return torchrun's own exit code."""
        return self._process.poll()

    def wait(self, limit_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def new_failures(self) -> list[ProcessExit]:
        """Return no failures: torchrun reports them at its end."""
        return []

    def exits(self) -> list[ProcessExit]:
        """Return the exits; torchrun names the ranks that failed."""
        try:
            failed = json.loads(self._failures_file.read_text())
        except (FileNotFoundError, ValueError):
            failed = {}
        code = 0 if self.poll() == 0 else None
        return [
            ProcessExit(rank=rank, code=failure["exit_code"], traceback=failure["error"])
            if (failure := failed.get(str(rank)))
            else ProcessExit(rank=rank, code=code)
            for rank in self._node.ranks
        ]

    def failure_note(self) -> str:
        """Return the end of torchrun's own log if it failed without a failing rank."""
        if self.poll() == 0 or self._failures_file.exists():
            return ""
        return self._log.read_text(errors="replace")[-_LOG_EXCERPT:]

    def signal(self, number: int) -> None:
        """Send a signal to torchrun, which forwards it to its ranks; kill torchrun if it has no rank left.

        A torchrun whose ranks are done waits for the other nodes in native code, where no signal handler runs. SIGTERM
        is sent only once, because a second one would interrupt its wait for its ranks.
        """
        if self.poll() is not None:
            return
        if all(pid == self.pid for pid in processes.find_marked(self._mark)):
            self._process.kill()
        elif number != signal.SIGTERM or not self._is_terminated:
            self._is_terminated = self._is_terminated or number == signal.SIGTERM
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill torchrun, its ranks and all processes that they started."""
        if self.poll() is None:
            self._process.kill()
        processes.kill_marked(self._mark)


def build_arguments(spec: LaunchSpec, *, node_rank: int, local_addr: str, capped: bool = False) -> list[str]:
    """Build torchrun's arguments on one node: static rendezvous, every rank's streams in files.

    With `capped` the ranks are limited to the container's GPU share. `worker.rank_main` applies that limit, the mode of
    `--comm`, the profile of `--predict` and the exchange of values.
    """
    arguments = [
        f"--nnodes={spec.membership.nnodes}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={spec.membership.nproc_per_node}",
        f"--master-addr={spec.master_addr}",
        f"--master-port={spec.master_port}",
        f"--local-addr={local_addr}",
        f"--rdzv-id={spec.run_id}",
        "--max-restarts=0",
        f"--log-dir={build_node_log_dir(spec, node_rank)}",
        "--redirects=3",
        *spec.torchrun_flags,
    ]
    if (capped or spec.exchange or spec.comm or spec.predict) and not spec.no_python:
        exchange = ["--exchange", spec.exchange] if spec.exchange else []
        module = ["-m"] if spec.module else []
        return [*arguments, "--module", "gpu_launch.worker.rank_main", *exchange, *module, *spec.command]
    if spec.module:
        arguments.append("--module")
    if spec.no_python:
        arguments.append("--no-python")
    return [*arguments, *spec.command]


def build_node_log_dir(spec: LaunchSpec, node_rank: int) -> str:
    """Return the folder of a node's logs in one start, in which torchrun creates its own tree."""
    suffix = f"-restart{spec.attempt}" if spec.attempt else ""
    return f"{spec.log_dir}/node{node_rank}{suffix}"


def format_commands(spec: LaunchSpec, addresses: list[str]) -> str:
    """Format the commands, one for each node, that would start the same launch by hand."""
    lines = [
        shlex.join(["torchrun", *build_arguments(spec, node_rank=rank, local_addr=address)])
        for rank, address in enumerate(addresses)
    ]
    return "\n".join([f"# in {shlex.quote(spec.cwd)}, one line a node", *lines, ""])


def main() -> int:
    """Run torchrun and write the failed ranks to the given file."""
    # SIGTERM makes torchrun end its ranks when the engine was killed.
    processes.die_with_parent(signal.SIGTERM, os.getppid())
    problem = _import_torchrun()
    start = json.loads(sys.stdin.readline())
    # Ranks inherit an empty stdin instead of this pipe.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(start["cwd"])
    if problem:
        sys.stderr.write(problem)
        return 1
    return _run_torchrun(start["argv"], start["shutdown_s"], Path(start["failures"]))


def _import_torchrun() -> str:
    try:
        import torch.distributed.run  # noqa: F401
    except ImportError as error:
        return f"PyTorch cannot be imported with {sys.executable}: {error}\n"
    return ""


def _run_torchrun(argv: list[str], shutdown_s: int | None, failures: Path) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if shutdown_s is not None and "--shutdown-timeout" in run.get_args_parser().format_help():
        # First, so that the user's own flag takes precedence. Older torchruns lack the flag and wait for 30 s.
        argv = [f"--shutdown-timeout={shutdown_s}", *argv]
    try:
        # As torchrun's `main`, but without its own summary of the failure.
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        failures.write_text(json.dumps(_collect_failures(error)))
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _collect_failures(error: Any) -> dict[str, Any]:
    """Return exit codes and tracebacks by global rank."""
    failures = {}
    for rank, failure in error.failures.items():
        failures[str(rank)] = {
            "exit_code": failure.exitcode,
            "error": log_files.read_error_file(Path(failure.error_file)),
        }
    return failures


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter teardown with torch takes a fifth of a second and has no benefit here.
    os._exit(exit_code)
