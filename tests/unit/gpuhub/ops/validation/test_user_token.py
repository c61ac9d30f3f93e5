"""The token of a validation in a hub's database, as JupyterHub itself reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from jupyterhub import orm

from gpuhub.common.errors import NotFound, SetupError
from gpuhub.common.paths import Paths
from gpuhub.login.rules import ADMINISTRATOR_SCOPES
from gpuhub.ops.validation.user_token import issue_token
from gpuhub.web.handlers import BROKER_SCOPE


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(Paths, "state", property(lambda _self: tmp_path))
    return Paths("ghtest")


@pytest.fixture
def database(paths: Paths) -> orm.Session:
    """A hub's database with ada, the administrator root1, and eve, whose role reaches no broker."""
    sessions = orm.new_session_factory(f"sqlite:///{paths.state}/jupyterhub.sqlite")
    with sessions() as database:
        user = orm.Role(name="user", scopes=["self", BROKER_SCOPE])
        admin = orm.Role(name="admin", scopes=list(ADMINISTRATOR_SCOPES))
        guest = orm.Role(name="guest", scopes=["self"])
        database.add(orm.OAuthClient(identifier="jupyterhub", allowed_scopes=["inherit"]))
        for name, roles in {"ada": [user], "root1": [user, admin], "eve": [guest]}.items():
            database.add(orm.User(name=name, roles=roles))
        database.commit()
        yield database
    sessions.kw["bind"].dispose()


@pytest.mark.parametrize("name", ["ada", "root1"])
def test_token_reaches_the_broker_alone_and_expires(paths: Paths, database: orm.Session, name: str) -> None:
    """Also that of an administrator has the rights of an ordinary user."""
    with issue_token(paths, name, 60) as token:
        found = orm.APIToken.find(database, token)
        assert (found.user.name, found.scopes) == (name, [BROKER_SCOPE])
        assert found.expires_at is not None
    assert orm.APIToken.find(database, token) is None


def test_running_hub_knows_the_next_token(paths: Paths, database: orm.Session) -> None:
    """The hub has the rows of earlier tokens in memory, so that the next token must have a row of its own."""
    with issue_token(paths, "ada", 60) as token:
        first = orm.APIToken.find(database, token)
        assert first.user.name == "ada"
    with issue_token(paths, "ada", 60) as token:
        assert orm.APIToken.find(database, token).user.name == "ada"


def test_token_expires_after_a_failure(paths: Paths, database: orm.Session) -> None:
    tokens = []
    with pytest.raises(KeyboardInterrupt), issue_token(paths, "ada", 60) as token:
        tokens.append(token)
        raise KeyboardInterrupt
    assert orm.APIToken.find(database, tokens[0]) is None


def test_users_without_access_are_refused(paths: Paths, database: orm.Session) -> None:
    with pytest.raises(NotFound, match="log in once as nobody1"), issue_token(paths, "nobody1", 60):
        pass
    with pytest.raises(SetupError, match="eve may not use the broker"), issue_token(paths, "eve", 60):
        pass


def test_hub_that_never_started_is_named(paths: Paths) -> None:
    with pytest.raises(SetupError, match="has not been started"), issue_token(paths, "ada", 60):
        pass
