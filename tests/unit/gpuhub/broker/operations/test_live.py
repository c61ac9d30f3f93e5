"""Live views: what they send to whom, how often, and how much of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx_sse
import pytest

from gpuhub.broker.api import streams
from gpuhub.broker.controllers.nodes import node_controller
from gpuhub.broker.operations import live
from gpuhub.broker_api.errors import TooManyStreams
from gpuhub.broker_api.schemas import ClusterView, LeaseState
from gpuhub.broker_api.schemas.live import OwnView
from gpuhub.domain.models import Identity
from tests.support.broker.calls import ask, delete, post, run_notebook
from tests.support.broker.in_process import Running, Setting, asgi_broker

ADA, BEN = Identity(name="ada", is_user=True), Identity(name="ben", is_user=True)
ROOT = Identity(name="root", is_user=True, is_admin=True)


@pytest.fixture
async def running(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    async with asgi_broker(setting) as broker:
        yield broker


async def read_stream(running: Running, token: str, path: str, **params: Any) -> list[tuple[str, Any]]:
    """Return the events of a stream that ends."""
    async with (
        running.client(token) as client,
        httpx_sse.aconnect_sse(client, "GET", f"/api/v1{path}", params=params) as source,
    ):
        assert source.response.headers["Content-Type"].startswith("text/event-stream")
        assert source.response.headers["Cache-Control"] == "no-store"
        return [(event.event, json.loads(event.data)) async for event in source.aiter_sse()]


def watch_own(running: Running, caller: Identity) -> AsyncIterator[str]:
    views: live.LiveViews = running.app.state.live_views
    return views.watch_own(caller)


async def take(stream: AsyncIterator[str], is_wanted: Any = lambda _: True) -> OwnView:
    """Return the next view that is wanted."""
    async with asyncio.timeout(30):
        while True:
            view = OwnView.model_validate_json(await anext(stream))
            if is_wanted(view):
                return view


async def test_streams_begin_with_the_current_view(running: Running) -> None:
    """Both are of the same form as the other routes' answers."""
    lease = await ask(running, "ada")
    [(kind, cluster)] = await read_stream(running, "ben", "/stream/cluster", for_s=0)
    assert kind == "cluster"
    holders = [gpu.holder for node in ClusterView.model_validate(cluster).nodes for gpu in node.gpus]
    assert [holder.owner for holder in holders if holder] == ["ada"]
    [(kind, own)] = await read_stream(running, "ada", "/stream/own", for_s=0)
    assert (kind, [one["id"] for one in own["leases"]]) == ("own", [lease["id"]])


async def test_own_view_has_nothing_of_other_users(running: Running) -> None:
    """Only an administrator's has the usage of all; not even it has other users' leases and jobs."""
    await ask(running, "ada")
    await post(running, "ada", "/jobs", {"run_id": "adas-run", "name": "secret.py"}, 201)
    [(_, of_ben)] = await read_stream(running, "ben", "/stream/own", for_s=0)
    assert (of_ben["leases"], of_ben["jobs"], of_ben["all_usage"]) == ([], [], [])
    assert "ada" not in json.dumps(of_ben)
    [(_, of_root)] = await read_stream(running, "root", "/stream/own", for_s=0)
    assert (of_root["leases"], of_root["jobs"]) == ([], [])
    assert [usage["owner"] for usage in of_root["all_usage"]] == ["ada"]


async def test_each_change_is_sent_once(running: Running) -> None:
    """A grant, a job's start and its end; nothing while nothing changes."""
    stream = watch_own(running, ADA)
    assert (await take(stream)).leases == ()
    lease = await ask(running, "ada")
    assert [one.id for one in (await take(stream)).leases] == [lease["id"]]
    await run_notebook(running, lease)
    assert (await take(stream)).leases[0].state is LeaseState.ACTIVE
    job = await post(running, "ada", "/jobs", {"run_id": "first-run", "name": "train.py", "detached": True}, 201)
    assert (await take(stream, lambda view: view.jobs)).jobs[0].name == "train.py"
    await delete(running, "ada", f"/jobs/{job['id']}")
    ended = await take(stream, lambda view: view.jobs and view.jobs[0].ended_at)
    assert ended.jobs[0].reason == "stopped"
    following = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.2)
    assert not following.done()
    following.cancel()


async def test_cluster_is_built_once_for_all_viewers(running: Running) -> None:
    """Also while a reservation gives some users a view of their own at the other route."""
    window = {"starts_at": "2126-01-01T08:00:00Z", "ends_at": "2126-01-01T09:00:00Z"}
    await post(running, "root", "/reservations", {"name": "x", "users": ["ben"], "nodes": ["rig1"], **window}, 201)
    views: live.LiveViews = running.app.state.live_views
    for caller in (ADA, BEN, ROOT):
        assert ClusterView.model_validate_json(await anext(views.watch_cluster(caller, ()))).reservations
    cache: Any = running.app.state.cluster._views
    assert set(cache._built) == {None}


async def test_number_of_leases_and_jobs_is_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is counted."""
    monkeypatch.setattr(live, "MAX_WAITING", 3)
    monkeypatch.setattr(live, "MAX_OPEN_JOBS", 4)
    await post(running, "ada", "/jobs/arrays", {"job": {"run_id": "sweep-1", "detached": True}, "count": 9}, 201)
    view = await take(watch_own(running, ADA))
    assert (len(view.jobs), view.more_jobs) == (4, 5)
    assert len(view.leases) + view.more_leases == 9
    assert len([one for one in view.leases if one.state is LeaseState.REQUESTED]) == 3


async def test_a_large_view_is_sent_less_often(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is limited in bytes."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise asyncio.CancelledError

    views: live.LiveViews = running.app.state.live_views
    stream = views.watch_cluster(ADA, ())
    size = len(await anext(stream))
    monkeypatch.setattr(live, "MAX_BYTES_PER_S", size / 7)
    monkeypatch.setattr("gpuhub.broker.operations.live.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await anext(stream)
    assert slept == [pytest.approx(7, abs=0.1)]


def test_number_of_streams_is_limited(tmp_path: Path) -> None:
    """For each user; the hub's own have no limit."""
    views = live.LiveViews(None, None, None)  # type: ignore[arg-type]
    with ExitStack() as stack:
        for _ in range(live.STREAMS.per_owner):
            stack.enter_context(views.acquire(ADA))
        with pytest.raises(TooManyStreams, match="ada: 12 live views at once are the limit"):
            stack.enter_context(views.acquire(ADA))
        stack.enter_context(views.acquire(BEN))
        stack.enter_context(views.acquire(Identity(name="gpuhub-spawner", is_user=False, any_owner=True)))


async def test_a_stream_ends_when_rights_change(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the hub no longer knows the token; its slot is free again."""
    monkeypatch.setattr(streams, "RECHECK_S", 0.01)
    monkeypatch.setattr("gpuhub.broker.api.auth.KNOWN_TOKEN_S", 0.0)
    reading = asyncio.ensure_future(read_stream(running, "ada", "/stream/own"))
    await asyncio.sleep(0.1)
    assert not reading.done()
    running.setting.hub.models["ada"] = None
    async with asyncio.timeout(30):
        assert len(await reading) >= 1
    counted: Any = running.app.state.live_views._streams
    assert counted._total[live.STREAMS] == 0
