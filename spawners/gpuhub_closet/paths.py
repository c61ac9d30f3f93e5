"""Folders and files of the closet and of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.paths import Paths
from gpuhub_closet.topology import ClosetNode


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Folders and files of one node; those under `state` may be kept for the next start, those under `run` may not."""

    state: Path
    run: Path
    log: Path

    @property
    def data_root(self) -> Path:
        """Docker's images and containers."""
        return self.state / "docker"

    @property
    def toolkit(self) -> Path:
        """The folder of the hook, which is put on the daemon's PATH; not below /run, which may be mounted noexec."""
        return self.state / "toolkit"

    @property
    def daemon_file(self) -> Path:
        """The daemon's configuration file, so that it does not read the machine's."""
        return self.state / "daemon.json"

    @property
    def docker_settings(self) -> Path:
        """The node's /etc/docker, with the key that is the identity of its daemon."""
        return self.state / "etc-docker"

    @property
    def exec_root(self) -> Path:
        """Docker's run-time files."""
        return self.run / "exec"

    @property
    def pid_file(self) -> Path:
        """The file with the daemon's process id in the node's process namespace."""
        return self.run / "docker.pid"

    @property
    def lock(self) -> Path:
        """A lock that is held while the node's daemon lives."""
        return self.run / "lock"

    @property
    def socket(self) -> Path:
        """Docker's API."""
        return self.run / "docker.sock"

    @property
    def gpus(self) -> Path:
        """The folder with one folder for each GPU, named by its index."""
        return self.run / "cards"

    @property
    def docker_url(self) -> str:
        """The socket as a Docker URL."""
        return f"unix://{self.socket}"


def node_paths(paths: Paths, node: ClosetNode | str) -> NodePaths:
    """Return the paths of a node, given itself or its name."""
    name = node if isinstance(node, str) else node.name
    return NodePaths(
        state=paths.closet / name,
        run=run_folder(paths) / name,
        log=paths.log / f"closet-{name}.log",
    )


def run_folder(paths: Paths) -> Path:
    """Return the folder of the closet's sockets and other volatile files."""
    return paths.run / "closet"


def driver_folder(paths: Paths) -> Path:
    """Return the folder of the compiled drivers, one subfolder for each version of the source."""
    return paths.closet / "driver"


def layout_file(paths: Paths) -> Path:
    """Return the file with the name of the closet's layout."""
    return paths.closet / "layout"


def real_gpu_file(paths: Paths) -> Path:
    """Return the file with the node that has this machine's own GPUs, and with these."""
    return paths.closet / "real-gpu.json"


def slurm_folder(paths: Paths) -> Path:
    """Return the folder of the closet's Slurm: settings, sockets and queue. Users can reach it."""
    return paths.closet / "slurm"


def cgroup_name(instance: str) -> str:
    """Return the name of the control group above all containers of the closet."""
    return f"{instance}-closet"
