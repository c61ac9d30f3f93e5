"""Where an instance keeps its files on the head node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gpuhub import names
from gpuhub.errors import SettingsError

DEFAULT_INSTANCE = "gpuhub"


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders and files of one instance; several instances on one machine share nothing."""

    instance: str = DEFAULT_INSTANCE

    def __post_init__(self) -> None:
        if not re.fullmatch(names.INSTANCE_PATTERN, self.instance):
            raise SettingsError(
                f"instance {self.instance!r}: a lower-case letter, then at most 7 letters or digits, is needed"
            )

    @property
    def state(self) -> Path:
        """What must survive a reboot."""
        return Path("/var/lib") / self.instance

    @property
    def run(self) -> Path:
        """Sockets and process ids."""
        return Path("/run") / self.instance

    @property
    def log(self) -> Path:
        """Log files of hub, proxy, broker and the practice closet's daemons."""
        return Path("/var/log") / self.instance

    @property
    def secrets(self) -> Path:
        """Tokens and keys; the folder is 0700 and belongs to root."""
        return self.state / "secrets"

    @property
    def internal_certificates(self) -> Path:
        """JupyterHub's own authorities and certificates for TLS between the parts; root's alone."""
        return self.secrets / "internal"

    @property
    def authority(self) -> Path:
        """The local authority's certificate, which browsers are told to trust; its key is a secret."""
        return self.state / "authority.pem"

    @property
    def store(self) -> Path:
        """The broker's SQLite file."""
        return self.state / "broker.sqlite"

    @property
    def closet(self) -> Path:
        """The practice closet's files: its cluster.toml, its simulated driver, its nodes' data."""
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
    def images(self) -> Path:
        """Wheelhouse and root file systems from which images are built."""
        return self.state / "images"
