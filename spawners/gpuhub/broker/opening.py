"""Opens the broker's database: locks, connection settings, and the tables of this version."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event

from gpuhub.errors import SetupError

BUSY_TIMEOUT_S = 5
#: PostgreSQL's number for the lock of one broker a database.
_ADVISORY_LOCK = 0x677075687562


def take_advisory_lock(engine: sa.Engine) -> sa.Connection | None:
    """PostgreSQL's lock for as long as the connection lives; None for a database that one machine has for itself.

    Raises:
        SetupError: another broker holds it.
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
    """What connects; SQLite with every commit on the disk."""
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver's own transactions begin too late and not before DDL; `_begin_immediate` begins them instead.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
        "journal_mode = WAL",
        "synchronous = FULL",  # a grant must survive a power cut: the container on another node does
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def migrate(connection: sa.Connection) -> None:
    """Bring the tables to this version."""
    config = Config()
    config.set_main_option("script_location", "gpuhub.broker:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
