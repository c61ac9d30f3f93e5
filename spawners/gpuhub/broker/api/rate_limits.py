"""Limits of requests per second for each caller, so that one caller cannot slow down the others.

They are no quotas: `admission` and the scheduler limit GPUs, requests and jobs of a user.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gpuhub.broker_api.errors import TooManyRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A rate with bursts, as a token bucket has them."""

    #: Requests at once.
    burst: float
    #: Requests per second in the long run.
    per_second: float


#: Requests of one user; a notebook that launches, or a command that polls, sends a few per second.
REQUESTS = RateLimit(burst=400, per_second=50)
#: Unknown tokens from one address, since the hub has to check each of them.
WRONG_TOKENS = RateLimit(burst=100, per_second=5)
#: Maximum number of callers that are tracked; the full burst is available again to a caller that was dropped.
MAX_CALLERS = 4096


class RateLimiter:
    """A token bucket for each caller."""

    def __init__(self, rate: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        #: Requests that each caller had left, and when; the most recent caller is last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def acquire(self, caller: str) -> None:
        """Count one request.

        Raises:
            TooManyRequests: the caller has none left.
        """
        left = self._now_left(caller)
        if left < 1:
            raise TooManyRequests(
                f"too many requests: at most {self._rate.per_second:g} per second are allowed; try again later"
            )
        self._keep(caller, left - 1)

    def refund(self, caller: str) -> None:
        """Cancel the count of one request."""
        self._keep(caller, min(self._now_left(caller) + 1, self._rate.burst))

    def _now_left(self, caller: str) -> float:
        left, at = self._left.get(caller, (self._rate.burst, 0.0))
        return min(left + (self._clock() - at) * self._rate.per_second, self._rate.burst)

    def _keep(self, caller: str, left: float) -> None:
        self._left[caller] = (left, self._clock())
        self._left.move_to_end(caller)
        while len(self._left) > MAX_CALLERS:
            self._left.popitem(last=False)
