"""Values and the interface that all runners share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_launch.common.launch_spec import LaunchSpec, StartMethod
from gpu_launch.common.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """This container's part in one start of a launch."""

    spec: LaunchSpec
    node_rank: int
    name: str
    address: str
    worker: int | None
    #: The container has a GPU share, not a whole GPU.
    is_capped: bool
    run: RunFolder
    #: Where the log tree of this start is created.
    logs: Path
    #: Variables that all ranks of the node share.
    environ: Mapping[str, str]

    @property
    def processes(self) -> int:
        """Return the number of processes to start on this node."""
        return 1 if self.spec.start_method is StartMethod.TASK else self.spec.membership.nproc_per_node

    @property
    def ranks(self) -> range:
        """Return the global ranks of this node."""
        first = self.node_rank * self.spec.membership.nproc_per_node
        return range(first, first + self.processes)


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """The exit of one process."""

    rank: int
    #: Negative for a signal; None if unknown.
    code: int | None
    #: When the exit was seen, 0 if unknown.
    at_ns: int = 0
    #: Traceback from the rank's error file.
    traceback: str = ""


class Runner(Protocol):
    """The processes of one start. One thread uses it, except for `signal` and `kill`."""

    #: The process that represents all.
    pid: int

    def poll(self) -> int | None:
        """Return the overall exit code, 0 if all processes ended well; None while any runs."""

    def wait(self, limit_s: float) -> None:
        """Return when a process has ended, or after the time limit."""

    def new_failures(self) -> list[ProcessExit]:
        """Return the processes that failed since the last call."""

    def exits(self) -> list[ProcessExit]:
        """Return the exit of each process, after all have ended."""

    def failure_note(self) -> str:
        """Return the reason for a failure that the ranks' own output does not contain."""

    def signal(self, number: int) -> None:
        """Send a signal to every rank's process group."""

    def kill(self) -> None:
        """Kill all known processes without waiting."""
