"""The backup before the tables of the databases change."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from jupyterhub import orm

from gpuhub.broker.db.store import Store
from gpuhub.common.errors import SetupError
from gpuhub.common.secrets import ensure_secrets
from gpuhub.ops.backup import restoration, upgrade_backups
from gpuhub.ops.backup.contents import Head
from gpuhub.ops.backup.upgrade_backups import ensure_upgrade_backup
from tests.support.clusters import build_cluster
from tests.support.paths import FolderPaths

OLD_STORE = Path(__file__).parents[2] / "broker/db/stores/0.1.0.sql"


@pytest.fixture
def head(tmp_path: Path) -> Head:
    """A head node with the databases of this version."""
    paths = FolderPaths(folder=tmp_path / "state")
    paths.state.mkdir()
    ensure_secrets(paths)
    Store.open_file(paths.store).close()
    orm.new_session_factory(f"sqlite:///{paths.hub_database}").kw["bind"].dispose()
    return Head(paths=paths, cluster_file=tmp_path / "cluster.toml", hub_config=tmp_path / "jupyterhub_config.py")


def make_old(head: Head) -> None:
    head.paths.store.unlink()
    with closing(sqlite3.connect(head.paths.store)) as database:
        database.executescript(OLD_STORE.read_text())


def read_version(file: Path) -> str:
    with closing(sqlite3.connect(file)) as database:
        return str(database.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def test_none_where_nothing_changes(head: Head) -> None:
    """Neither at each start nor on an empty machine."""
    assert ensure_upgrade_backup(head, build_cluster()) is None
    head.paths.store.unlink()
    head.paths.hub_database.unlink()
    assert ensure_upgrade_backup(head, build_cluster()) is None
    assert not head.paths.upgrade_backups.exists()


def test_before_the_brokers_tables_change(head: Head) -> None:
    """The way back is a restoration: the store has the old tables again, and those leases."""
    make_old(head)
    file = ensure_upgrade_backup(head, build_cluster())
    assert file is not None
    assert file.name.endswith("-from-earlier.backup")
    Store.open_file(head.paths.store).close()
    assert read_version(head.paths.store) != "0004"
    upgrade_backups.record_version(head.paths)
    assert upgrade_backups.read_last_version(head.paths) == version("gpuhub")
    with restoration.open_backup(file, head, None) as plan:
        assert plan.manifest.revision == "0004"
        restoration.apply(plan)
    assert read_version(head.paths.store) == "0004"
    with closing(sqlite3.connect(head.paths.store)) as database:
        assert database.execute("SELECT count(*) FROM leases WHERE state = 'active'").fetchone() == (3,)


def test_before_jupyterhubs_tables_change(head: Head) -> None:
    """An update of JupyterHub counts as well."""
    with closing(sqlite3.connect(head.paths.hub_database)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '4dc2d5a8c53c'")
    assert ensure_upgrade_backup(head, build_cluster()) is not None


def test_the_last_ones_are_kept(head: Head) -> None:
    """Older ones are deleted, and other files are not."""
    make_old(head)
    head.paths.upgrade_backups.mkdir()
    for name in (
        "20250101-000000-from-0.1.0.backup",
        "20250102-000000-from-0.1.0.backup",
        "20250103-000000-from-0.1.0.backup",
        "mine.tar",
    ):
        (head.paths.upgrade_backups / name).write_text("x")
    file = ensure_upgrade_backup(head, build_cluster())
    assert file is not None
    assert {path.name for path in head.paths.upgrade_backups.iterdir()} == {
        "20250102-000000-from-0.1.0.backup", "20250103-000000-from-0.1.0.backup", file.name, "mine.tar",
    }  # fmt: skip


def test_newer_store_and_broken_database(head: Head) -> None:
    """`up` stops before it starts anything with tables that it does not know."""
    with closing(sqlite3.connect(head.paths.store)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0999'")
    with pytest.raises(SetupError, match="written by a newer version"):
        ensure_upgrade_backup(head, build_cluster())
    head.paths.store.write_text("no database at all")
    with pytest.raises(SetupError, match="the databases cannot be read: file is not a database"):
        ensure_upgrade_backup(head, build_cluster())
