"""One program a node, which sees all of its container."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

from gpu_launch import processes
from gpu_launch.ranks import variables
from gpu_launch.ranks.logs import find_full, make_tree
from gpu_launch.ranks.runner import End, Node


class TaskRunner:
    """One node's; its variables are those of the node's only rank."""

    def __init__(self, node: Node) -> None:
        self._node = node
        (logs,) = make_tree(node.logs, node.spec.run_id, 1)
        environ = variables.for_rank(
            node.environ,
            node.spec,
            node_rank=node.node_rank,
            local_rank=0,
            error_file=str(logs.error),
            progress_file=str(node.run.progress(node.ranks[0])),
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
        self._is_told = self._is_terminated = False
        self._at_ns = 0

    def poll(self) -> int | None:
        """The program's exit code; 128 and the signal's number for one that a signal ended."""
        code = self._process.poll()
        if code is None:
            return None
        self._at_ns = self._at_ns or time.time_ns()
        return code if code >= 0 else 128 - code

    def wait(self, limit_s: float) -> None:
        """Return when the program has ended, or after the time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def failures(self) -> list[End]:
        """The program, once, when it has failed."""
        if self._is_told or not self.poll():
            return []
        self._is_told = True
        return self.ends()

    def ends(self) -> list[End]:
        """How the program ended."""
        return [End(rank=self._node.ranks[0], code=self._process.poll(), at_ns=self._at_ns)]

    def said(self) -> str:
        """Of a disk without room."""
        return "" if self.poll() == 0 else find_full(self._node.logs)

    def signal(self, number: int) -> None:
        """To the program's process group. SIGTERM is sent once, as to ranks."""
        is_again = number == signal.SIGTERM and self._is_terminated
        self._is_terminated = self._is_terminated or number == signal.SIGTERM
        if self._process.poll() is None and not is_again:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the program and whatever it started."""
        self.signal(signal.SIGKILL)
        processes.kill_marked(self._node.environ[processes.MARK])
