"""A PostgreSQL server in place of SQLite, for tests that open the store by its file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuhub.broker.db.engine import build_engine
from gpuhub.broker.db.store import Store, lock_path
from gpuhub.config.database import build_database_url
from tests.support.markers import mark_folder
from tests.support.paths import FolderPaths
from tests.support.postgresql import PostgresqlServer, run_postgresql


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PostgreSQL does not run as root, so another user is needed."""
    mark_folder(items, Path(__file__).parent, ("root",))


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresqlServer]:
    """PostgreSQL of Debian."""
    with run_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def url(server: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a database for the tests that open the store by its file."""
    from gpuhub.ops.deploy.database import write_password

    folder = tmp_path_factory.mktemp("postgresql")
    paths = FolderPaths(folder=folder)
    paths.secrets.mkdir()
    database = server.build_settings("stores", folder)
    write_password(database, paths)
    return build_database_url(database, paths, "broker").rpartition("&options=")[0]


@pytest.fixture
def in_postgresql(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what a test stores in a file of SQLite in a schema of PostgreSQL instead."""
    schemas: set[str] = set()
    engine = build_engine(url)

    def open_file(cls: type[Store], path: Path) -> Store:
        schema = f"s{hashlib.sha256(str(path).encode()).hexdigest()[:20]}"
        if schema not in schemas:
            with engine.begin() as connection:
                connection.execute(sa.schema.CreateSchema(schema))
            schemas.add(schema)
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls.open(f"{url}&options=-csearch_path%3D{schema}", lock_path(path))

    monkeypatch.setattr(Store, "open_file", classmethod(open_file))
    yield
    with engine.begin() as connection:
        for schema in schemas:
            connection.execute(sa.schema.DropSchema(schema, cascade=True))
    engine.dispose()
