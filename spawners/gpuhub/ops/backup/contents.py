"""Which files of the head node belong into a backup, and where a restoration puts them."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.ssh import ssh_files

#: Folders below the state's folder that a new head needs. Others can be made again (images, wheels, the file server's
#: configuration), are data of users (homes), or have copies of their own (measurements of Prometheus).
STATE_FOLDERS = ("secrets", "slurm-notebooks")
#: Folder of the archive with the copies of the databases.
DATABASES = "databases"
#: Folder with an administrator's own files for JupyterHub, next to jupyterhub_config.py.
OWN_CONFIG = "jupyterhub_config.d"
CLUSTER_FILE = "cluster.toml"
#: Maximum size of a file in a backup, bytes. Larger files are left out; gpuhub's own are smaller.
MAX_FILE_BYTES = 64 << 20
#: Ends of names of files that mean nothing on another head: databases are copied in another way.
_EXCLUDED = (".sqlite", ".sqlite-wal", ".sqlite-shm", ".sqlite-journal", ".lock", ".new")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where the files of a head node are."""

    paths: Paths
    #: cluster.toml.
    cluster_file: Path
    #: jupyterhub_config.py.
    hub_config: Path

    @property
    def own_config(self) -> Path:
        return self.hub_config.parent / OWN_CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the head node that belongs into the archive."""

    #: Its path in the archive.
    name: str
    path: Path
    #: Where cluster.toml says that it is; None for files of gpuhub's own.
    target: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The files of a backup other than databases, and what is missing in it."""

    files: tuple[SourceFile, ...]
    notes: tuple[str, ...]


def is_state_file(path: Path, paths: Paths) -> bool:
    """Return whether a file directly in the state's folder belongs into a backup."""
    # The proofs of the last `gpuhub down` would be wrong on a head whose nodes have worked since.
    return (
        path.is_file()
        and not path.name.endswith(_EXCLUDED)
        and path not in {paths.stopped_nodes, paths.unfinished_restore}
    )


def find_contents(head: Head, cluster: ClusterSettings) -> Contents:
    """Return what belongs into a backup.

    Raises:
        SetupError: This machine has no state of gpuhub.
    """
    paths, notes = head.paths, []
    if not paths.secrets.is_dir():
        raise SetupError(f"{paths.secrets} does not exist: gpuhub was never started on this machine")
    files = [
        SourceFile(name=f"state/{path.name}", path=path)
        for path in sorted(paths.state.iterdir())
        if is_state_file(path, paths)
    ]
    for folder in STATE_FOLDERS:
        files += [
            SourceFile(name=f"state/{path.relative_to(paths.state)}", path=path)
            for path in sorted((paths.state / folder).rglob("*"))
            if not path.is_symlink() and path.is_file() and not path.name.endswith(_EXCLUDED)
        ]
    if head.cluster_file.is_file():
        files.append(SourceFile(name=CLUSTER_FILE, path=head.cluster_file))
    files += [
        SourceFile(name=f"{OWN_CONFIG}/{path.name}", path=path)
        for path in sorted(head.own_config.glob("*.py"))
        if path.is_file()
    ]
    saved = {file.path for file in files}
    for number, path in enumerate(path for path in find_named_files(cluster) if path not in saved):
        if path.is_file():
            files.append(SourceFile(name=f"named/{number}", path=path, target=path))
        else:
            notes.append(f"{path}, which cluster.toml names, does not exist")
    kept = []
    for file in files:
        if file.path.stat().st_size > MAX_FILE_BYTES:
            notes.append(f"{file.path} is larger than {MAX_FILE_BYTES >> 20} MiB, and is left out")
        else:
            kept.append(file)
    return Contents(files=tuple(kept), notes=(*notes, *_find_foreign_keys(cluster, paths)))


def find_named_files(cluster: ClusterSettings) -> list[Path]:
    """Return the files of an administrator that cluster.toml names, each once."""
    files = [
        cluster.hub.certificate,
        cluster.hub.key,
        cluster.login.client_secret_file,
        cluster.login.ca,
        cluster.notifications.destinations_file,
        cluster.database.password_file,
        cluster.slurm.rest_key,
        cluster.power.ipmi_password_file,
        *(node.power.ipmi_password_file for node in cluster.nodes if node.power),
        *(file for node in cluster.nodes if node.tls for file in (node.tls.ca, node.tls.cert, node.tls.key)),
        *(sorted(cluster.jobs.recipes.glob("*.yaml")) if cluster.jobs.recipes else ()),
    ]
    return list(dict.fromkeys(file.absolute() for file in files if file is not None))


def _find_foreign_keys(cluster: ClusterSettings, paths: Paths) -> Iterator[str]:
    """Return a line for the nodes that are reached with root's own SSH keys, which are not gpuhub's to copy."""
    files = ssh_files(paths.instance)
    nodes = [
        node.name
        for node in cluster.nodes
        if node.docker.startswith("ssh://") and not files.known_hosts(node.name).exists()
    ]
    if nodes:
        yield (
            f"{', '.join(nodes)}: reached with root's own SSH keys, which are not in the backup; keep a copy of "
            "/root/.ssh, or let `gpuhub node add` give them gpuhub's key"
        )


def read_mode(path: Path) -> int:
    """Return a file's permissions."""
    return stat.S_IMODE(path.stat().st_mode) & 0o777
