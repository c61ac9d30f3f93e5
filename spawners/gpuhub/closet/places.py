"""Where a closet node keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuhub.closet.plan import ClosetNode
from gpuhub.paths import Paths


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """Folders and files of one node; what is under `state` may be kept for the next start, `run` may not."""

    state: Path
    run: Path
    log: Path

    @property
    def data_root(self) -> Path:
        """Docker's images and containers."""
        return self.state / "docker"

    @property
    def toolkit(self) -> Path:
        """The folder put on the daemon's PATH: the hook. Not below /run, which may forbid executing."""
        return self.state / "toolkit"

    @property
    def daemon_file(self) -> Path:
        """The daemon's own configuration file, so that it does not read the machine's."""
        return self.state / "daemon.json"

    @property
    def exec_root(self) -> Path:
        """Docker's run-time files."""
        return self.run / "exec"

    @property
    def pid_file(self) -> Path:
        """The daemon's process id, as seen in the node's own process namespace."""
        return self.run / "docker.pid"

    @property
    def lock(self) -> Path:
        """Held as long as the node's daemon lives."""
        return self.run / "lock"

    @property
    def socket(self) -> Path:
        """Docker's API."""
        return self.run / "docker.sock"

    @property
    def cards(self) -> Path:
        """One folder a card, named by its index."""
        return self.run / "cards"

    @property
    def docker_url(self) -> str:
        """The socket as a Docker URL."""
        return f"unix://{self.socket}"


def node_places(paths: Paths, node: ClosetNode | str) -> NodePlaces:
    """The places of a node, given itself or its name."""
    name = node if isinstance(node, str) else node.name
    return NodePlaces(
        state=paths.closet / name,
        run=run_folder(paths) / name,
        log=paths.log / f"closet-{name}.log",
    )


def run_folder(paths: Paths) -> Path:
    """The folder of all the closet's sockets and other volatile files."""
    return paths.run / "closet"


def driver_folder(paths: Paths) -> Path:
    """The folder of the compiled simulated drivers, one subfolder for each version of the source."""
    return paths.closet / "driver"


def slurm_folder(paths: Paths) -> Path:
    """The closet's Slurm: settings, sockets and queue. Below the state's folder, which users can reach."""
    return paths.closet / "slurm"


def cgroup(instance: str) -> str:
    """The control group below which all containers of the closet run."""
    return f"{instance}-closet"
