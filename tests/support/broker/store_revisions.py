"""The broker's store with the tables of another version."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

from gpuhub.broker.db.engine import build_engine, find_revision

#: The revision of the tables of 0.1.0 and 0.2.0.
RELEASED = "0004"


def move_store(file: Path, revision: str) -> None:
    """Migrate a store, which no broker uses, up or down to a revision; `base` has no tables, and `-1` is the one before."""
    engine = build_engine(f"sqlite:///{file}")
    config = Config()
    config.set_main_option("script_location", "gpuhub.broker.db:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        is_down = revision in {"base", "-1"} or (find_revision(connection) or "") > revision
        (command.downgrade if is_down else command.upgrade)(config, revision)
    engine.dispose()


def read_revision(file: Path) -> str | None:
    """Return the revision of a store; None if it has no tables."""
    engine = build_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        revision = find_revision(connection)
    engine.dispose()
    return revision
