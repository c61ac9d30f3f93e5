"""Handlers of server-sent events for browsers: the page's changes, and the output of a job.

A browser that connects again is identified again, and gets the whole page, or the end of the output.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from tornado.iostream import StreamClosedError

from gpuhub.broker_api.errors import NotKnown
from gpuhub.broker_api.schemas.live import OwnView
from gpuhub.common.errors import GpuhubError, InvalidRequest
from gpuhub.web.gpus_page.announcements import describe_changes
from gpuhub.web.gpus_page.feeds import MAX_OUTPUTS, MAX_PAGES, LiveFeeds, PageFeed
from gpuhub.web.gpus_page.node_filter import NodeFilter, read_node_filter
from gpuhub.web.gpus_page.parts import GpusPageData, RenderedPage, render_page
from gpuhub.web.handlers import BROKER_TIMEOUT_S, BrokerUserHandler
from gpuhub.web.idle_notices import build_warnings

#: Minimum time between two events of a stream, seconds.
PERIOD_S = 1.0
#: Time without an event after which an empty one is sent, seconds: proxies close silent connections.
HEARTBEAT_S = 15.0
#: Duration of a stream, seconds, after which the browser connects again; less than a user's token is valid.
MAX_STREAM_S = 240.0
#: Time that a browser may take to receive an event, seconds.
SEND_TIMEOUT_S = 30.0
#: Time after which a browser connects again, milliseconds.
RETRY_MS = 2000
#: Output of a job that is shown first, bytes.
OUTPUT_TAIL_BYTES = 64 * 1024
#: Maximum output that is sent at once and in each `PERIOD_S`, bytes.
OUTPUT_BYTES = 128 * 1024


class PageUpdates:
    """What a viewer has, so that only changes are sent."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}
        self._nodes: dict[str, str] = {}
        self._own: OwnView | None = None
        self._warnings: list[dict[str, Any]] | None = None

    def build(self, page: RenderedPage, own: OwnView | None) -> dict[str, Any] | None:
        """Return what the viewer lacks, and keep it; None if that is nothing."""
        update: dict[str, Any] = {}
        parts = {name: html for name, html in page.parts.items() if self._parts.get(name) != html}
        nodes = {name: html for name, html in page.nodes.items() if self._nodes.get(name) != html}
        if parts:
            update["parts"] = parts
        if nodes or list(page.nodes) != list(self._nodes):
            update |= {"nodes": nodes, "order": list(page.nodes)}
        announcements = describe_changes(self._own, own)
        if announcements:
            update["announcements"] = announcements
        warnings = [] if own is None else build_warnings(own.leases)
        if own is not None and warnings != self._warnings:
            update["warnings"] = self._warnings = warnings
        self._parts, self._nodes, self._own = dict(page.parts), dict(page.nodes), own or self._own
        return update or None


class EventStreamHandler(BrokerUserHandler):
    """Base of handlers that send events until the browser goes away, their time is over or they are done."""

    _work: asyncio.Task[None] | None = None

    def initialize(self, *, feeds: LiveFeeds, **shared: Any) -> None:  # type: ignore[override] # Tornado passes all
        """Store the shared objects; called by Tornado."""
        super().initialize(**shared)
        self.feeds = feeds

    async def run_stream(self, work: Any) -> None:
        """Send the headers and then what the coroutine `work` sends; a refusal of the broker becomes an event."""
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        self.set_header("X-Accel-Buffering", "no")
        self.write(f"retry: {RETRY_MS}\n\n")
        self._work = asyncio.ensure_future(work)
        with suppress(asyncio.CancelledError, StreamClosedError, TimeoutError):
            try:
                await self._work
            except NotKnown:
                pass  # the browser connects again, and is identified again
            except GpuhubError as error:
                await self.send_event("refused", {"message": str(error)})
        if not self._finished:
            self.finish()

    def on_connection_close(self) -> None:
        """End the work of a browser that went away."""
        super().on_connection_close()
        if self._work is not None:
            self._work.cancel()

    async def send_event(self, kind: str, value: Mapping[str, Any]) -> None:
        """Send an event, and wait until the browser has received what came before."""
        self.write(f"event: {kind}\ndata: {json.dumps(value)}\n\n")
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self.flush()

    async def send_output(self, output: AsyncIterator[bytes], end: float) -> None:
        """Send the event `begin`, events `text` with an output, and `end` after all of it.

        It stops at the time `end` of the event loop's clock; a part is limited, and so is the rate.
        """
        loop = asyncio.get_running_loop()
        following: asyncio.Future[bytes | None] = asyncio.ensure_future(_take(output))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            await self.send_event("begin", {})
            while loop.time() < end:
                await asyncio.wait([following], timeout=HEARTBEAT_S)
                if not following.done():
                    await self.send_heartbeat()
                    continue
                part = following.result()
                if part is None:
                    await self.send_event("end", {})
                    return
                # What comes faster waits at the broker.
                following = asyncio.ensure_future(_take(output))
                await self.send_event("text", {"text": decoder.decode(part)})
                await asyncio.sleep(PERIOD_S * len(part) / OUTPUT_BYTES)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await output.aclose()  # type: ignore[attr-defined] # it is a generator

    async def send_heartbeat(self) -> None:
        """Send an event without content, by which the page's script knows that the connection works."""
        await self.send_event("heartbeat", {})


class PageStreamHandler(EventStreamHandler):
    """GET: events `update`, each with the parts of the page that changed."""

    async def get(self) -> None:
        """Send the whole page and then each change; `for_s` shortens the stream."""
        user = self.require_user()
        self.check_scope()
        for_s = _parse_duration(self.get_query_argument("for_s", ""))
        await self.run_stream(self._send_updates(user, read_node_filter(self), for_s))

    async def _send_updates(self, user: Any, node_filter: NodeFilter, for_s: float) -> None:
        loop, sent = asyncio.get_running_loop(), PageUpdates()
        end = loop.time() + for_s
        async with self.feeds.admit("pages", user.name, MAX_PAGES):
            with self.feeds.join(user) as feed:
                await _wait_settled(feed)
                while feed.refusal is None:
                    feed.changed.clear()
                    cluster, own = feed.cluster.value, feed.own.value
                    data = GpusPageData.build(user, None if cluster is None else cluster.view, own)
                    update = sent.build(render_page(data, node_filter, cluster), own)
                    if update is not None:
                        await self.send_event("update", {**update, "now": datetime.now(UTC).isoformat()})
                    if loop.time() >= end:
                        return
                    await asyncio.sleep(PERIOD_S)
                    while not await _wait_event(feed.changed, HEARTBEAT_S) and loop.time() < end:
                        await self.send_heartbeat()
                raise feed.refusal


class OutputStreamHandler(EventStreamHandler):
    """GET `?job=ID`: events `text` with the output of one of the user's detached jobs, then `end`."""

    async def get(self) -> None:
        """Send the end of the output and what follows, until the job has ended."""
        user = self.require_user()
        self.check_scope()
        await self.run_stream(self._send_output(user, self.get_query_argument("job", "")))

    async def _send_output(self, user: Any, job: str) -> None:
        check_job_id(job)
        end = asyncio.get_running_loop().time() + MAX_STREAM_S
        async with self.feeds.admit("outputs of jobs", user.name, MAX_OUTPUTS):
            broker = self.broker.acting(self.user_tokens.get(user))
            await self.send_output(broker.follow_output(job, OUTPUT_TAIL_BYTES), end)


def check_job_id(text: str) -> None:
    """Refuse what cannot be the id of a job.

    Raises:
        InvalidRequest: It is not one.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", text):
        raise InvalidRequest("job: this is not the id of a job")


async def _take(output: AsyncIterator[bytes]) -> bytes | None:
    return await anext(output, None)


async def _wait_settled(feed: PageFeed) -> None:
    """Wait for the first state, or until it is clear that the broker does not answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            while not feed.is_settled and feed.refusal is None:
                feed.changed.clear()
                await feed.changed.wait()


async def _wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _parse_duration(text: str) -> float:
    """Return the duration of a stream, seconds; anything but a smaller number than the longest gives the longest."""
    return min(MAX_STREAM_S, float(text)) if text.isdecimal() and len(text) < 6 else MAX_STREAM_S
