"""Limits of how often each caller may do something, as token buckets."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gpuhub.broker_api.errors import TooManyRequests

#: Maximum number of callers that are tracked; the full burst is available again to a caller that was dropped.
MAX_CALLERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A rate with bursts, as a token bucket has them."""

    #: Number at once.
    burst: float
    #: Number per second in the long run.
    per_second: float
    #: What is counted, for users.
    what: str = "requests"


class RateLimiter:
    """A token bucket for each caller."""

    def __init__(self, rate: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        #: What each caller had left, and when; the most recent caller is last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, caller: str, count: float = 1) -> None:
        """Check that the caller has `count` left.

        Raises:
            TooManyRequests: the caller has not; with the time until then.
        """
        lacking = count - self._now_left(caller)
        if lacking > 0:
            rate, wait_s = self._rate, lacking / self._rate.per_second
            limit = f"at most {rate.per_second:g} per second are allowed, and {rate.burst:g} at once"
            text = f"too many {rate.what}: {limit}; try again in {math.ceil(wait_s)} s"
            raise TooManyRequests(text, retry_after_s=wait_s)

    def acquire(self, caller: str, count: float = 1) -> None:
        """Count something `count` times.

        Raises:
            TooManyRequests: the caller has less left.
        """
        self.check(caller, count)
        self._keep(caller, self._now_left(caller) - count)

    def reserve(self, caller: str) -> float:
        """Count something that is not refused, and return the time after which the caller may go on, seconds."""
        left = self._now_left(caller) - 1
        self._keep(caller, left)
        return max(0.0, -left / self._rate.per_second)

    def refund(self, caller: str, count: float = 1) -> None:
        """Cancel the count."""
        self._keep(caller, min(self._now_left(caller) + count, self._rate.burst))

    def _now_left(self, caller: str) -> float:
        left, at = self._left.get(caller, (self._rate.burst, 0.0))
        return min(left + (self._clock() - at) * self._rate.per_second, self._rate.burst)

    def _keep(self, caller: str, left: float) -> None:
        self._left[caller] = (left, self._clock())
        self._left.move_to_end(caller)
        while len(self._left) > MAX_CALLERS:
            self._left.popitem(last=False)
