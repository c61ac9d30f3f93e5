"""Handlers of gpuhub's pages in the hub: their base, users' tokens, and the cluster's state for the spawn form."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from jupyterhub.handlers.base import BaseHandler
from tornado import web

from gpuhub.broker.api.auth import ADMIN_SCOPE
from gpuhub.broker_api.errors import NotKnown, TooManyRequests
from gpuhub.broker_api.schemas import ClusterView
from gpuhub.common.errors import GpuhubError, InvalidRequest, NotAllowed, NotFound, Unavailable
from gpuhub.config.settings import ClusterSettings
from gpuhub.web.spawn_form import find_user_groups, render_parts

T = TypeVar("T")

#: Age up to which a view is used, seconds; less than the time between two refreshes of a page.
CACHE_S = 1.5
#: Time limit for the broker's answer, seconds. A page that refreshes itself should rather report that there is none.
BROKER_TIMEOUT_S = 2.5
#: Largest body of an action of a page, bytes. Each mistake in a body is an error, and the event loop serves everybody.
MAX_ACTION_BYTES = 16 * 1024


def check_action_size(body: bytes) -> None:
    """Refuse the body of a request of a page that is larger than any action.

    Raises:
        InvalidRequest: It is.
    """
    if len(body) > MAX_ACTION_BYTES:
        raise InvalidRequest(
            f"this is not a valid request of the page: it has {len(body)} bytes, of at most {MAX_ACTION_BYTES}"
        )


class ClusterCache:
    """The cluster's state for all pages of the hub, which is fetched once for many viewers."""

    def __init__(self, fetch: Callable[[], Awaitable[ClusterView]]) -> None:
        self._fetch = fetch
        self._view: ClusterView | None = None
        self._fetched_at = 0.0
        self._fetch_task: asyncio.Task[ClusterView] | None = None

    async def get(self) -> ClusterView | None:
        """Return the cluster's state of a moment ago, or None while the broker does not answer."""
        loop = asyncio.get_running_loop()
        if self._view is not None and loop.time() - self._fetched_at < CACHE_S:
            return self._view
        if self._fetch_task is None or self._fetch_task.done():
            self._fetch_task = asyncio.ensure_future(self._fetch())
        try:
            async with asyncio.timeout(BROKER_TIMEOUT_S):
                self._view = await asyncio.shield(self._fetch_task)
        except (Unavailable, TooManyRequests, TimeoutError):
            self._view = None
        self._fetched_at = loop.time()
        return self._view


#: Age at which a token is replaced, seconds; it expires at twice this age.
TOKEN_RENEW_AFTER_S = 300
#: The scope that gives access to the broker and nothing else.
BROKER_SCOPE = "access:services!service=broker"
PAGE_NOTE = "gpuhub's page of GPUs"


class ClusterCaches:
    """The cluster's state as users see it: one cache for all who are in the same of the groups that matter."""

    def __init__(self, cluster: ClusterSettings, fetch: Callable[[Collection[str]], Awaitable[ClusterView]]) -> None:
        """`fetch` returns the state as a user in these groups sees it."""
        self._cluster = cluster
        self._access_groups = cluster.access_groups
        self._fetch = fetch
        self._caches: dict[frozenset[str], ClusterCache] = {}

    async def get(self, user: Any) -> ClusterView | None:
        """Return the state for the hub's `user` of a moment ago, or None while the broker does not answer."""
        groups = find_user_groups(self._cluster, user) & self._access_groups
        if groups not in self._caches:
            self._caches[groups] = ClusterCache(partial(self._fetch, groups))
        return await self._caches[groups].get()


class UserTokens:
    """Short-lived tokens of users who opened a page recently, in memory alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[str, tuple[str, float]] = {}

    def get(self, user: Any) -> str:
        """Return a token of the hub's `user` that is valid for at least some minutes."""
        now = self._clock()
        cached, created_at = self._tokens.get(user.name, ("", 0.0))
        if cached and now - created_at < TOKEN_RENEW_AFTER_S:
            return cached
        self._tokens = {name: entry for name, entry in self._tokens.items() if now - entry[1] < TOKEN_RENEW_AFTER_S}
        scopes = [BROKER_SCOPE, *([ADMIN_SCOPE] if user.admin else [])]
        token: str = user.new_api_token(note=PAGE_NOTE, expires_in=2 * TOKEN_RENEW_AFTER_S, scopes=scopes)
        self._tokens[user.name] = (token, now)
        return token

    def forget(self, user: Any) -> None:
        """Drop the user's token, which the hub no longer accepts."""
        self._tokens.pop(user.name, None)


class GpuhubHandler(BaseHandler):  # type: ignore[misc] # JupyterHub is untyped
    """Base of gpuhub's pages, which browsers open with a session; like JupyterHub's pages, they refuse tokens."""

    def initialize(
        self,
        *,
        make_broker: Callable[[], Any],
        cluster: ClusterSettings,
        cluster_caches: ClusterCaches,
        user_tokens: UserTokens,
    ) -> None:
        """Store the shared objects; called by Tornado."""
        self.broker = make_broker()
        self.cluster = cluster
        self.cluster_caches = cluster_caches
        self.user_tokens = user_tokens

    def require_user(self) -> Any:
        """Return the user who is logged in; without one answer 403 instead of a redirect to the login."""
        if self.current_user is None:
            raise web.HTTPError(403)
        return self.current_user

    def finish_json(self, value: object, status: int = 200) -> None:
        """Send `value` as JSON."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(value))


class BrokerUserHandler(GpuhubHandler):
    """Base of the handlers that call the broker as the user."""

    def check_scope(self) -> None:
        """Refuse a token without access to the broker; a browser's session has it."""
        if not {BROKER_SCOPE, "access:services"} & self.expanded_scopes:
            raise web.HTTPError(403)

    async def call_as_user(self, user: Any, ask: Callable[[Any], Awaitable[T]]) -> T:
        """Call the broker with the user's token and return the result.

        Raises:
            GpuhubError: The broker refuses or does not answer in time.
        """
        try:
            async with asyncio.timeout(4 * BROKER_TIMEOUT_S):
                try:
                    return await ask(self.broker.acting(self.user_tokens.get(user)))
                except NotKnown:
                    self.user_tokens.forget(user)
                    return await ask(self.broker.acting(self.user_tokens.get(user)))
        except TimeoutError:
            raise Unavailable("The GPU broker does not answer. Try again later.") from None

    def finish_error(self, error: GpuhubError) -> None:
        """Send the error's text with its HTTP status."""
        self.finish_json({"message": str(error)}, http_status(error))

    async def finish_error_page(self, error: GpuhubError) -> None:
        """Send a page with the error's text: JupyterHub's own page for an HTTPError 404 shows no reason."""
        status = http_status(error)
        self.set_status(status)
        phrase = HTTPStatus(status).phrase
        self.finish(
            await self.render_template("error.html", status_code=status, status_message=phrase, message=str(error))
        )


def http_status(error: GpuhubError) -> int:
    """Return the HTTP status of the hub's answer about an error of the broker."""
    kinds = ((Unavailable, 503), (TooManyRequests, 503), (NotAllowed, 403), (InvalidRequest, 400), (NotFound, 404))
    return next((status for kind, status in kinds if isinstance(error, kind)), 409)


class LaptopWheelHandler(web.StaticFileHandler):
    """GET: the wheel of gpu-launch in the hub's version, for `pip install`, which has no session."""

    #: The one file name that is served.
    PATH = r"/gpuhub/(gpu_launch-[0-9][0-9.]*-py3-none-any\.whl)"

    def set_extra_headers(self, path: str) -> None:
        """Make caches ask again: a newer build of a version keeps its name."""
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")


class ClusterHandler(GpuhubHandler):
    """GET: `{"cluster": ClusterView, "parts": {name: html}}` for any user who is logged in."""

    async def get(self) -> None:
        """Send the current state, or parts that report that the broker does not answer.

        With `?parts` the cluster itself is omitted, which the form's script does not use.
        """
        user = self.require_user()
        view = await self.cluster_caches.get(user)
        answer: dict[str, Any] = {"parts": render_parts(self.cluster, view, find_user_groups(self.cluster, user))}
        if "parts" not in self.request.query_arguments:
            answer["cluster"] = None if view is None else view.model_dump(mode="json")
        self.finish_json(answer)
