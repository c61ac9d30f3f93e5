"""Tokens of visits to servers of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker_api.errors import TooManyRequests
from gpuhub.web.handlers import BROKER_SCOPE
from gpuhub.web.visits import MAX_SESSIONS, REUSE_S, TOKEN_NOTE, TOKEN_S, VisitTokens


class FakeHubUser:
    """The hub's user, as far as tokens go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: list[dict[str, Any]] = []

    def new_api_token(self, **options: Any) -> str:
        self.made.append(options)
        return f"{self.name}-{len(self.made)}"


def test_token_belongs_to_the_session_and_reaches_the_broker_alone() -> None:
    """The hub revokes it at the end of its session; an administrator's has no further right."""
    now = [0.0]
    tokens, ada = VisitTokens(lambda: now[0]), FakeHubUser("ada")
    assert [tokens.get(ada, "s1"), tokens.get(ada, "s1"), tokens.get(ada, "s2")] == ["ada-1", "ada-1", "ada-2"]
    assert ada.made[0] == {"note": TOKEN_NOTE, "expires_in": TOKEN_S, "scopes": [BROKER_SCOPE], "session_id": "s1"}
    now[0] = REUSE_S
    assert tokens.get(ada, "s1") == "ada-3"
    tokens.forget(ada, "s1")
    assert tokens.get(ada, "s1") == "ada-4"
    assert len(tokens._tokens) == 1


def test_sessions_that_a_browser_makes_up_are_limited() -> None:
    """Those of others are not affected."""
    now = [0.0]
    tokens, ada = VisitTokens(lambda: now[0]), FakeHubUser("ada")
    for number in range(MAX_SESSIONS):
        tokens.get(ada, f"s{number}")
    with pytest.raises(TooManyRequests, match="are the limit"):
        tokens.get(ada, "made-up")
    assert tokens.get(ada, "s0") == "ada-1"
    assert tokens.get(FakeHubUser("ben"), "s1") == "ben-1"
    now[0] = REUSE_S
    assert tokens.get(ada, "made-up") == f"ada-{MAX_SESSIONS + 1}"
