"""Checks that users whom a request names exist."""

from __future__ import annotations

from typing import Protocol

from gpuhub.common.errors import NotFound


class UserDirectory(Protocol):
    """The part of the hub's API that knows users."""

    async def has_user(self, name: str) -> bool:
        """Return whether the hub has a user of this name, which it has after the first login.

        Raises:
            HubUnreachable: the hub does not answer.
        """
        ...


async def require_user(users: UserDirectory, name: str) -> None:
    """Check that the hub has a user of this name.

    Raises:
        NotFound: it has none.
        HubUnreachable: the hub does not answer.
    """
    if not await users.has_user(name):
        raise NotFound(f"the hub has no user {name!r}: a user exists there after the first login")
