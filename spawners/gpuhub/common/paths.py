"""Paths of an instance's files on the head node, and the file locks that let one process of a kind run for each
instance.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common import names
from gpuhub.common.errors import SettingsError, SetupError

DEFAULT_INSTANCE = "gpuhub"


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders and files of one instance; instances on the same machine share none."""

    instance: str = DEFAULT_INSTANCE

    def __post_init__(self) -> None:
        if not re.fullmatch(names.INSTANCE_PATTERN, self.instance):
            raise SettingsError(
                f"instance {self.instance!r}: a lower-case letter, then at most 7 letters or digits, is needed"
            )

    @property
    def state(self) -> Path:
        """Folder for files that must survive a reboot."""
        return Path("/var/lib") / self.instance

    @property
    def run(self) -> Path:
        """Folder for sockets and process ids."""
        return Path("/run") / self.instance

    @property
    def log(self) -> Path:
        """Folder for the logs of hub, proxy, broker and the practice closet's daemons."""
        return Path("/var/log") / self.instance

    @property
    def secrets(self) -> Path:
        """Folder for tokens and keys; its mode is 0700, and it belongs to root."""
        return self.state / "secrets"

    @property
    def internal_certificates(self) -> Path:
        """Folder for JupyterHub's authorities and certificates for internal TLS; only root can read it."""
        return self.secrets / "internal"

    @property
    def authority(self) -> Path:
        """The local authority's certificate, which users install in browsers; its key is among the secrets."""
        return self.state / "authority.pem"

    @property
    def store(self) -> Path:
        """The broker's SQLite file."""
        return self.state / "broker.sqlite"

    @property
    def hub_database(self) -> Path:
        """JupyterHub's SQLite file."""
        return self.state / "jupyterhub.sqlite"

    @property
    def known_nodes(self) -> Path:
        """The nodes that `gpuhub up` has set up, with the addresses of their daemons."""
        return self.state / "known-nodes.json"

    @property
    def upgrade_backups(self) -> Path:
        """Folder of the backups that `gpuhub up` makes before it changes the tables of the databases."""
        return self.state / "upgrade-backups"

    @property
    def unfinished_restore(self) -> Path:
        """A file that is there while `gpuhub restore` replaces files, so that nothing starts on half of them."""
        return self.state / "restore-unfinished"

    @property
    def stopped_nodes(self) -> Path:
        """The nodes on which `gpuhub down` has removed everything; the next broker reads and removes the file."""
        return self.state / "stopped-nodes.json"

    @property
    def bench(self) -> Path:
        """What `gpuhub bench` last measured."""
        return self.state / "bench.json"

    @property
    def closet(self) -> Path:
        """Folder of the practice closet: its cluster.toml, simulated driver and nodes' data."""
        return self.state / "closet"

    @property
    def closet_cluster_file(self) -> Path:
        """The cluster.toml that the practice closet writes."""
        return self.closet / "cluster.toml"

    @property
    def used_cluster_file(self) -> Path:
        """A copy of the settings that the running services have read."""
        return self.run / "cluster.toml.used"

    @property
    def prometheus(self) -> Path:
        """Folder of the head node's Prometheus: configuration, token and data; only it and root can read them."""
        return self.state / "prometheus"

    @property
    def monitoring_choice(self) -> Path:
        """A file that is there while `gpuhub up` starts Prometheus also without the option, such as at boot."""
        return self.state / "monitoring"

    @property
    def laptop_wheel(self) -> Path:
        """Folder of the wheel of gpu-launch that the hub serves; it is public."""
        return self.state / "laptop-wheel"

    @property
    def lab_assets(self) -> Path:
        """Folder of JupyterLab's files for browsers, a folder for each version; it is public."""
        return self.state / "lab"

    @property
    def images(self) -> Path:
        """Folder of the wheelhouse and root file systems from which images are built."""
        return self.state / "images"


def acquire_lock(file: Path, refusal: str) -> int:
    """Lock a file; the lock lasts as long as the returned descriptor is open, at most until the process ends.

    Raises:
        SetupError: another process has the lock; the text begins with `refusal` and names the file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SetupError(f"{refusal} (it locks {file}): stop it first") from None
    return lock
