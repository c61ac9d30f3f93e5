"""The database of hub and broker at the start: PostgreSQL's password, and a schema for each of the two."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import exc

from gpuhub.broker.db.engine import build_engine, check_revision
from gpuhub.common import secrets
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths
from gpuhub.config.database import DatabaseSettings, build_database_url, password_path, schema_name
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.backup.snapshot import read_revision

#: The oldest PostgreSQL that its developers maintain.
MIN_POSTGRESQL = 14
_MAX_PASSWORD = 1024


def ensure_database(cluster: ClusterSettings, paths: Paths) -> None:
    """Make secrets and schemas that are missing, and check that this version can use what is there.

    Raises:
        SettingsError: The file with the password is missing, or others can read it.
        SetupError: PostgreSQL does not answer, is too old, or a newer version of gpuhub wrote the tables.
    """
    secrets.ensure_secrets(paths)
    if cluster.database.url is not None:
        write_password(cluster.database, paths)
        _ensure_schemas(cluster.database, paths)
    try:
        check_revision(read_revision(cluster.database, paths), "the broker's store")
    except exc.SQLAlchemyError as error:
        raise SetupError(f"the broker's store cannot be read: {getattr(error, 'orig', None) or error}") from error


def write_password(database: DatabaseSettings, paths: Paths) -> None:
    """Write the password in PostgreSQL's own format, so that it is in no URL, environment or command line.

    Raises:
        SettingsError: The file is missing, empty or not one line, or others can read it.
    """
    if database.password_file is None:
        return
    key = "database.password_file"
    content = secrets.read_private_file(
        database.password_file, key, content="the password of PostgreSQL", limit=_MAX_PASSWORD
    )
    try:
        password = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        password = ""
    if not password or len(content) > _MAX_PASSWORD or any(character in password for character in "\r\n\0"):
        raise SettingsError(f"{key}: {str(database.password_file)!r} must have one line, the password")
    escaped = password.replace("\\", "\\\\").replace(":", "\\:")
    replace_file(password_path(paths), f"*:*:*:*:{escaped}\n")


def describe_problem(database: DatabaseSettings, paths: Paths) -> str | None:
    """Return why PostgreSQL cannot be used; None if it can, or if there is SQLite."""
    if database.url is None:
        return None
    try:
        _ensure_schemas(database, paths)
    except SetupError as error:
        return str(error)
    return None


def _ensure_schemas(database: DatabaseSettings, paths: Paths) -> None:
    engine = build_engine(build_database_url(database, paths, "broker"))
    try:
        with engine.begin() as connection:
            version = int(connection.execute(sa.text("SHOW server_version_num")).scalar_one()) // 10_000
            if version < MIN_POSTGRESQL:
                raise SetupError(f"{database.url} is PostgreSQL {version}: {MIN_POSTGRESQL} or newer is needed")
            for user in ("broker", "hub"):
                name = schema_name(paths, user)
                if not sa.inspect(connection).has_schema(name):
                    connection.execute(sa.schema.CreateSchema(name, if_not_exists=True))
    except exc.SQLAlchemyError as error:
        text = str(getattr(error, "orig", None) or error).strip()
        raise SetupError(f"the database {database.url} cannot be used: {text}") from error
    finally:
        engine.dispose()
