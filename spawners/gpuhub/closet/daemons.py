"""The nodes' Docker daemons: starting, waiting for, and ending them, whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from gpuhub.closet import network, shell
from gpuhub.closet.commands import Command, build_node_command
from gpuhub.closet.places import cgroup, node_places
from gpuhub.closet.plan import ClosetNode, Plan
from gpuhub.errors import SetupError
from gpuhub.paths import Paths

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_PING_TIMEOUT_S = 5.0
_LOG_LINES = 15


def dockerd_command(plan: Plan, node: ClosetNode, paths: Paths) -> list[str]:
    """The command a supervisor runs for a node, in the foreground.

    SIGTERM to its process ends the node cleanly within some seconds; SIGKILL ends all of the node at once, with
    its containers. A start waits until an earlier daemon of the same node is gone. `lifecycle.prepare` must
    have run.
    """
    return list(build_node_command(plan, node, node_places(paths, node)))


def start(plan: Plan, node: ClosetNode, paths: Paths) -> None:
    """Start a node's daemon in the background, without a supervisor."""
    command: Command = ("setsid", "--fork", *dockerd_command(plan, node, paths))
    log = node_places(paths, node).log
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def is_answering(node: ClosetNode, paths: Paths) -> bool:
    """Whether the node's Docker API answers."""
    # By hand: HTTP clients leave a socket open when connecting fails, and here that is the usual case.
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PING_TIMEOUT_S)
        try:
            connection.connect(str(node_places(paths, node).socket))
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in connection.recv(100)
        except OSError:
            return False


def wait_ready(plan: Plan, paths: Paths, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return when every node's Docker answers; SetupError with the end of the log of one that does not."""
    for node in plan.nodes:
        if not shell.wait_until(partial(is_answering, node, paths), timeout_s=timeout_s):
            log = node_places(paths, node).log
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""
            raise SetupError(
                f"Docker of closet node {node.name} does not answer after {timeout_s:.0f} s; its log {log}:\n{tail}"
            )


def processes(plan: Plan, node: ClosetNode) -> dict[int, str]:
    """The processes of a node (process id → name): those in its network namespace or its control group."""
    space = network.netns_id(plan, node)
    group = f"/{cgroup(plan.instance)}/{node.name}/"
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "ns/net").stat()
            if (status.st_dev, status.st_ino) == space or group in (entry / "cgroup").read_text():
                found[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue  # it ended while it was looked at
    return found


def stop(plan: Plan, nodes: Iterable[ClosetNode], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End these nodes, cleanly if they can, and return when none of their processes is left.

    A supervisor that starts daemons anew must have been stopped before.
    """
    nodes = tuple(nodes)
    for node in nodes:
        _signal(plan, node, signal.SIGTERM, only="dockerd")
    if shell.wait_until(lambda: not _running(plan, nodes), timeout_s=timeout_s):
        return
    for node in nodes:
        _signal(plan, node, signal.SIGKILL)
    if not shell.wait_until(lambda: not _running(plan, nodes), timeout_s=timeout_s):
        raise SetupError(f"these processes of the closet do not end: {', '.join(_running(plan, nodes))}")


def _running(plan: Plan, nodes: Iterable[ClosetNode]) -> list[str]:
    return [f"{name} ({pid})" for node in nodes for pid, name in processes(plan, node).items()]


def _signal(plan: Plan, node: ClosetNode, number: signal.Signals, only: str | None = None) -> None:
    for pid, name in processes(plan, node).items():
        if only in (None, name):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
