"""Ends what users still have after the access rules, or an administrator, have taken their access away.

JupyterHub checks users when they send a request. Containers, jobs and their GPUs send none: this loop in the hub's
process compares the owners of leases with the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from jupyterhub import orm
from jupyterhub.apihandlers.base import APIHandler
from tornado import web

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.common.errors import GpuhubError

log = logging.getLogger(__name__)

#: Interval between two comparisons, seconds.
PERIOD_S = 20.0
#: Comparisons in a row that must refuse an owner, since a login server may give one wrong answer.
REFUSALS = 2
#: Scope with which a service may revoke users' tokens.
REVOKE_SCOPE = "custom:gpuhub:revoke"


class AccessEnforcer:
    """Ends leases, tokens and sessions of owners who may not log in any more."""

    def __init__(self, *, users: Any, authenticator: Any, broker: AsyncBrokerClient) -> None:
        """`users` are the hub's users by their rows in the database, whose session is `users.db`."""
        self._users = users
        self._authenticator = authenticator
        self._broker = broker
        self._refusals: Mapping[str, int] = {}

    async def run(self) -> None:
        while True:
            try:
                await self.run_once()
            except GpuhubError as error:
                log.info("users' access is compared later: %s", error)
            except Exception:
                log.exception("the comparison of users' access failed unexpectedly")
            await asyncio.sleep(PERIOD_S)

    async def run_once(self) -> None:
        """Compare all owners of leases and users of shares with the rules, and end those refused often enough."""
        shares = await self._broker.shares()
        sharing = {name for share in shares for name in (share.owner, share.viewer)}
        owners = {lease.owner for lease in await self._broker.leases()} | sharing
        refused = {owner: self._refusals.get(owner, 0) + 1 for owner in owners if await self._is_refused(owner)}
        self._refusals = refused
        for owner, times in refused.items():
            if times < REFUSALS:
                continue
            user = find_user(self._users, owner)
            tokens = 0 if user is None else revoke_access(user)
            ended = await self._broker.end_shares_of_user(owner)
            leases = await self._broker.release_all(owner)
            log.warning(
                "%s may not use this hub any more: %d leases, %d shares and %d tokens ended",
                owner, leases, len(ended), tokens,
            )  # fmt: skip

    async def _is_refused(self, owner: str) -> bool:
        user = find_user(self._users, owner)
        if user is None:
            return True
        try:
            return not await self._authenticator.refresh_user(user)
        except Exception as error:  # noqa: BLE001 - a login server that does not answer takes no access away
            log.info("whether %s may still use this hub is not known: %s", owner, error)
            return False


def find_user(users: Any, name: str) -> Any:
    """Return the hub's user of this name, or None."""
    row = orm.User.find(users.db, name)
    return None if row is None else users[row]


def revoke_access(user: Any) -> int:
    """Revoke a user's tokens and browser sessions; return the number of tokens."""
    row = user.orm_user
    tokens = list(row.api_tokens)
    for token in tokens:
        user.db.delete(token)
    # Session cookies contain it.
    row.cookie_id = orm.new_token()
    user.db.commit()
    return len(tokens)


class RevokeHandler(APIHandler):  # type: ignore[misc] # JupyterHub is untyped
    """POST: revoke all tokens and sessions of a user, for `gpuhub user end`."""

    PATH = r"/api/gpuhub/users/([^/]+)/revoke"

    def post(self, name: str) -> None:
        """Send `{"tokens": NUMBER}`."""
        if REVOKE_SCOPE not in self.expanded_scopes:
            raise web.HTTPError(403)
        user = self.find_user(name)
        if user is None:
            raise web.HTTPError(404)
        self.write({"tokens": revoke_access(user)})
