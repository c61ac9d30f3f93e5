"""Starts ranks with literal torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress

from gpu_launch.common import processes, torchrun_command
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
            "argv": torchrun_command.build_arguments(
                node.spec, node_rank=node.node_rank, local_addr=node.address, capped=node.is_capped
            ),
            "shutdown_s": node.spec.shutdown_s,
            "cwd": node.spec.cwd,
            "failures": str(self._failures_file),
        }
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_launch.worker.torchrun_main"],
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
