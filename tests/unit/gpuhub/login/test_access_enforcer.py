"""The end of leases whose owners may not log in any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tornado import web

from gpuhub.common.errors import BrokerUnreachable
from gpuhub.login import access_enforcer
from gpuhub.login.access_enforcer import REFUSALS, AccessEnforcer


class Hub:
    """The users, rules and broker of a hub in memory."""

    def __init__(self) -> None:
        self.users = {"ada": SimpleNamespace(name="ada"), "ben": SimpleNamespace(name="ben")}
        #: The answers of the authenticator by user: a result, or an error to raise.
        self.answers: dict[str, Any] = {"ada": True, "ben": True}
        self.owners = ["ada", "ben", "ben"]
        self.revoked: list[str] = []
        self.released: list[str] = []
        #: Owner and viewer of each output share.
        self.shared: list[tuple[str, str]] = []

    async def refresh_user(self, user: Any) -> Any:
        answer = self.answers[user.name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def leases(self) -> list[Any]:
        return [SimpleNamespace(owner=owner) for owner in self.owners]

    async def shares(self) -> list[Any]:
        return [SimpleNamespace(owner=owner, viewer=viewer) for owner, viewer in self.shared]

    async def end_shares_of_user(self, user: str) -> list[Any]:
        ended = [share for share in self.shared if user in share]
        self.shared = [share for share in self.shared if share not in ended]
        return ended

    async def release_all(self, owner: str) -> int:
        if not self.owners:
            raise BrokerUnreachable("silent")
        self.released.append(owner)
        self.owners = [each for each in self.owners if each != owner]
        return 2


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with two users who have leases."""
    made = Hub()
    monkeypatch.setattr(access_enforcer, "find_user", lambda users, name: users.get(name))
    monkeypatch.setattr(access_enforcer, "revoke_access", lambda user: made.revoked.append(user.name) or 1)
    return made


def build(hub: Hub) -> AccessEnforcer:
    return AccessEnforcer(users=hub.users, authenticator=hub, broker=hub)  # type: ignore[arg-type]


async def test_refused_owners_lose_leases_and_tokens(hub: Hub) -> None:
    """After the second refusal in a row, and nobody else."""
    enforcer = build(hub)
    hub.answers["ben"] = False
    for _ in range(REFUSALS - 1):
        await enforcer.run_once()
    assert hub.released == []
    await enforcer.run_once()
    assert (hub.released, hub.revoked, hub.owners) == (["ben"], ["ben"], ["ada"])
    await enforcer.run_once()
    assert hub.released == ["ben"]


async def test_refused_users_lose_shares_as_owners_and_viewers(hub: Hub) -> None:
    """Also those without leases, and those whom the hub has deleted."""
    enforcer = build(hub)
    hub.shared = [("ada", "ben"), ("ada", "eve"), ("mia", "ada"), ("ada", "ada2")]
    hub.users |= {"mia": SimpleNamespace(name="mia"), "ada2": SimpleNamespace(name="ada2")}
    hub.answers |= {"mia": False, "ada2": True}
    for _ in range(REFUSALS):
        await enforcer.run_once()
    assert hub.shared == [("ada", "ben"), ("ada", "ada2")]
    assert hub.revoked == ["mia"]


@pytest.mark.parametrize("answer", [web.HTTPError(503), OSError("no route"), {"name": "ben", "groups": ["lab"]}, True])
async def test_other_answers_take_no_access_away(hub: Hub, answer: Any) -> None:
    """A login server that does not answer, or new groups, are no refusal; one wrong answer in between is none either."""
    enforcer = build(hub)
    for each in (False, answer, False, answer):
        hub.answers["ben"] = each
        await enforcer.run_once()
    assert hub.released == hub.revoked == []


async def test_deleted_users_lose_their_leases(hub: Hub) -> None:
    """Whom the hub does not know has no tokens, but may have leases."""
    enforcer = build(hub)
    del hub.users["ben"]
    for _ in range(REFUSALS):
        await enforcer.run_once()
    assert (hub.released, hub.revoked) == (["ben"], [])
