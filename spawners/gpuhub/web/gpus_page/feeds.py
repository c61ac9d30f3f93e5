"""Streams of the broker that viewers of the page share: of the cluster for each set of groups, and of each user.

A stream is open while there is a viewer. A viewer has an event, which is set when something changes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Generic, TypeVar

from gpuhub.broker_api.errors import NotKnown, TooManyRequests, TooManyStreams
from gpuhub.broker_api.schemas import ClusterView
from gpuhub.broker_api.schemas.live import OwnView
from gpuhub.common.errors import GpuhubError, Unavailable
from gpuhub.config.settings import ClusterSettings
from gpuhub.web.gpus_page.parts import RenderedCluster
from gpuhub.web.handlers import UserTokens
from gpuhub.web.spawn_form import find_user_groups

T = TypeVar("T")
K = TypeVar("K")

#: First pause before a stream is opened again, seconds.
RETRY_S = 0.5
#: Maximum pause after repeated failures, seconds.
MAX_RETRY_S = 10.0
#: Maximum number of pages that one user has open.
MAX_PAGES = 6
#: Maximum number of outputs of jobs that one user has open.
MAX_OUTPUTS = 3
#: Maximum number of pages and outputs that all users together have open.
MAX_VIEWERS = 2000
#: Time in which one that a browser has closed is noticed, seconds: the request for the next one may arrive before.
CLOSING_S = 3.0


class Feed(Generic[T]):
    """One stream of the broker, for many viewers."""

    def __init__(self, open_stream: Callable[[], AsyncIterator[T]]) -> None:
        self._open_stream = open_stream
        self._viewers: list[asyncio.Event] = []
        self._task: asyncio.Task[None] | None = None
        #: The latest value; None before the first, and while the broker does not answer.
        self.value: T | None = None
        #: Whether there is a value, or the broker did not answer.
        self.is_settled = False
        #: Why the broker refuses the stream, which has then ended; None otherwise.
        self.refusal: GpuhubError | None = None

    @property
    def is_open(self) -> bool:
        """Return whether it has viewers."""
        return bool(self._viewers)

    @contextmanager
    def join(self, changed: asyncio.Event) -> Iterator[None]:
        """Keep the stream open for the duration of the context, and set `changed` at each change."""
        self._viewers.append(changed)
        if self._task is None or self._task.done():
            self.value, self.is_settled, self.refusal = None, False, None
            self._task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            self._viewers.remove(changed)
            if not self._viewers:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        pause_s = RETRY_S
        while True:
            try:
                async for value in self._open_stream():
                    pause_s = RETRY_S
                    self._publish(value)
            except (Unavailable, TooManyRequests):
                self._publish(None)
            except GpuhubError as error:
                self.refusal = error
                self._publish(None)
                return
            # A stream that ended orderly had only reached its time limit.
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _publish(self, value: T | None) -> None:
        self.value, self.is_settled = value, True
        for changed in self._viewers:
            changed.set()


class PageFeed:
    """What one viewer's page is made of."""

    def __init__(self, cluster: Feed[RenderedCluster], own: Feed[OwnView], changed: asyncio.Event) -> None:
        self.cluster = cluster
        self.own = own
        self.changed = changed

    @property
    def is_settled(self) -> bool:
        """Return whether everything is known that can be known now."""
        return self.cluster.is_settled and self.own.is_settled

    @property
    def refusal(self) -> GpuhubError | None:
        """Return why the broker refuses the user; None if it does not."""
        return self.own.refusal or self.cluster.refusal


class LiveFeeds:
    """The feeds of all viewers, and how many pages and outputs they have open."""

    def __init__(
        self,
        cluster: ClusterSettings,
        make_broker: Callable[[], Any],
        user_tokens: UserTokens,
    ) -> None:
        self._settings = cluster
        self._make_broker = make_broker
        self._tokens = user_tokens
        self._clusters: dict[frozenset[str], Feed[RenderedCluster]] = {}
        self._own: dict[tuple[str, bool], Feed[OwnView]] = {}
        self._open: Counter[tuple[str, str]] = Counter()
        self._closed = asyncio.Event()

    @asynccontextmanager
    async def admit(self, kind: str, name: str, most: int) -> AsyncIterator[None]:
        """Count one more `kind` of a user for the duration of the context, after a moment if one is being closed.

        Raises:
            TooManyStreams: the user has too many open, or all users together have.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                while self._open[kind, name] >= most:
                    self._closed.clear()
                    await self._closed.wait()
        if self._open[kind, name] >= most:
            raise TooManyStreams(f"You have {most} {kind} open, which is the limit. Close one and reload this page.")
        if self._open.total() >= MAX_VIEWERS:
            raise TooManyStreams("Too many users have live pages open. Try again later.")
        self._open[kind, name] += 1
        try:
            yield
        finally:
            self._open[kind, name] -= 1
            self._open += Counter()  # drops those with a count of zero
            self._closed.set()

    @contextmanager
    def join(self, user: Any) -> Iterator[PageFeed]:
        """Join the feeds of the hub's `user`, whose session was just checked."""
        groups = find_user_groups(self._settings, user) & self._settings.access_groups
        key, token = (user.name, user.admin), self._tokens.get(user)
        cluster = _find_usable(self._clusters, groups, lambda: self._watch_cluster(groups))
        # The token is not renewed: a user who may not log in any more loses the page.
        own = _find_usable(self._own, key, lambda: self._make_broker().acting(token).watch_own())
        changed = asyncio.Event()
        with ExitStack() as stack:
            stack.callback(self._drop_closed)
            stack.enter_context(cluster.join(changed))
            stack.enter_context(own.join(changed))
            try:
                yield PageFeed(cluster, own, changed)
            finally:
                if isinstance(own.refusal, NotKnown):
                    self._tokens.forget(user)

    def _drop_closed(self) -> None:
        self._clusters = {groups: feed for groups, feed in self._clusters.items() if feed.is_open}
        self._own = {key: feed for key, feed in self._own.items() if feed.is_open}

    async def _watch_cluster(self, groups: Collection[str]) -> AsyncIterator[RenderedCluster]:
        views: AsyncIterator[ClusterView] = self._make_broker().watch_cluster(groups)
        async for view in views:
            yield RenderedCluster(view)


def _find_usable(feeds: dict[K, Feed[T]], key: K, open_stream: Callable[[], AsyncIterator[T]]) -> Feed[T]:
    """Return the feed with this key, or a new one where there is none or the broker has refused it."""
    if key not in feeds or feeds[key].refusal is not None:
        feeds[key] = Feed(open_stream)
    return feeds[key]
