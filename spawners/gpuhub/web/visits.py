"""The pages that lead a browser to a job's server or a service: the hub knows the user, the broker opens the visit."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import responses
from typing import Any

from tornado import web

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.errors import NotKnown, TooManyRequests
from gpuhub.broker_api.schemas import VisitView
from gpuhub.common.errors import GpuhubError
from gpuhub.web.handlers import BROKER_SCOPE, BrokerUserHandler, http_status

#: Lifetime of a visit's token, and the age up to which further visits of the same session use it; seconds.
TOKEN_S = 12 * 3600
REUSE_S = 1800
#: Maximum number of sessions with visit tokens for each user: a browser may name any session.
MAX_SESSIONS = 16
TOKEN_NOTE = "visits to servers of jobs and services"  # noqa: S105 - a description
_MAX_TARGET = 4096


class VisitTokens:
    """Tokens of visits, in memory alone. The hub revokes them at the end of the session in which they were made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Tokens by user and session.
        self._tokens: dict[tuple[str, str], tuple[str, float]] = {}

    def get(self, user: Any, session: str) -> str:
        """Return a token of the hub's `user` that reaches the broker and nothing else.

        Raises:
            TooManyRequests: The user has visits in too many sessions.
        """
        now = self._clock()
        self._tokens = {key: entry for key, entry in self._tokens.items() if now - entry[1] < REUSE_S}
        key = (user.name, session)
        if key not in self._tokens:
            if sum(name == user.name for name, _ in self._tokens) >= MAX_SESSIONS:
                raise TooManyRequests(f"Visits in {MAX_SESSIONS} sessions are the limit. Try again in half an hour.")
            token = user.new_api_token(
                note=TOKEN_NOTE, expires_in=TOKEN_S, scopes=[BROKER_SCOPE], session_id=session or None
            )
            self._tokens[key] = (token, now)
        return self._tokens[key][0]

    def forget(self, user: Any, session: str) -> None:
        """Drop the token of a session, which the hub no longer accepts."""
        self._tokens.pop((user.name, session), None)


class _PageError(web.HTTPError):
    """An error whose text JupyterHub's error page shows."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, reason=responses.get(status))
        self.jupyterhub_message = text


class VisitHandler(BrokerUserHandler):
    """Opens a visit and goes there; subclasses say what is visited."""

    #: Shared by all requests.
    visit_tokens = VisitTokens()

    @web.authenticated
    async def get(self, name: str) -> None:
        """Redirect to the visit's address, or show why there is no way to it."""
        self.check_scope()
        target = self.get_query_argument("to", "/", strip=False)[:_MAX_TARGET]
        user, session = self.current_user, self.get_session_cookie() or ""
        try:
            for is_last in (False, True):
                token = self.visit_tokens.get(user, session)
                try:
                    visit = await self.open_visit(self.broker.acting(token), name)
                    break
                except NotKnown:
                    if is_last:
                        raise
                    self.visit_tokens.forget(user, session)
        except GpuhubError as error:
            raise _PageError(http_status(error), str(error)) from None
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        # A path of this host in any case, whatever `to` has.
        self.redirect(visit.path + target.lstrip("/\\"), status=303)

    async def open_visit(self, broker: AsyncBrokerClient, name: str) -> VisitView:
        """Open a visit in the name of the user.

        Raises:
            GpuhubError: The broker refuses.
        """
        raise NotImplementedError


class JobPortHandler(VisitHandler):
    """GET `/hub/gpuhub/ports/JOB?to=/path`: to a job's server."""

    PATH = r"/gpuhub/ports/([A-Za-z0-9-]{1,64})"

    async def open_visit(self, broker: AsyncBrokerClient, name: str) -> VisitView:
        return await broker.open_visit(name)


class ServiceHandler(VisitHandler):
    """GET `/hub/gpuhub/services/NAME?to=/path`: to a service."""

    PATH = r"/gpuhub/services/([a-z0-9-]{1,64})"

    async def open_visit(self, broker: AsyncBrokerClient, name: str) -> VisitView:
        return await broker.open_service_visit(name)
