"""Ranks that literal torchrun starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress

from gpu_launch import command, processes
from gpu_launch.ranks.runner import End, Node

_SAID = 4000  # characters


class TorchrunRunner:
    """One node's torchrun, which tells of ranks only at its end."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._mark = node.environ[processes.MARK]
        self._failures = node.run.failures(node.node_rank, node.spec.attempt)
        self._log = node.run.log(f"torchrun-{'notebook' if node.worker is None else node.worker}")
        self._is_terminated = False
        node.logs.mkdir(parents=True, exist_ok=True)
        order = {
            "argv": command.build_arguments(
                node.spec, node_rank=node.node_rank, local_addr=node.address, capped=node.is_capped
            ),
            "shutdown_s": node.spec.shutdown_s,
            "cwd": node.spec.cwd,
            "failures": str(self._failures),
        }
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_launch.torchrun"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(node.environ),
                start_new_session=True,
            )
        assert self._process.stdin is not None  # noqa: S101 - made with a pipe
        # One that has ended already is seen by its end.
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(order).encode() + b"\n")
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """torchrun's own exit code."""
        return self._process.poll()

    def wait(self, limit_s: float) -> None:
        """Return when torchrun has ended, or after the time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def failures(self) -> list[End]:
        """None before the end."""
        return []

    def ends(self) -> list[End]:
        """torchrun names those that failed."""
        try:
            failed = json.loads(self._failures.read_text())
        except (FileNotFoundError, ValueError):
            failed = {}
        code = 0 if self.poll() == 0 else None
        return [
            End(rank=rank, code=known["exit_code"], recorded=known["error"])
            if (known := failed.get(str(rank)))
            else End(rank=rank, code=code)
            for rank in self._node.ranks
        ]

    def said(self) -> str:
        """The end of torchrun's own log, where it failed without a failing rank."""
        if self.poll() == 0 or self._failures.exists():
            return ""
        return self._log.read_text(errors="replace")[-_SAID:]

    def signal(self, number: int) -> None:
        """To torchrun, which passes it on to its ranks; with no rank left it is ended at once.

        A torchrun whose ranks are done waits for the other nodes in native code, where no signal's handler runs.
        SIGTERM is sent once: a second one would break off its wait for its ranks.
        """
        if self.poll() is not None:
            return
        if all(pid == self.pid for pid in processes.marked(self._mark)):
            self._process.kill()
        elif number != signal.SIGTERM or not self._is_terminated:
            self._is_terminated = self._is_terminated or number == signal.SIGTERM
            self._process.send_signal(number)

    def kill(self) -> None:
        """End torchrun, its ranks and whatever they started."""
        if self.poll() is None:
            self._process.kill()
        processes.kill_marked(self._mark)
