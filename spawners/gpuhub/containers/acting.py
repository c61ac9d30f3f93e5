"""Users' own words to the broker: what a page does for somebody is asked with a token of theirs, so that the broker
itself decides what they may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: A token of this age is replaced, and one of twice this age is void, seconds.
FRESH_S = 300
#: The scope that reaches the broker, and nothing else.
SCOPE = "access:services!service=broker"
NOTE = "gpuhub's page of GPUs"


class Tokens:
    """A short-lived token of each user who lately opened a page, kept in memory alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[str, tuple[str, float]] = {}

    def of(self, user: Any) -> str:
        """A token of the hub's `user`, which lasts for some minutes more at least."""
        now = self._clock()
        known = self._tokens.get(user.name)
        if known is not None and now - known[1] < FRESH_S:
            return known[0]
        self._tokens = {name: made for name, made in self._tokens.items() if now - made[1] < FRESH_S}
        token: str = user.new_api_token(note=NOTE, expires_in=2 * FRESH_S, scopes=[SCOPE])
        self._tokens[user.name] = (token, now)
        return token

    def forget(self, user: Any) -> None:
        """The hub does not know the user's token any more."""
        self._tokens.pop(user.name, None)
