"""A persistent notebook in its spawner: what a stop, a failed start and a lost container tell the broker, and when."""

from __future__ import annotations

import asyncio
import logging
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from gpuhub.broker_api.schemas import LeaseRequest
from gpuhub.common.errors import BrokerUnreachable, InvalidRequest
from gpuhub.config.settings import ProfileSettings
from gpuhub.spawners import base
from gpuhub.spawners.base import LeasedSpawner, SpawnFailed, is_kept, is_suspendable, parse_spawn_options


class FakeBroker:
    """Records releases in `calls`; does not answer the first `failures` ones."""

    def __init__(self, calls: list[str], failures: int = 0) -> None:
        self._calls, self._failures = calls, failures

    async def release(self, lease_id: str) -> Any:
        if self._failures:
            self._failures -= 1
            raise BrokerUnreachable("restarting")
        self._calls.append(f"release {lease_id}")
        return SimpleNamespace(id=lease_id, state="released", version=1)


def build_spawner(*, persistent: bool, failures: int = 0) -> tuple[Any, list[str]]:
    """Return a spawner with a running notebook, and what it does in order."""
    calls: list[str] = []

    async def remove(*, grace_s: int) -> None:
        calls.append("remove container")

    async def release_lease(*, wait: bool) -> None:
        calls.append("release")
        spawner.lease_id = ""

    async def await_undo() -> None:
        return

    spawner = SimpleNamespace(
        is_persistent=persistent, lease_id="l1", broker=FakeBroker(calls, failures), log=logging.getLogger("hub"),
        _log_name="ada", _keeps_lease=False, _claim_task=None, _remove=remove, release_lease=release_lease,
        _await_undo=await_undo,
    )  # fmt: skip
    spawner._announce_end = MethodType(LeasedSpawner._announce_end, spawner)
    return spawner, calls


@pytest.mark.parametrize(
    ("persistent", "expected"),
    [(True, ["release l1", "remove container", "release"]), (False, ["remove container", "release"])],
)
async def test_stop_releases_before_the_container_goes(persistent: bool, expected: list[str]) -> None:
    """The broker must not see the missing container of a lease that still lives; a cancelled start does the same."""
    spawner, calls = build_spawner(persistent=persistent)
    await LeasedSpawner.stop(spawner)
    assert calls == expected
    spawner, calls = build_spawner(persistent=persistent)
    await LeasedSpawner._undo(spawner)
    assert calls == expected


async def test_stop_waits_for_a_broker_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever: after a while the container is removed all the same."""
    monkeypatch.setattr(base, "_ANNOUNCE_RETRY_S", 0.01)
    spawner, calls = build_spawner(persistent=True, failures=3)
    await LeasedSpawner.stop(spawner)
    assert calls == ["release l1", "remove container", "release"]
    monkeypatch.setattr(base, "_ANNOUNCE_S", 0.05)
    spawner, calls = build_spawner(persistent=True, failures=1000)
    async with asyncio.timeout(5):
        await LeasedSpawner.stop(spawner)
    assert calls == ["remove container", "release"]


async def test_lost_container_is_left_to_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """JupyterHub runs the hook alone for a server that ended by itself."""
    monkeypatch.setattr("jupyterhub.spawner.Spawner.run_post_stop_hook", lambda _self: None)
    for persistent, expected in ((True, []), (False, ["remove container", "release"])):
        spawner, calls = build_spawner(persistent=persistent)
        hook = MethodType(LeasedSpawner.run_post_stop_hook, spawner)
        with pytest.raises(TypeError, match="super"):
            # The namespace has no superclass; what matters comes before.
            await hook()
        assert (calls, spawner.lease_id) == (expected, "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"image": "lab/other:1"}, (False, "lab/other:1")),
        ({"image": "lab/other:1", "keep": "yes"}, (True, "lab/other:1")),
        ({"keep": "yes"}, (True, None)),
    ],
)
async def test_broker_is_told_what_was_chosen(options: dict[str, str], expected: tuple[bool, str | None]) -> None:
    """It repeats that to a hub which was restarted while the notebook waited."""
    requests: list[LeaseRequest] = []

    async def list_leases() -> list[Any]:
        return []

    async def request_lease(request: LeaseRequest) -> Any:
        requests.append(request)
        return SimpleNamespace(id="l1")

    spawner: Any = SimpleNamespace(
        broker=SimpleNamespace(leases=list_leases, request_lease=request_lease),
        user=SimpleNamespace(name="ada", orm_user=SimpleNamespace(groups=[])),
        name="",
        user_options={"profile": "big", **options},
    )
    profile = ProfileSettings(name="big", title="Big", image="lab/other:1")
    await LeasedSpawner._request_lease(spawner, profile)
    assert [(request.persistent, request.image) for request in requests] == [expected]


@pytest.mark.parametrize(("value", "expected"), [("yes", True), (True, True), ("no", False), (False, False)])
def test_option_of_the_form_and_of_the_rest_api(value: object, expected: bool) -> None:
    assert is_kept({"profile": "big", "keep": value}) is expected
    assert is_kept({"profile": "big"}) is False


def test_other_values_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="keep: 'maybe' is neither yes nor no"):
        is_kept({"keep": "maybe"})
    with pytest.raises(InvalidRequest, match="suspend: 'maybe' is neither yes nor no"):
        is_suspendable({"suspend": "maybe"})
    assert [is_suspendable(options) for options in ({}, {"suspend": "yes"}, {"suspend": "no"})] == [True, True, False]
    assert parse_spawn_options({"profile": ["big"], "suspend": ["no"]}) == {"profile": "big", "suspend": "no"}
    assert parse_spawn_options({"profile": ["big"], "keep": ["yes"]}) == {"profile": "big", "keep": "yes"}
    with pytest.raises(SpawnFailed):
        parse_spawn_options({"profile": ["big"], "keep": ["yes", "no"]})
