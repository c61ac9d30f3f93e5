"""Who asks: tokens, what they show and hide, and what happens while the hub is away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gpuhub.broker.api.auth import (
    ADMIN_SCOPE,
    HEAD_NODE,
    KNOWN_TOKEN_S,
    OUTAGE_S,
    RECLAIM_SCOPE,
    SPAWNER_SERVICE,
    UNKNOWN_TOKEN_S,
    WRONG_TOKENS,
    Authenticator,
    parse_identity,
)
from gpuhub.broker_api.errors import HubUnreachable, NotKnown, TooManyRequests
from gpuhub.common.errors import NotAllowed
from gpuhub.domain.clock import Clock
from tests.support.broker.calls import ask, wait_for_state
from tests.support.broker.in_process import ACCESS, Setting, StubHub, asgi_broker
from tests.support.clocks import StillClock


async def test_lists_contain_only_own_leases(setting: Setting) -> None:
    """Ben sees nothing of ada's in the lists; an administrator and the spawner see all."""
    async with asgi_broker(setting) as running:
        await ask(running, "ada")
        await ask(running, "ben", profile="cpu")
        owners = {}
        for caller in ("ada", "ben", "root", "spawner"):
            async with running.client(caller) as client:
                owners[caller] = [lease["owner"] for lease in (await client.get("/api/v1/leases")).json()]
    assert owners == {"ada": ["ada"], "ben": ["ben"], "root": ["ada", "ben"], "spawner": ["ada", "ben"]}


async def test_lease_reason_names_the_administrator_who_ended_it(setting: Setting) -> None:
    """Whose lease an administrator ends can read who it was."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        async with running.client("root") as client:
            await client.delete(f"/api/v1/leases/{lease['id']}")
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "released", "ada")
    assert ended["reason"] == "ended by root"


async def test_broker_token_works_without_the_hub(setting: Setting) -> None:
    """Who can read the broker's token file is root here: it may look while the hub is down."""
    setting.hub.is_down = True
    async with asgi_broker(setting) as running, running.client("own-token") as client:
        assert (await client.get("/api/v1/cluster")).status_code == 200
        refused = await client.post("/api/v1/leases", json={"profile": "cpu", "key": "k", "owner": "ada"})
        assert refused.status_code == 403
        cordoned = await client.post("/api/v1/nodes/rig1/cordon", json={"reason": "new fans"})
        assert cordoned.json()["message"] == f"cordoned by {HEAD_NODE}: new fans"
    assert setting.hub.checked == 0


async def test_known_callers_are_served_during_a_hub_outage(setting: Setting) -> None:
    """A hub restart costs known users nothing; unknown ones are asked to come back."""
    async with asgi_broker(setting) as running:
        await ask(running, "ada")
        setting.hub.is_down = True
        async with running.client("ada") as client:
            assert (await client.get("/api/v1/leases")).status_code == 200
        async with running.client("ben") as client:
            refused = await client.get("/api/v1/leases")
    assert refused.status_code == 503
    assert refused.json()["code"] == "hub-unreachable"
    assert refused.headers["Retry-After"] == "5"


async def test_cached_identities_expire() -> None:
    """Good answers count for ten seconds, bad ones for five; in an outage a good one for ten minutes."""
    hub, clock = StubHub(), StillClock()
    identities = Authenticator(hub, clock)
    for _ in range(3):
        assert (await identities.identify("token ada")).name == "ada"
    assert hub.checked == 1
    clock.at += KNOWN_TOKEN_S
    hub.is_down = True
    assert (await identities.identify("token ada")).name == "ada"
    clock.at += OUTAGE_S
    with pytest.raises(HubUnreachable):
        await identities.identify("token ada")
    hub.is_down = False
    hub.models["ada"] = None
    with pytest.raises(NotKnown, match="revoked"):
        await identities.identify("token ada")
    checked = hub.checked
    with pytest.raises(NotKnown):
        await identities.identify("token ada")
    assert hub.checked == checked
    clock.at += UNKNOWN_TOKEN_S
    hub.models.clear()
    assert (await identities.identify("Bearer ada")).name == "ada"


@pytest.mark.parametrize("header", [None, "", "token", "token ", "basic abc", "token a\nb", "token " + "x" * 300])
async def test_invalid_authorization_headers_are_refused(header: str | None) -> None:
    """They are refused without asking the hub."""
    hub = StubHub()
    with pytest.raises(NotKnown):
        await Authenticator(hub, Clock()).identify(header)
    assert hub.checked == 0


@pytest.mark.parametrize("name", ["../etc", "Ada", "a b", "a" * 40, "", "ada\n"])
def test_user_names_with_special_meaning_are_refused(name: str) -> None:
    """The broker makes folder, container and network names of them."""
    with pytest.raises(NotAllowed):
        parse_identity({"kind": "user", "name": name, "scopes": [ACCESS]})


def test_a_service_is_never_an_administrator() -> None:
    """Only users are; a service has scopes."""
    who = parse_identity({"kind": "service", "name": "s", "admin": True, "scopes": [ACCESS, ADMIN_SCOPE]})
    assert (who.is_user, who.is_admin, who.any_owner, who.sees_all) == (False, False, False, False)


@pytest.mark.parametrize(("kind", "may"), [("service", True), ("user", False)])
def test_only_a_service_may_have_idle_notebooks_stopped(kind: str, may: bool) -> None:
    """A user's token with the scope has no such right; and the scope shows nothing of other users."""
    who = parse_identity({"kind": kind, "name": "ada", "scopes": [ACCESS, RECLAIM_SCOPE]})
    assert (who.may_reclaim, who.sees_all) == (may, False)


@pytest.mark.parametrize(
    ("groups", "known"), [(["lab", "ml"], {"lab", "ml"}), (None, set()), ("lab", set()), ([1, None, "lab"], {"lab"})]
)
def test_groups_of_a_user_come_from_the_hub(groups: object, known: set[str]) -> None:
    """Limits and reservations go by them; whatever else stands there is nobody's group."""
    who = parse_identity({"kind": "user", "name": "ada", "groups": groups, "scopes": [ACCESS]})
    assert who.groups == known


def test_groups_of_services_are_ignored() -> None:
    """Groups are users'."""
    who = parse_identity({"kind": "service", "name": "s", "groups": ["lab"], "scopes": [ACCESS]})
    assert who.groups == frozenset()


class GatedHub(StubHub):
    """A hub that answers only when its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def fetch_token_model(self, token: str) -> Mapping[str, Any] | None:
        await self.gate.wait()
        return None if token.startswith("wrong") else await super().fetch_token_model(token)


async def test_all_users_can_come_back_at_once() -> None:
    """Five hundred right tokens that the broker does not know yet, from one address, are all accepted."""
    hub = GatedHub()
    authenticator = Authenticator(hub, Clock())
    asked = [asyncio.ensure_future(authenticator.identify(f"token user{number}", "10.0.0.9")) for number in range(500)]
    await asyncio.sleep(0)
    hub.gate.set()
    assert [caller.name for caller in await asyncio.gather(*asked)] == [f"user{number}" for number in range(500)]
    assert not authenticator._wrong._waiting
    assert not authenticator._wrong._checking


async def test_wrong_tokens_do_not_stop_right_ones_from_other_addresses() -> None:
    """A flood uses up the limit of its own address; all addresses of one IPv6 network are one."""
    hub = GatedHub()
    hub.gate.set()
    authenticator = Authenticator(hub, StillClock(), "own", "spawner-secret")
    flood = [authenticator.identify(f"token wrong{number}", f"2001:db8::{number:x}") for number in range(1000)]
    refusals = [type(refusal) for refusal in await asyncio.gather(*flood, return_exceptions=True)]
    assert refusals.count(NotKnown) <= WRONG_TOKENS.burst
    assert refusals.count(TooManyRequests) + refusals.count(NotKnown) == 1000
    assert (await authenticator.identify("token ada", "2001:db8:0:1::1")).name == "ada"


async def test_own_services_are_known_without_the_hub() -> None:
    """The spawner works at once after a restart of the broker, whatever others send and whether the hub answers."""
    hub = StubHub(is_down=True)
    authenticator = Authenticator(hub, Clock(), "own", "spawner-secret")
    spawner = await authenticator.identify("token spawner-secret", "10.0.0.9")
    assert (spawner.name, spawner.any_owner, spawner.is_admin, spawner.is_user) == (SPAWNER_SERVICE, True, False, False)
    assert hub.checked == 0
    without = Authenticator(StubHub(models={"": None}), Clock())
    with pytest.raises(NotKnown):
        await without.identify("token ", "10.0.0.9")
