"""The interface of runners, a node's part in a start, and the environment of its ranks as torchrun sets it."""

from __future__ import annotations

import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpu_launch import environment
from gpu_launch.common.displays import VARIABLE as DISPLAYS
from gpu_launch.common.launch_spec import LaunchSpec, StartMethod
from gpu_launch.prediction import step_profiler
from gpu_launch.report import PATH as PROGRESS
from gpu_launch.training import comm_modes
from gpu_launch.worker import jax_cluster, processes

if TYPE_CHECKING:
    from gpu_launch.common.run_folder import RunFolder

#: Default of torchrun.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


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


def build_node_environ(
    base: Mapping[str, str],
    spec: LaunchSpec,
    *,
    worker: int | None,
    settings: Mapping[str, str],
    progress_file: str,
    display_file: str = "",
) -> dict[str, str]:
    """Return the variables that all ranks of a node share.

    They are the container's without secrets, then those of the node, then those that the user set.

    Args:
        base: Variables of the container.
        spec: The launch.
        worker: The worker's index, None in the notebook's container.
        settings: Variables of `gpu_launch.worker.nccl_env`.
        progress_file: Path with `{rank}`, which each rank fills in.
        display_file: Such a path for displays; empty where nothing can show them.
    """
    environ = environment.remove_secrets(base)
    environ |= {
        processes.MARK_VARIABLE: processes.build_mark(spec.run_id, worker),
        "PYTHONUNBUFFERED": "1",
        "GPU_LAUNCH_ATTEMPT": str(spec.attempt),
        PROGRESS: progress_file,
        "GPU_LAUNCH_PREEMPTIONS": str(spec.membership.preemptions),
    }
    if display_file:
        environ[DISPLAYS] = display_file
    if spec.membership.nproc_per_node > 1:
        # The container's value is for one process; torchrun sets its own for several.
        environ.pop("OMP_NUM_THREADS", None)
    environ |= settings
    environ |= spec.environ
    if spec.coordinator_port and spec.start_method is not StartMethod.TASK:
        environ |= jax_cluster.build_variables(spec)
    if spec.comm:
        environ[comm_modes.VARIABLE] = spec.comm
    if spec.predict:
        environ[step_profiler.VARIABLE] = spec.predict
    if spec.python_path:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [spec.python_path, environ.get("PYTHONPATH", "")]))
    return environ


def build_rank_environ(
    node: Mapping[str, str],
    spec: LaunchSpec,
    *,
    node_rank: int,
    local_rank: int,
    error_file: str,
    progress_file: str,
) -> dict[str, str]:
    """Return one rank's variables on top of its node's, as torchrun's agent sets them."""
    per_node, world = spec.membership.nproc_per_node, spec.membership.ranks
    rank = node_rank * per_node + local_rank
    environ = dict(node)
    if per_node > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    return environ | {
        PROGRESS: progress_file,
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        jax_cluster.PROCESS_ID: str(rank),
        "GROUP_RANK": str(node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": get_torchrun_flag(spec.torchrun_flags, "role", "default"),
        "LOCAL_WORLD_SIZE": str(per_node),
        "WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": str(spec.membership.nnodes),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(spec.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNALS,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def expand_command(command: Sequence[str], *, local_rank: int) -> tuple[str, ...]:
    """Return the command with torchrun's one macro, `${local_rank}`, filled in."""
    return tuple(string.Template(word).safe_substitute(local_rank=str(local_rank)) for word in command)


def get_torchrun_flag(flags: Sequence[str], name: str, default: str) -> str:
    """Return the value of a torchrun flag given as `--name=value`; the last one counts."""
    values = [flag.partition("=")[2] for flag in flags if flag.startswith(f"--{name}=")]
    return values[-1] if values else default
