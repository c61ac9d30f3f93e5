"""The backup that `gpuhub up` makes before hub and broker change the tables of their databases."""

from __future__ import annotations

from contextlib import closing, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from jupyterhub import dbutil

from gpuhub.broker.db.engine import READ_ONLY, build_engine, check_revision, find_newest_revision
from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.database import build_database_url
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.backup.contents import Head
from gpuhub.ops.backup.snapshot import read_revision, write_backup

#: Backups that are kept; older ones are deleted.
KEPT = 3
_END = ".backup"


def ensure_upgrade_backup(head: Head, cluster: ClusterSettings) -> Path | None:
    """Write a backup if the next start changes tables, and return its file; None if it does not.

    Raises:
        SetupError: A newer version wrote the broker's store, or the backup cannot be written.
    """
    try:
        revision = read_revision(cluster.database, head.paths)
        is_hub_old = _is_hub_old(head.paths, cluster)
    except sa.exc.SQLAlchemyError as error:
        raise SetupError(f"the databases cannot be read: {getattr(error, 'orig', None) or error}") from error
    check_revision(revision, "the broker's store")
    if revision in {None, find_newest_revision()} and not is_hub_old:
        return None
    folder = head.paths.upgrade_backups
    folder.mkdir(mode=0o700, exist_ok=True)
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    file = folder / f"{now}-from-{read_last_version(head.paths) or 'earlier'}{_END}"
    write_backup(file, head, cluster)
    for old in sorted(folder.glob(f"*{_END}"))[:-KEPT]:
        old.unlink()
    return file


def record_version(paths: Paths) -> None:
    """Note which version of gpuhub has started here last."""
    file = _version_file(paths)
    file.write_text(f"{version('gpuhub')}\n", encoding="ascii")
    file.chmod(0o600)


def read_last_version(paths: Paths) -> str | None:
    """Return the version of gpuhub that started here last; None if it did not note it."""
    with suppress(FileNotFoundError):
        return _version_file(paths).read_text(encoding="ascii").strip()[:32] or None
    return None


def _version_file(paths: Paths) -> Path:
    return paths.state / "version"


def _is_hub_old(paths: Paths, cluster: ClusterSettings) -> bool:
    """Return whether JupyterHub's database is one of an earlier version of JupyterHub."""
    if cluster.database.url is None and not paths.hub_database.exists():
        return False
    engine = build_engine(build_database_url(cluster.database, paths, "hub"))
    try:
        with closing(engine.connect().execution_options(**READ_ONLY)) as connection:
            revision = MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()
    return revision not in {None, ScriptDirectory(dbutil.ALEMBIC_DIR).get_current_head()}
