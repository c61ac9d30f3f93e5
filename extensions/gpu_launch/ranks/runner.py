"""What runs on a node in one start, whatever the way it was started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_launch.runs import RunFolder
from gpu_launch.spec import LaunchSpec, Way


@dataclass(frozen=True, kw_only=True)
class Node:
    """This container's part in one start."""

    spec: LaunchSpec
    node_rank: int
    name: str
    address: str
    worker: int | None
    #: The container has a part of a GPU only.
    is_capped: bool
    run: RunFolder
    #: Where the log tree of this start is.
    logs: Path
    #: What all its ranks share.
    environ: Mapping[str, str]

    @property
    def processes(self) -> int:
        """How many are started here."""
        return 1 if self.spec.way is Way.TASK else self.spec.roster.nproc_per_node

    @property
    def ranks(self) -> range:
        """Their global ranks."""
        first = self.node_rank * self.spec.roster.nproc_per_node
        return range(first, first + self.processes)


@dataclass(frozen=True, kw_only=True)
class End:
    """How one of them ended."""

    rank: int
    #: Negative for a signal; None where it is not known.
    code: int | None
    #: When that was seen; 0 where it was not.
    at_ns: int = 0
    #: The traceback in its error file.
    recorded: str = ""


class Runner(Protocol):
    """The processes of one start. For the thread that follows them, but for `signal` and `kill`."""

    #: The process that stands for all.
    pid: int

    def poll(self) -> int | None:
        """The exit code of the whole, 0 when all ended well; None while any runs."""

    def wait(self, limit_s: float) -> None:
        """Return when one has ended, or after the time."""

    def failures(self) -> list[End]:
        """Those that failed since this was asked last."""

    def ends(self) -> list[End]:
        """How each ended, after all have."""

    def said(self) -> str:
        """What is to be told of a failure beside the ranks' own words."""

    def signal(self, number: int) -> None:
        """Send a signal to every rank's process group."""

    def kill(self) -> None:
        """End all that is known of, at once, without waiting."""


def recorded(error_file: Path) -> str:
    """The traceback that torch's `record` left; empty where there is none."""
    import json

    try:
        return str(json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
