"""`gpuhub backup`: copies the state of the head node into one archive while everything runs."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gpuhub.broker.db.engine import READ_ONLY, build_engine, find_revision
from gpuhub.common.paths import Paths
from gpuhub.config.database import DatabaseSettings, build_database_url
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.backup import archive, databases
from gpuhub.ops.backup.archive import ArchivedFile, Manifest
from gpuhub.ops.backup.contents import DATABASES, Head, find_contents, read_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupResult:
    """What was written."""

    size: int
    #: Number of files in the archive.
    count: int
    #: What is missing in it.
    notes: Sequence[str]


def write_backup(file: Path, head: Head, cluster: ClusterSettings, passphrase: str | None = None) -> BackupResult:
    """Write the archive.

    Args:
        file: Must not exist; it becomes readable by its owner only.
        head: The head node's files.
        cluster: Its settings.
        passphrase: Encrypts the archive; None: not encrypted.

    Raises:
        SettingsError: The file exists.
        SetupError: There is nothing to copy, a database cannot be copied, or the archive cannot be written.
    """
    archive.check_new_file(file)
    contents = find_contents(head, cluster)
    # Not next to the file, which may be on another machine: the copies are not encrypted.
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=head.paths.state) as name:
        folder = Path(name)
        created_at = time.time()
        copies = databases.copy_databases(cluster.database, head.paths, folder)
        entries = [archive.describe_file(f"{DATABASES}/{copy.name}", copy, 0o600) for copy in copies]
        sources = list(copies)
        for number, source in enumerate(contents.files):
            # A copy, since the file may be replaced before it is written into the archive.
            copy = folder / str(number)
            shutil.copyfile(source.path, copy)
            sources.append(copy)
            entries.append(archive.describe_file(source.name, copy, read_mode(source.path), source.target))
        manifest = _build_manifest(head.paths, cluster.database, entries, created_at)
        archive.write_archive(file, manifest, sources, passphrase)
    return BackupResult(size=file.stat().st_size, count=len(entries), notes=contents.notes)


def read_revision(database: DatabaseSettings, paths: Paths) -> str | None:
    """Return the revision of the tables of the broker's store; None if there is none yet."""
    if database.url is None and not paths.store.exists():
        return None
    engine = build_engine(build_database_url(database, paths, "broker"))
    try:
        with closing(engine.connect().execution_options(**READ_ONLY)) as connection:
            return find_revision(connection)
    finally:
        engine.dispose()


def _build_manifest(
    paths: Paths, database: DatabaseSettings, entries: Sequence[ArchivedFile], created_at: float
) -> Manifest:
    return Manifest(
        format=archive.FORMAT,
        version=version("gpuhub"),
        instance=paths.instance,
        host=socket.gethostname(),
        created_at=created_at,
        revision=read_revision(database, paths),
        files=tuple(entries),
    )
