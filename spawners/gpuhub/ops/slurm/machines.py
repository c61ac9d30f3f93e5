"""The machines of a Slurm: this one, the head, and the nodes over the administrator's SSH."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.head_address import find_head_address
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.ssh import ssh_files
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.provision.node_join import verify_host_keys
from gpuhub.ops.provision.ssh_session import SshSession, parse_target, resolve_direct_target

M = TypeVar("M")
T = TypeVar("T")
#: The name of the head node where it is not a node of cluster.toml.
HEAD = "head"
#: Maximum duration of a script, seconds.
_SCRIPT_S = 90.0


class ScriptRunner(Protocol):
    """A machine that runs scripts; see `SshSession.run`."""

    def run(
        self, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float = _SCRIPT_S
    ) -> str:
        """Run a POSIX script there, and return its output.

        Raises:
            SetupError: It fails; the text has its last line.
        """

    def send_file(
        self, file: Path, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float
    ) -> None:
        """Run a POSIX script of one line there, with a file on its standard input.

        Raises:
            SetupError: It fails; the text has its last line.
        """


class LocalShell:
    """This machine, on which the command runs as root."""

    def run(
        self, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float = _SCRIPT_S
    ) -> str:
        del as_root  # it is root already
        return _run_shell(["-s", "--", *arguments], timeout_s, input=script)

    def send_file(
        self, file: Path, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float
    ) -> None:
        del as_root
        with file.open("rb") as stream:
            _run_shell(["-c", script, "sh", *arguments], timeout_s, stdin=stream)


def _run_shell(options: Sequence[str], timeout_s: float, **stdin: Any) -> str:
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            ["sh", *options], check=False, capture_output=True, text=True, timeout=timeout_s, **stdin
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"the command on this machine took longer than {timeout_s:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        last = lines[-1][:300] if lines else f"it ended with status {done.returncode} and no output"
        raise SetupError(f"on this machine: {last}")
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmMachine:
    """A machine of the Slurm: the head, a node, or both."""

    #: The node's name in gpuhub; `head` where the head is not a node.
    name: str
    runner: ScriptRunner
    is_head: bool = False
    #: Its table in cluster.toml; None where it does not compute.
    node: NodeSettings | None = None


def find_head_node(cluster: ClusterSettings, head_address: str) -> NodeSettings | None:
    """Return the node that is the head node itself; None if there is none."""
    for node in cluster.nodes:
        if node.docker.startswith("unix://") or node.address == head_address:
            return node
    return None


@contextmanager
def open_machines(
    cluster: ClusterSettings, paths: Paths, console: OperatorConsole, head: ScriptRunner, *, is_confirmed: bool
) -> Iterator[list[SlurmMachine]]:
    """Log in to all nodes, one after another, since ssh may ask for passwords; the head is the first machine.

    Args:
        head: The head node.
        is_confirmed: Host keys of new machines are accepted without a question.

    Raises:
        SetupError: At least one node cannot be reached; nothing was changed.
    """
    own = find_head_node(cluster, find_head_address(cluster))
    machines = [SlurmMachine(name=HEAD if own is None else own.name, runner=head, is_head=True, node=own)]
    failures = []
    with ExitStack() as stack:
        for node in cluster.nodes:
            if node is own:
                continue
            try:
                target = parse_target(node.docker if node.docker.startswith("ssh://") else f"ssh://{node.address}")
                resolved = resolve_direct_target(target)
                keys = verify_host_keys(
                    resolved, ssh_files(paths.instance), node.name, console, is_confirmed=is_confirmed
                )
                session = stack.enter_context(SshSession(target, keys))
            except GpuhubError as error:
                failures.append(f"  {node.name}: {error}")
            else:
                machines.append(SlurmMachine(name=node.name, runner=session, node=node))
        if failures:
            raise SetupError("\n".join(["nothing was changed, because not all nodes can be reached:", *failures]))
        yield machines


def on_all(items: Sequence[M], action: Callable[[M], T]) -> list[T]:
    """Run an action for all machines, or plans of machines, at the same time; return the results in their order.

    Raises:
        SetupError: It failed on a machine.
    """
    with ThreadPoolExecutor(max_workers=max(len(items), 1), thread_name_prefix="slurm") as pool:
        return list(pool.map(action, items))
