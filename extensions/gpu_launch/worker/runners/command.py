"""Runs one program on a node with all GPUs of its container."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

from gpu_launch.worker import processes
from gpu_launch.worker.log_files import create_log_tree, describe_full_disk
from gpu_launch.worker.runners.base import NodeSpec, ProcessExit, build_rank_environ


class CommandRunner:
    """Runs the program of one node, with the variables of the node's only rank."""

    def __init__(self, node: NodeSpec) -> None:
        self._node = node
        (logs,) = create_log_tree(node.logs, node.spec.run_id, 1)
        environ = build_rank_environ(
            node.environ,
            node.spec,
            node_rank=node.node_rank,
            local_rank=0,
            error_file=str(logs.error),
            progress_file=str(node.run.progress_file(node.ranks[0])),
        )
        with logs.stdout.open("wb") as stdout, logs.stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                node.spec.command,
                cwd=node.spec.cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._is_reported = self._is_terminated = False
        self._at_ns = 0

    def poll(self) -> int | None:
        """Return the program's exit code, 128 plus the signal's number if a signal ended it."""
        code = self._process.poll()
        if code is None:
            return None
        self._at_ns = self._at_ns or time.time_ns()
        return code if code >= 0 else 128 - code

    def wait(self, limit_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def new_failures(self) -> list[ProcessExit]:
        """Return the program once, when it has failed."""
        if self._is_reported or not self.poll():
            return []
        self._is_reported = True
        return self.exits()

    def exits(self) -> list[ProcessExit]:
        return [ProcessExit(rank=self._node.ranks[0], code=self._process.poll(), at_ns=self._at_ns)]

    def failure_note(self) -> str:
        """Report a full disk."""
        return "" if self.poll() == 0 else describe_full_disk(self._node.logs)

    def signal(self, number: int) -> None:
        """Send a signal to the program's process group; SIGTERM only once."""
        is_again = number == signal.SIGTERM and self._is_terminated
        self._is_terminated = self._is_terminated or number == signal.SIGTERM
        if self._process.poll() is None and not is_again:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the program and all processes that it started."""
        self.signal(signal.SIGKILL)
        processes.kill_marked(self._node.environ[processes.MARK_VARIABLE])
