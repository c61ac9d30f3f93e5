"""The table [database] of cluster.toml: where hub and broker keep what must not be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from pydantic import field_validator, model_validator

from gpuhub.common.paths import Paths
from gpuhub.config.base import SettingsTable

#: The two users of the database; each has a schema of its own there.
DatabaseUser = Literal["broker", "hub"]
#: libpq's parameters that a URL may have.
_PARAMETERS = frozenset({"host", "sslmode", "sslrootcert", "connect_timeout"})
_EXAMPLE = '"postgresql://gpuhub@db.lan/gpuhub"'


class DatabaseSettings(SettingsTable):
    """SQLite files on the head node, or one PostgreSQL database for both."""

    #: Address of a PostgreSQL database, without a password; None for SQLite.
    url: str | None = None
    #: File with the password alone, readable by root only; None where the server asks for none.
    password_file: Path | None = None

    @field_validator("password_file", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            url = urlsplit(value)
            _port = url.port
        except ValueError as error:
            raise ValueError(f"this is not a URL ({error}): write one such as {_EXAMPLE}") from None
        if url.scheme not in {"postgresql", "postgresql+psycopg"} or not url.path.strip("/"):
            raise ValueError(
                f"only PostgreSQL, with the name of a database, is supported: write {_EXAMPLE}, or remove it for SQLite"
            )
        if url.password is not None:
            raise ValueError("it has a password: put that into a file, and name the file in password_file")
        unknown = sorted({name for name, _ in parse_qsl(url.query)} - _PARAMETERS)
        if unknown:
            raise ValueError(f"parameter {unknown[0]!r} is not one of {', '.join(sorted(_PARAMETERS))}")
        return urlunsplit(url._replace(scheme="postgresql"))

    @model_validator(mode="after")
    def _has_url(self) -> Self:
        if self.password_file is not None and self.url is None:
            raise ValueError("password_file goes with url: add that, or remove password_file")
        return self


def schema_name(paths: Paths, user: DatabaseUser) -> str:
    """Return the name of a user's schema; each instance has its own."""
    return f"{paths.instance}_{user}"


def password_path(paths: Paths) -> Path:
    """Return the file in PostgreSQL's own format from which programs read the password; `gpuhub up` writes it."""
    return paths.secrets / "pgpass"


def build_libpq_url(
    database: DatabaseSettings, paths: Paths, user: DatabaseUser | None = None, passwords: Path | None = None
) -> str:
    """Return the address for PostgreSQL's own programs; there is a `url`.

    Args:
        database: The settings.
        paths: Those of the instance.
        user: Whose schema is the default.
        passwords: Another file with the password than the instance's.
    """
    url = urlsplit(database.url or "")
    parameters = dict(parse_qsl(url.query))
    if database.password_file is not None:
        parameters["passfile"] = str(passwords or password_path(paths))
    if user is not None:
        parameters["options"] = f"-csearch_path={schema_name(paths, user)}"
    return urlunsplit(url._replace(query=urlencode(parameters, quote_via=quote)))


def build_database_url(database: DatabaseSettings, paths: Paths, user: DatabaseUser) -> str:
    """Return SQLAlchemy's URL of the broker's or the hub's database; it has no password."""
    if database.url is None:
        return f"sqlite:///{paths.store if user == 'broker' else paths.hub_database}"
    return build_libpq_url(database, paths, user).replace("postgresql:", "postgresql+psycopg:", 1)
