"""Streams that viewers share, what each of them is sent, and what is announced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhub.broker_api.errors import NotKnown, TooManyStreams
from gpuhub.broker_api.schemas import ClusterView, JobState, LeaseState
from gpuhub.broker_api.schemas.live import JobSummaryView, OwnView
from gpuhub.common.errors import BrokerUnreachable
from gpuhub.config.settings import ClusterSettings
from gpuhub.web.gpus_page import feeds, parts
from gpuhub.web.gpus_page.announcements import MAX_SENTENCES, describe_changes
from gpuhub.web.gpus_page.event_streams import PageUpdates
from gpuhub.web.gpus_page.feeds import Feed, LiveFeeds
from gpuhub.web.gpus_page.node_filter import NodeFilter
from gpuhub.web.gpus_page.parts import GpusPageData, RenderedCluster, render_page
from gpuhub.web.handlers import UserTokens
from tests.support.broker.factories import ask, lease
from tests.support.hub.fake_broker import NOW, FakeBroker

OWN = OwnView(leases=(), jobs=(), usage=None)


class Stream:
    """A stream whose values and failures a test decides."""

    def __init__(self) -> None:
        self.values: asyncio.Queue[Any] = asyncio.Queue()
        self.opened = 0

    async def open(self) -> AsyncIterator[Any]:
        self.opened += 1
        while True:
            value = await self.values.get()
            if isinstance(value, Exception):
                raise value
            yield value


def make_user(name: str, *, admin: bool = False) -> Any:
    return SimpleNamespace(
        name=name, admin=admin, orm_user=SimpleNamespace(groups=[]), new_api_token=lambda **_: f"token-of-{name}"
    )


def make_job(state: JobState = JobState.RUNNING, **changes: Any) -> JobSummaryView:
    values = {
        "id": "j1", "run_id": "run-1", "name": "train.py", "state": state, "lease": "l1", "nodes": ("rig1",), "gpu_count": 1,
        "wants": "1 node × 1 GPU", "detached": True, "position": None, "waiting_for": None, "created_at": NOW,
        "started_at": NOW, "ended_at": None, "reason": None, "exit_code": None,
    }  # fmt: skip
    return JobSummaryView(**{**values, **changes})


async def wait_for(changed: asyncio.Event) -> None:
    async with asyncio.timeout(30):
        await changed.wait()
    changed.clear()


async def test_viewers_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is open while there is a viewer, and opened again after a failure, which every viewer learns."""
    monkeypatch.setattr(feeds, "RETRY_S", 0.01)
    stream = Stream()
    feed: Feed[str] = Feed(stream.open)
    first, second = asyncio.Event(), asyncio.Event()
    with feed.join(first), feed.join(second):
        stream.values.put_nowait("a")
        await wait_for(first)
        await wait_for(second)
        assert (feed.value, feed.is_settled, stream.opened) == ("a", True, 1)
        stream.values.put_nowait(BrokerUnreachable("down"))
        await wait_for(first)
        assert (feed.value, feed.is_settled) == (None, True)
        stream.values.put_nowait("b")
        await wait_for(first)
        assert (feed.value, stream.opened) == ("b", 2)
    assert not feed.is_open
    with feed.join(first):
        assert not feed.is_settled


async def test_refusal_ends_the_stream() -> None:
    """A token that the hub no longer knows is not replaced while the page is open."""
    stream = Stream()
    feed: Feed[str] = Feed(stream.open)
    changed = asyncio.Event()
    with feed.join(changed):
        stream.values.put_nowait(NotKnown("expired"))
        await wait_for(changed)
        assert isinstance(feed.refusal, NotKnown)
        await asyncio.sleep(0.05)
        assert stream.opened == 1


async def test_each_user_has_an_own_stream_with_the_own_token(cluster: ClusterSettings) -> None:
    """The cluster's is shared; nothing is left when all pages are closed."""
    tokens: list[str] = []
    own, common = Stream(), Stream()

    def acting(token: str) -> Any:
        tokens.append(token)
        return SimpleNamespace(watch_own=own.open)

    broker = SimpleNamespace(acting=acting, watch_cluster=lambda _: common.open())
    live = LiveFeeds(cluster, lambda: broker, UserTokens())
    with (
        live.join(make_user("ada")) as first,
        live.join(make_user("ada")) as second,
        live.join(make_user("ben")) as third,
    ):
        await asyncio.sleep(0.01)
        assert first.own is second.own is not third.own
        assert first.cluster is third.cluster
        assert sorted(tokens) == ["token-of-ada", "token-of-ben"]
        assert (common.opened, own.opened) == (1, 2)
        common.values.put_nowait(await FakeBroker(cluster).cluster())
        await wait_for(first.changed)
        assert isinstance(third.cluster.value, RenderedCluster)
    assert (live._clusters, live._own) == ({}, {})


async def test_number_of_pages_is_limited(cluster: ClusterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a user, and for all together."""
    monkeypatch.setattr(feeds, "CLOSING_S", 0.01)
    live = LiveFeeds(cluster, lambda: None, UserTokens())
    async with live.admit("pages", "ada", 1):
        with pytest.raises(TooManyStreams, match="You have 1 pages open"):
            await live.admit("pages", "ada", 1).__aenter__()
        async with live.admit("pages", "ben", 1):
            monkeypatch.setattr(feeds, "MAX_VIEWERS", 2)
            with pytest.raises(TooManyStreams, match="Too many users"):
                await live.admit("pages", "eve", 1).__aenter__()
    async with live.admit("pages", "ada", 1):
        pass


async def test_output_waits_for_the_one_that_its_browser_closes(cluster: ClusterSettings) -> None:
    """The request for the next one may arrive before the end of the connection of the last one."""
    live = LiveFeeds(cluster, lambda: None, UserTokens())
    order = []

    async def follow(job: str) -> None:
        async with live.admit("outputs of jobs", "ada", 1):
            order.append(job)

    async with asyncio.timeout(30), asyncio.TaskGroup() as browser, live.admit("outputs of jobs", "ada", 1):
        browser.create_task(follow("second"))
        browser.create_task(follow("third"))
        await asyncio.sleep(0)
        order.append("first")
    assert order == ["first", "second", "third"]


async def test_nodes_are_rendered_once_for_many_viewers(
    cluster: ClusterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rendering for all with the same filter and rights; the number of filters that are kept is limited."""
    rendered = RenderedCluster(await FakeBroker(cluster).cluster())
    selected: list[str] = []
    select = parts.select_nodes
    monkeypatch.setattr(parts, "select_nodes", lambda *given: selected.append(given[2]) or select(*given))
    for name in ("ada", "ben", "eve"):
        rendered.render_nodes(NodeFilter(), name, is_admin=False)
    assert selected == ["ada"]
    rendered.render_nodes(NodeFilter(), "root", is_admin=True)
    for name in ("ada", "ben"):
        rendered.render_nodes(NodeFilter(show="mine"), name, is_admin=False)
    assert selected == ["ada", "root", "ada", "ben"]
    for number in range(2 * parts.MAX_FILTERS):
        rendered.render_nodes(NodeFilter(find=str(number)), "ada", is_admin=False)
    assert len(rendered._nodes) == parts.MAX_FILTERS


def build_update(updates: PageUpdates, view: ClusterView, own: OwnView) -> Any:
    data = GpusPageData.build(make_user("ada"), view, own)
    return updates.build(render_page(data, NodeFilter()), own)


async def test_only_changes_are_sent(cluster: ClusterSettings) -> None:
    """First everything, then the nodes and parts that changed, and nothing where nothing did."""
    broker = FakeBroker(cluster)
    updates = PageUpdates()
    first = build_update(updates, await broker.cluster(), OWN)
    assert set(first["parts"]) == set(parts.PARTS)
    assert first["order"] == list(first["nodes"]) == ["rig1", "rig2", "rig3"]
    assert first["warnings"] == []
    assert build_update(updates, await broker.cluster(), OWN) is None
    await broker.request_lease(ask("big", "ben"))
    change = build_update(updates, await broker.cluster(), OWN)
    assert set(change) == {"parts", "nodes", "order"}
    assert (set(change["parts"]), set(change["nodes"])) == ({"totals"}, {"rig1"})


async def test_users_own_jobs_are_shown_with_their_buttons(cluster: ClusterSettings) -> None:
    """Output for detached jobs that have begun; no button for what has ended, and no name can be HTML."""
    view = await FakeBroker(cluster).cluster()
    nasty = make_job(id="j2", name="<img src=x>", state=JobState.ENDED, ended_at=NOW, reason="failed", exit_code=3)
    waiting = make_job(id="j3", state=JobState.WAITING, nodes=(), position=2, waiting_for="ben", started_at=None)
    own = OwnView(leases=(), jobs=(make_job(), nasty, waiting), more_jobs=7, usage=None)
    html = render_page(GpusPageData.build(make_user("ada"), view, own), NodeFilter()).parts["jobs"]
    assert 'data-do="cancel" data-job="j1"' in html
    assert 'data-do="cancel" data-job="j2"' not in html
    assert ('data-output="j1"' in html, 'data-output="j2"' in html, 'data-output="j3"' in html) == (True, True, False)
    assert "position 2: ben" in html
    assert "(exit code 3)" in html
    assert "<img" not in html
    assert "and 7 more" in html


def test_announcements_are_few_and_about_the_user() -> None:
    """A grant, a job's run and its end; nothing at the beginning, and nothing for what looks the same."""
    granted = lease("GPU-a")
    waiting = granted.model_copy(update={"state": LeaseState.REQUESTED, "gpus": (), "position": 2, "nodes": ()})
    before = OwnView(leases=(waiting,), jobs=(make_job(JobState.STARTING),), usage=None)
    after = OwnView(leases=(granted,), jobs=(make_job(),), usage=None)
    assert describe_changes(None, after) == []
    assert describe_changes(after, after) == []
    assert describe_changes(before, after) == [
        "Your notebook got RTX 5090 on rig1.",
        "Your job train.py runs on rig1.",
    ]
    first = OwnView(leases=(waiting.model_copy(update={"position": 1}),), jobs=before.jobs, usage=None)
    assert describe_changes(before, first) == ["Your notebook is first in the queue."]
    ended = OwnView(leases=(), jobs=(make_job(JobState.ENDED, reason="stopped"),), usage=None)
    assert describe_changes(after, ended) == ["Your notebook has ended.", "Your job train.py has ended: stopped."]


def test_many_changes_are_announced_by_their_number() -> None:
    """An array of hundreds of jobs says a few sentences."""
    numbers = range(100)
    before = OwnView(
        leases=(), jobs=tuple(make_job(JobState.STARTING, id=f"j{number}") for number in numbers), usage=None
    )
    after = OwnView(leases=(), jobs=tuple(make_job(id=f"j{number}") for number in numbers), usage=None)
    sentences = describe_changes(before, after)
    assert (len(sentences), sentences[-1]) == (MAX_SENTENCES + 1, f"And {100 - MAX_SENTENCES} more changes.")
