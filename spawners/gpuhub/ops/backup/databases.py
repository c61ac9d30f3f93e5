"""Copies of the broker's and the hub's database while both run, and their restoration.

SQLite: one copy after the other within a moment, the broker's first. A server that the hub's copy knows and the
broker's does not is stopped for the hub, as its lease is gone; the other way round, a lease would be held by nobody.
PostgreSQL: one dump of both schemas at the same moment.
"""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.database import DatabaseSettings, build_libpq_url, schema_name

BROKER_COPY, HUB_COPY, DUMP = "broker.sqlite", "hub.sqlite", "postgresql.dump"
#: Maximum wait for a writer of SQLite, seconds.
_BUSY_S = 30
#: Maximum duration of a program of PostgreSQL, seconds.
_PROGRAM_S = 3600


def copy_databases(database: DatabaseSettings, paths: Paths, folder: Path) -> list[Path]:
    """Copy both databases to a folder, and return the files.

    Raises:
        SetupError: One cannot be copied.
    """
    if database.url is not None:
        dump = folder / DUMP
        schemas = [f"--schema={schema_name(paths, user)}" for user in ("broker", "hub")]
        url = build_libpq_url(database, paths)
        _run(
            "pg_dump", "--format=custom", "--no-owner", "--no-privileges", *schemas, f"--file={dump}", f"--dbname={url}"
        )
        return [dump]
    copies = []
    for source, name in ((paths.store, BROKER_COPY), (paths.hub_database, HUB_COPY)):
        if source.exists():
            copy_sqlite(source, folder / name)
            copies.append(folder / name)
    return copies


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy a SQLite database that others may be writing, as of one moment.

    Raises:
        SetupError: It cannot be read, or is damaged.
    """
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)) as database,
            closing(sqlite3.connect(target)) as copy,
        ):
            database.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise SetupError(f"{source} cannot be copied: {error}") from error
    target.chmod(0o600)
    check_sqlite(target, str(source))


def check_sqlite(file: Path, name: str) -> None:
    """Check that a SQLite file is whole; `name` is what the error calls it.

    Raises:
        SetupError: It is damaged.
    """
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            [first, *_] = database.execute("PRAGMA integrity_check(1)").fetchall()
    except sqlite3.Error as error:
        raise SetupError(f"{name} is damaged: {error}") from error
    if first[0] != "ok":
        raise SetupError(f"{name} is damaged: {first[0]}")


def restore_dump(database: DatabaseSettings, paths: Paths, dump: Path) -> None:
    """Replace both schemas with those of a dump, or change nothing.

    Raises:
        SetupError: PostgreSQL refused something.
    """
    if database.url is None:
        raise SettingsError("the backup has a dump of PostgreSQL, and cluster.toml has no [database] url")
    schemas = [schema_name(paths, user) for user in ("broker", "hub")]
    script = dump.with_suffix(".sql")
    dropped = "".join(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE;\n' for schema in schemas)
    _run("pg_restore", "--no-owner", "--no-privileges", f"--file={script}", str(dump))
    prefix = script.with_suffix(".first.sql")
    prefix.write_text(dropped, encoding="ascii")
    options = ("--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1")
    _run("psql", *options, f"--file={prefix}", f"--file={script}", f"--dbname={build_libpq_url(database, paths)}")


def has_schemas(database: DatabaseSettings, paths: Paths, passwords: Path) -> bool:
    """Return whether PostgreSQL has tables of this instance; `passwords` is the backup's file with the password.

    Raises:
        SetupError: It does not answer.
    """
    names = ", ".join(f"'{schema_name(paths, user)}'" for user in ("broker", "hub"))
    url = build_libpq_url(database, paths, passwords=passwords)
    query = f"SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname IN ({names})"  # noqa: S608 - our own names
    return _run("psql", "--no-psqlrc", "-At", f"--command={query}", f"--dbname={url}") != "0"


def _run(program: str, *arguments: str) -> str:
    command: Sequence[str] = (program, *arguments)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_PROGRAM_S
        )
    except FileNotFoundError:
        raise SetupError(f"{program} is not installed: `apt install postgresql-client`") from None
    except subprocess.TimeoutExpired:
        raise SetupError(f"{program} has not ended after {_PROGRAM_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        # Notices come before the error.
        reason = next((line for line in lines if "error" in line.lower()), lines[0])
        raise SetupError(f"{program} failed: {reason}")
    return done.stdout.strip()
