"""Hub and broker on PostgreSQL: settings, one broker, outages, migrations and backup."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from jupyterhub import dbutil, orm

from gpuhub.broker.db import tables
from gpuhub.broker.db.engine import build_engine, find_newest_revision, find_revision
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.common.errors import SettingsError, SetupError, Unavailable
from gpuhub.config.database import DatabaseSettings, build_database_url, password_path
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.backup import restoration
from gpuhub.ops.backup.contents import Head
from gpuhub.ops.backup.snapshot import write_backup
from gpuhub.ops.backup.upgrade_backups import ensure_upgrade_backup
from gpuhub.ops.deploy.database import describe_problem, ensure_database, write_password
from gpuhub.ops.validation.user_token import issue_token
from tests.integration.gpuhub.broker.test_group_commit import TOGETHER, check_death
from tests.support.clusters import CLUSTER_FILE, build_cluster
from tests.support.paths import FolderPaths
from tests.support.postgresql import PASSWORD, PostgresqlServer, run_postgresql
from tests.unit.gpuhub.broker.db.test_store import build_granted_lease, build_request

DATABASE = """
[database]
url = "{url}"
password_file = "{file}"
"""


@pytest.fixture
def paths(tmp_path: Path) -> FolderPaths:
    """A head node's folders."""
    folder = tmp_path / "state"
    folder.mkdir()
    return FolderPaths(folder=folder)


@pytest.fixture
def database(server: PostgresqlServer, tmp_path: Path, request: pytest.FixtureRequest) -> DatabaseSettings:
    """An empty database for the test."""
    name = "".join(character for character in request.node.name if character.isalnum())[:50].lower()
    return server.build_settings(name, tmp_path)


@pytest.fixture
def cluster(database: DatabaseSettings) -> ClusterSettings:
    """A cluster that keeps everything in PostgreSQL."""
    return build_cluster(database=database.model_dump())


@pytest.fixture
def store(cluster: ClusterSettings, paths: FolderPaths) -> Iterator[Store]:
    """The open store."""
    ensure_database(cluster, paths)
    store = Store.open_configured(cluster.database, paths)
    yield store
    store.close()


def test_password_is_in_no_url(cluster: ClusterSettings, paths: FolderPaths, store: Store) -> None:
    """One with `:`, `\\`, `%` and a space reaches the server all the same; the file is root's alone."""
    url = build_database_url(cluster.database, paths, "hub")
    assert PASSWORD not in url
    assert password_path(paths).stat().st_mode & 0o777 == 0o600
    assert store.find_highest() == (0, 0)
    assert describe_problem(cluster.database, paths) is None


def test_wrong_settings_are_named(
    server: PostgresqlServer, database: DatabaseSettings, paths: FolderPaths, tmp_path: Path
) -> None:
    """A wrong password, a missing database, and a file that others can read."""
    assert database.password_file is not None
    paths.secrets.mkdir()
    database.password_file.write_text("wrong")
    write_password(database, paths)
    assert "password authentication failed" in (describe_problem(database, paths) or "")
    missing = DatabaseSettings(
        url=f"postgresql://gpuhub@127.0.0.1:{server.port}/missing", password_file=database.password_file
    )
    database.password_file.write_text(PASSWORD)
    write_password(missing, paths)
    assert 'database "missing" does not exist' in (describe_problem(missing, paths) or "")
    for text in ("", "two\nlines\n"):
        database.password_file.write_text(text)
        with pytest.raises(SettingsError, match="must have one line, the password"):
            write_password(database, paths)
    database.password_file.chmod(0o644)
    with pytest.raises(SettingsError, match="can be read by other users"):
        write_password(database, paths)


def test_a_second_broker_is_refused_on_any_machine(cluster: ClusterSettings, paths: FolderPaths, store: Store) -> None:
    """Its lock file is another one there."""
    with pytest.raises(SetupError, match="another broker runs on this store"):
        Store.open(build_database_url(cluster.database, paths, "broker"), paths.state / "other.lock")


def test_a_second_lease_on_a_gpu_is_impossible_in_the_database_itself(
    cluster: ClusterSettings, paths: FolderPaths, store: Store
) -> None:
    """Also for a program that is not the broker."""
    store.save(Changes(leases=[(None, build_granted_lease("l1", 1)), (None, build_request("l2", 2))]))
    engine = build_engine(build_database_url(cluster.database, paths, "broker"))
    row = {"gpu_uuid": "GPU-1", "part": 0, "share": 1, "lease_id": "l2"}
    with pytest.raises(sa.exc.IntegrityError, match="pk_held_gpus"), engine.begin() as connection:
        connection.execute(sa.insert(tables.held_gpus).values(row))
    with pytest.raises(sa.exc.IntegrityError, match="fk_held_gpus"), engine.begin() as connection:
        connection.execute(sa.insert(tables.held_gpus).values({**row, "part": 1, "share": 2}))
    engine.dispose()


def test_tables_are_those_of_the_model(cluster: ClusterSettings, paths: FolderPaths, store: Store) -> None:
    """Migrations make them; each has a way back, and nothing stays behind."""
    engine = build_engine(build_database_url(cluster.database, paths, "broker"))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
        assert find_revision(connection) == find_newest_revision()
    config = Config()
    config.set_main_option("script_location", "gpuhub.broker.db:migrations")
    for number in range(int(find_newest_revision()) - 1, -1, -1):
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.downgrade(config, f"{number:04}" if number else "base")
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
    engine.dispose()


def test_commits_are_synced_although_the_server_does_not(
    server: PostgresqlServer, cluster: ClusterSettings, paths: FolderPaths, store: Store
) -> None:
    """A grant must survive a power cut."""
    name = (cluster.database.url or "").rpartition("/")[2]
    server.run_sql(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    engine = build_engine(build_database_url(cluster.database, paths, "broker"))
    with engine.connect() as connection:
        assert connection.execute(sa.text("SHOW synchronous_commit")).scalar_one() == "on"
    engine.dispose()


@pytest.mark.parametrize(("moment", "written"), [("before the commit", 1), ("after the commit", 1 + TOGETHER)])
def test_no_answer_precedes_the_write_that_covers_it(
    cluster: ClusterSettings, paths: FolderPaths, moment: str, written: int
) -> None:
    """As with SQLite: all changes that are written together are in the store, or none."""
    ensure_database(cluster, paths)
    check_death(build_database_url(cluster.database, paths, "broker"), paths.state / "l", moment, written)


def test_the_broker_survives_a_restart_of_the_server(tmp_path: Path, paths: FolderPaths) -> None:
    """While it is away nothing is stored; afterwards the broker continues, unless another one took its place."""
    with run_postgresql() as server:
        cluster = build_cluster(database=server.build_settings("restarted", tmp_path).model_dump())
        ensure_database(cluster, paths)
        url = build_database_url(cluster.database, paths, "broker")
        store = Store.open_configured(cluster.database, paths)
        store.save(Changes(leases=[(None, build_granted_lease("l1", 1))]))
        server.stop()
        with pytest.raises(Unavailable, match="cannot be used at the moment"):
            store.save(Changes(leases=[(None, build_request("l2", 2))]))
        assert "cannot be used" in (describe_problem(cluster.database, paths) or "")
        server.start()
        store.save(Changes(leases=[(None, build_request("l2", 2))]))
        assert [lease.id for lease in store.load_open()[0]] == ["l1", "l2"]
        with pytest.raises(SetupError, match="another broker runs"):
            Store.open(url, paths.state / "other.lock")
        server.stop(signal.SIGQUIT)
        server.start()
        other = Store.open(url, paths.state / "other.lock")
        with pytest.raises(Unavailable, match="another broker runs on this store"):
            store.save(Changes(leases=[(None, build_request("l3", 3))]))
        other.save(Changes(leases=[(None, build_request("l4", 4))]))
        assert [lease.id for lease in other.load_open()[0]] == ["l1", "l2", "l4"]
        other.close()
        store.close()


def test_the_hub_has_its_own_schema(cluster: ClusterSettings, paths: FolderPaths, store: Store) -> None:
    """JupyterHub makes and upgrades its tables there, and `gpuhub validate` gets its token there."""
    url = build_database_url(cluster.database, paths, "hub")
    sessions = orm.new_session_factory(url)
    with sessions() as session:
        role = orm.Role(name="user", scopes=["self", "access:services!service=broker"])
        session.add(orm.OAuthClient(identifier="jupyterhub", allowed_scopes=["inherit"]))
        session.add(orm.User(name="ada", roles=[role]))
        session.commit()
    dbutil.upgrade(url)
    with issue_token(paths, "ada", 60, cluster.database) as token, sessions() as session:
        assert orm.APIToken.find(session, token).user.name == "ada"
    engine = sessions.kw["bind"]
    with closing(engine.connect()) as connection:
        assert sa.inspect(connection).has_table("users", schema="gpuhub_hub")
        assert not sa.inspect(connection).has_table("users", schema="gpuhub_broker")
    engine.dispose()


def make_head(folder: Path, database: DatabaseSettings) -> Head:
    folder.mkdir(exist_ok=True)
    file = folder / "cluster.toml"
    file.write_text(CLUSTER_FILE + DATABASE.format(url=database.url, file=database.password_file))
    paths = FolderPaths(folder=folder / "state")
    paths.state.mkdir(exist_ok=True)
    return Head(paths=paths, cluster_file=file, hub_config=folder / "jupyterhub_config.py")


def list_leases(database: DatabaseSettings, paths: FolderPaths) -> list[str]:
    store = Store.open_configured(database, paths)
    try:
        return [lease.id for lease in store.load_open()[0]]
    finally:
        store.close()


def test_backup_and_restoration(cluster: ClusterSettings, database: DatabaseSettings, tmp_path: Path) -> None:
    """A dump is taken while the broker runs, and puts both schemas back; a refused one changes nothing."""
    head = make_head(tmp_path / "old", database)
    ensure_database(cluster, head.paths)
    sessions = orm.new_session_factory(build_database_url(database, head.paths, "hub"))
    store = Store.open_configured(database, head.paths)
    store.save(Changes(leases=[(None, build_granted_lease("l1", 1))]))
    write_backup(tmp_path / "b", head, cluster)
    store.save(Changes(leases=[(None, build_granted_lease("l2", 2, "GPU-2"))]))
    store.close()
    with sessions() as session:
        session.add(orm.User(name="later"))
        session.commit()
    new = make_head(tmp_path / "new", database)
    new.cluster_file.unlink()
    with restoration.open_backup(tmp_path / "b", new, None) as plan:
        assert plan.conflicts == ["the tables in PostgreSQL"]
        assert plan.manifest.revision == find_newest_revision()
        restoration.apply(plan)
    assert list_leases(database, new.paths) == ["l1"]
    with sessions() as session:
        assert session.query(orm.User).count() == 0
    sessions.kw["bind"].dispose()
    assert new.cluster_file.exists()
    assert ensure_upgrade_backup(new, cluster) is None


def test_failed_restoration_of_a_dump_changes_nothing(
    cluster: ClusterSettings, database: DatabaseSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither tables nor files."""
    head = make_head(tmp_path / "old", database)
    ensure_database(cluster, head.paths)
    store = Store.open_configured(database, head.paths)
    write_backup(tmp_path / "b", head, cluster)
    store.save(Changes(leases=[(None, build_granted_lease("l1", 1))]))
    store.close()
    run = restoration.databases._run

    def spoil(program: str, *arguments: str) -> str:
        output = run(program, *arguments)
        for argument in arguments:
            if program == "pg_restore" and argument.startswith("--file="):
                with Path(argument.removeprefix("--file=")).open("a") as script:
                    script.write("SELECT * FROM no_such_table;\n")
        return output

    monkeypatch.setattr(restoration.databases, "_run", spoil)
    new = make_head(tmp_path / "new", database)
    new.cluster_file.unlink()
    with (
        restoration.open_backup(tmp_path / "b", new, None) as plan,
        pytest.raises(SetupError, match=r"psql failed: .*no_such_table"),
    ):
        restoration.apply(plan)
    assert list_leases(database, head.paths) == ["l1"]
    assert not new.cluster_file.exists()
    assert not new.paths.secrets.exists()
