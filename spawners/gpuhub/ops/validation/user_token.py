"""A token of a user for the broker alone, which root makes in the hub's own database with JupyterHub's own code.

No service has a scope that makes tokens, so that no secret on the head node can become every user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from jupyterhub import orm, scopes

from gpuhub.common.errors import NotFound, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.database import DatabaseSettings, build_database_url
from gpuhub.login.rules import USER_SCOPES
from gpuhub.web.handlers import BROKER_SCOPE

_SQLITE = DatabaseSettings()
NOTE = "gpuhub validate"


@contextmanager
def issue_token(paths: Paths, user: str, lifetime_s: float, database: DatabaseSettings = _SQLITE) -> Iterator[str]:
    """Yield a token with which jobs of the user can be requested; afterwards it has expired.

    It is not deleted here: the next token in the database would get its row's number, for which a running hub still has
    the old row in memory. The hub itself deletes expired tokens once an hour.

    Raises:
        SetupError: The hub has no database yet.
        NotFound: The hub does not know the user.
    """
    if database.url is None and not paths.hub_database.exists():
        raise SetupError(f"{paths.hub_database} does not exist: gpuhub has not been started here")
    scopes.define_custom_scopes(USER_SCOPES)
    sessions = orm.new_session_factory(build_database_url(database, paths, "hub"))
    try:
        with sessions() as session:
            row = orm.User.find(session, user)
            if row is None:
                raise NotFound(f"the hub has no user {user!r}: log in once as {user}, or name another user with --user")
            try:
                token = orm.APIToken.new(user=row, note=NOTE, expires_in=int(lifetime_s), scopes=[BROKER_SCOPE])
            except ValueError as error:
                raise SetupError(f"{user} may not use the broker: {error}") from error
        try:
            yield token
        finally:
            with sessions() as session:
                found = orm.APIToken.find(session, token)
                if found is not None:
                    found.expires_at = orm.APIToken.now() - timedelta(seconds=1)
                    session.commit()
    finally:
        sessions.kw["bind"].dispose()
