"""Connections to the broker's database: SQLite or PostgreSQL, durable commits, one broker, and migrations."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from types import MappingProxyType
from typing import Any, Protocol

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event, exc

from gpuhub.broker.db import tables
from gpuhub.common.errors import SetupError


class Connect(Protocol):
    """Opens a transaction of the store, with options such as `READ_ONLY`; without any it may write."""

    def __call__(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[sa.Connection]:
        """Return the context of the transaction, which is committed at its end."""
        ...


#: Time that SQLite waits for another connection's lock, seconds.
BUSY_TIMEOUT_S = 5
#: Execution options of a transaction that only reads: in SQLite it takes no lock, and so never waits for a writer.
READ_ONLY = MappingProxyType({"gpuhub_read_only": True})
#: First number of PostgreSQL's lock of one broker; the second one is that of the schema, which each instance has.
_ADVISORY_LOCK = 0x67707568


class AdvisoryLock:
    """PostgreSQL's lock of the one broker; it lasts as long as its connection, and is taken again after that broke."""

    def __init__(self, engine: sa.Engine) -> None:
        """Take the lock.

        Raises:
            SetupError: Another broker has it.
        """
        self._engine = engine
        self._mutex = threading.Lock()
        self._connection: sa.Connection | None = None
        self._take()

    def ensure(self) -> None:
        """Check that this broker still has the lock; every transaction that writes does so first.

        Raises:
            SetupError: Another broker has taken it while this one had no connection.
        """
        with self._mutex:
            if self._connection is not None:
                try:
                    self._connection.execute(sa.select(1))
                except exc.DBAPIError:
                    self._close()
                else:
                    return
            self._take()

    def close(self) -> None:
        with self._mutex:
            self._close()

    def _take(self) -> None:
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        query = sa.select(sa.func.pg_try_advisory_lock(_ADVISORY_LOCK, sa.func.hashtext(sa.func.current_schema())))
        if not connection.execute(query).scalar_one():
            connection.close()
            raise SetupError(f"another broker runs on this store ({self._engine.url!r}): stop it first")
        self._connection = connection

    def _close(self) -> None:
        if self._connection is not None:
            # Not back to the pool, where the lock would live on.
            with suppress(exc.DBAPIError):
                self._connection.invalidate()
            self._connection.close()
            self._connection = None


def take_advisory_lock(engine: sa.Engine) -> AdvisoryLock | None:
    """Take PostgreSQL's lock; None for other databases, which one machine uses alone.

    Raises:
        SetupError: Another broker holds the lock.
    """
    return AdvisoryLock(engine) if engine.dialect.name == "postgresql" else None


def build_engine(url: str) -> sa.Engine:
    """Return the SQLAlchemy engine; SQLite writes every commit through to the disk."""
    # PostgreSQL may have been restarted since the last use of a connection.
    engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin)
    elif engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _set_up_postgresql)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver's own transactions begin too late and not before DDL; `_begin` begins them instead.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
        "journal_mode = WAL",
        "synchronous = FULL",  # a grant must survive a power cut: the container on another node does
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _set_up_postgresql(connection: Any, _record: object) -> None:
    # As SQLite's `synchronous`; stronger values, which wait for other servers, stay.
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    connection.commit()


def _begin(connection: sa.Connection) -> None:
    # A writer that has read before it takes the lock fails where another one has written since.
    is_read_only = READ_ONLY.items() <= connection.get_execution_options().items()
    connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")


def find_revision(connection: sa.Connection) -> str | None:
    """Return the revision of the tables; None if there are none yet."""
    return MigrationContext.configure(connection).get_current_revision()


def find_newest_revision() -> str:
    """Return the revision of the tables that this version uses."""
    return str(ScriptDirectory.from_config(_build_config()).get_current_head())


def check_revision(revision: str | None, name: str) -> None:
    """Check that this version knows a revision of the tables of `name`, which the error names.

    Raises:
        SetupError: A newer version wrote them.
    """
    known = {script.revision for script in ScriptDirectory.from_config(_build_config()).walk_revisions()}
    if revision is not None and revision not in known:
        raise SetupError(
            f"{name} was written by a newer version of gpuhub: its tables have revision {revision}, and this version "
            f"knows those up to {max(known)}. Install that version again, or go back to a backup with `gpuhub restore`"
        )


def migrate(connection: sa.Connection) -> None:
    """Migrate the tables to this version, or create them where there are none.

    Raises:
        SetupError: A newer version has written them.
    """
    revision = find_revision(connection)
    config = _build_config()
    config.attributes["connection"] = connection
    if revision is None:
        tables.metadata.create_all(connection)
        command.stamp(config, "head")
        return
    check_revision(revision, "the broker's store")
    command.upgrade(config, "head")


def _build_config() -> Config:
    config = Config()
    config.set_main_option("script_location", "gpuhub.broker.db:migrations")
    return config
