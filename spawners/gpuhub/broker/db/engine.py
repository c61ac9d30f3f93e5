"""Connections to the broker's database: SQLite or PostgreSQL, durable commits, one broker, and migrations."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event

from gpuhub.common.errors import SetupError

#: Time that SQLite waits for another connection's lock, seconds.
BUSY_TIMEOUT_S = 5
#: Execution options of a transaction that only reads: in SQLite it takes no lock, and so never waits for a writer.
READ_ONLY = MappingProxyType({"gpuhub_read_only": True})
#: PostgreSQL's number for the lock of one broker per database.
_ADVISORY_LOCK = 0x677075687562


def take_advisory_lock(engine: sa.Engine) -> sa.Connection | None:
    """Take PostgreSQL's lock for the life of the connection; None for other databases, which one machine uses alone.

    Raises:
        SetupError: Another broker holds the lock.
    """
    if engine.dialect.name != "postgresql":
        return None
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    query = sa.select(sa.func.pg_try_advisory_lock(_ADVISORY_LOCK))
    if connection.execute(query).scalar_one():
        return connection
    connection.close()
    raise SetupError(f"another broker runs on this store ({engine.url!r}): stop it first")


def build_engine(url: str) -> sa.Engine:
    """Return the SQLAlchemy engine; SQLite writes every commit through to the disk."""
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin)
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


def _begin(connection: sa.Connection) -> None:
    # A writer that has read before it takes the lock fails where another one has written since.
    is_read_only = READ_ONLY.items() <= connection.get_execution_options().items()
    connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")


def migrate(connection: sa.Connection) -> None:
    """Migrate the tables to this version."""
    config = Config()
    config.set_main_option("script_location", "gpuhub.broker.db:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
