"""The nodes' Docker daemons: their commands, waiting until they answer, and stopping them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub_closet import network, shell
from gpuhub_closet.network import Command
from gpuhub_closet.paths import NodePaths, cgroup_name, node_paths
from gpuhub_closet.topology import ClosetNode, ClosetPlan

#: A node's start waits at most this long for an earlier daemon of the node to end, seconds.
LOCK_WAIT_S = 30
#: dockerd gives its containers this long to end, seconds.
SHUTDOWN_S = 5
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_PING_TIMEOUT_S = 5.0
_LOG_LINES = 15
# Run inside the node's namespaces. Files of a killed daemon are removed, because the process ids in them may belong to
# other processes by now. The two folders hold sockets whose place Docker does not let us choose, so each node gets its
# own folders, which vanish with it. /etc/docker has the key from which Docker up to 24 takes its identity, at a place
# that cannot be chosen either: each node has its own, and only registries' certificates are the machine's.
_START = """\
hostname "$1"
for folder in /run/docker /run/containerd; do
    mkdir -p "$folder"
    mount -t tmpfs -o mode=711 closet "$folder"
done
if [ -d /etc/docker/certs.d ]; then
    mkdir -p "$6/certs.d"
    mount --bind /etc/docker/certs.d "$6/certs.d"
fi
mkdir -p /etc/docker
mount --rbind "$6" /etc/docker
rm -rf -- "$2" "$3" "$4"
PATH="$5:$PATH"
shift 6
exec "$@"
"""


def build_dockerd(plan: ClosetPlan, node: ClosetNode, files: NodePaths) -> Command:
    """Return the command line of the node's dockerd."""
    pool = plan.bridge_pool(node)
    bridge = pool.broadcast_address - 254
    return (
        "dockerd",
        "--config-file", str(files.daemon_file),
        "--host", files.docker_url,
        "--group", "root",
        "--data-root", str(files.data_root),
        "--exec-root", str(files.exec_root),
        "--pidfile", str(files.pid_file),
        "--exec-opt", "native.cgroupdriver=cgroupfs",
        "--cgroup-parent", f"/{cgroup_name(plan.instance)}/{node.name}",
        "--bip", f"{bridge}/24",
        "--default-address-pool", f"base={pool},size=24",
        "--shutdown-timeout", str(SHUTDOWN_S),
        "--log-level", "warn",
    )  # fmt: skip


def build_node_command(plan: ClosetPlan, node: ClosetNode, files: NodePaths) -> Command:
    """Return the command that runs a node in the foreground: SIGTERM stops it cleanly, SIGKILL like a power cut.

    The node has its own network, host name, mounts and process ids. When its first process ends, the kernel ends
    all others and drops the mounts, so nothing of a killed node is left over.
    """
    start = ("sh", "-euc", _START, "sh", node.name)
    removed = (str(files.exec_root), str(files.pid_file), str(files.socket))
    return (
        # dockerd inherits the lock: it is free when the last process of the chain is gone.
        "flock", "--timeout", str(LOCK_WAIT_S), "--no-fork", str(files.lock),
        "docker-init", "-s", "-g", "--",
        "setpriv", "--pdeathsig", "KILL",
        "nsenter", f"--net=/run/netns/{plan.netns_name(node)}",
        "unshare", "--uts", "--mount", "--propagation", "slave",
        "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
        *start, *removed, str(files.toolkit), str(files.docker_settings),
        "docker-init", "--", *build_dockerd(plan, node, files),
    )  # fmt: skip


def build_foreground_command(plan: ClosetPlan, node: ClosetNode, paths: Paths) -> list[str]:
    """Return the command that a supervisor runs for a node, in the foreground.

    SIGTERM to its process stops the node cleanly within some seconds; SIGKILL ends the whole node at once, with its
    containers. A start waits until an earlier daemon of the node is gone. `lifecycle.prepare_closet` must have run.
    """
    return list(build_node_command(plan, node, node_paths(paths, node)))


def is_answering(node: ClosetNode, paths: Paths) -> bool:
    """Return whether the node's Docker API answers."""
    return is_socket_answering(node_paths(paths, node).socket)


def is_socket_answering(path: Path) -> bool:
    """Return whether a Docker API answers on this socket."""
    # A plain socket: HTTP clients leave theirs open when connecting fails, which is the usual case here.
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PING_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in connection.recv(100)
        except OSError:
            return False


def wait_ready(plan: ClosetPlan, paths: Paths, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return when every node's Docker answers.

    Raises:
        SetupError: One does not; the text has the end of its log.
    """
    for node in plan.nodes:
        if not shell.wait_until(partial(is_answering, node, paths), timeout_s=timeout_s):
            log = node_paths(paths, node).log
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""
            raise SetupError(
                f"Docker of closet node {node.name} does not answer after {timeout_s:.0f} s; its log {log}:\n{tail}"
            )


def find_processes(plan: ClosetPlan, node: ClosetNode) -> dict[int, str]:
    """Return the processes in a node's network namespace or control group (process id → name)."""
    space = network.netns_id(plan, node)
    group = f"/{cgroup_name(plan.instance)}/{node.name}/"
    processes = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "ns/net").stat()
            if (status.st_dev, status.st_ino) == space or group in (entry / "cgroup").read_text():
                processes[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue  # it has ended in the meantime
    return processes


def stop_daemons(plan: ClosetPlan, nodes: Iterable[ClosetNode], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop these nodes, cleanly if possible, and return when none of their processes is left.

    A supervisor that restarts daemons must have been stopped before.
    """
    nodes = tuple(nodes)
    for node in nodes:
        _signal(plan, node, signal.SIGTERM, only="dockerd")
    if shell.wait_until(lambda: not _find_running(plan, nodes), timeout_s=timeout_s):
        return
    for node in nodes:
        _signal(plan, node, signal.SIGKILL)
    if not shell.wait_until(lambda: not _find_running(plan, nodes), timeout_s=timeout_s):
        raise SetupError(f"these processes of the closet do not end: {', '.join(_find_running(plan, nodes))}")


def _find_running(plan: ClosetPlan, nodes: Iterable[ClosetNode]) -> list[str]:
    return [f"{name} ({pid})" for node in nodes for pid, name in find_processes(plan, node).items()]


def _signal(plan: ClosetPlan, node: ClosetNode, number: signal.Signals, only: str | None = None) -> None:
    for pid, name in find_processes(plan, node).items():
        if only in (None, name):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
