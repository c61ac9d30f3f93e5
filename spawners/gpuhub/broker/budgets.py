"""How much one caller may ask in a while: what comes faster is refused before it costs anybody else anything."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gpuhub.broker.refusals import TooManyRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many at once, and so many a second in the long run."""

    at_once: float
    per_s: float


#: A user's requests. A notebook that launches, or a command line that looks, sends a few a second.
REQUESTS = Rate(at_once=400, per_s=50)
#: Tokens that the hub does not know, from one address: each costs the hub a look.
WRONG_TOKENS = Rate(at_once=100, per_s=5)
#: Callers that are known of at once; who was forgotten begins anew.
CAPACITY = 4096


class Budget:
    """What each caller has left."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        #: What was left, and when; who spent last stands last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, caller: str) -> None:
        """One more.

        Raises:
            TooManyRequests: there was none left.
        """
        left = self._now_left(caller)
        if left < 1:
            raise TooManyRequests(
                f"too many requests: {self._rate.per_s:g} a second are the most in the long run; try again later"
            )
        self._keep(caller, left - 1)

    def give_back(self, caller: str) -> None:
        """One was not needed."""
        self._keep(caller, min(self._now_left(caller) + 1, self._rate.at_once))

    def _now_left(self, caller: str) -> float:
        left, at = self._left.get(caller, (self._rate.at_once, 0.0))
        return min(left + (self._clock() - at) * self._rate.per_s, self._rate.at_once)

    def _keep(self, caller: str, left: float) -> None:
        self._left[caller] = (left, self._clock())
        self._left.move_to_end(caller)
        while len(self._left) > CAPACITY:
            self._left.popitem(last=False)
