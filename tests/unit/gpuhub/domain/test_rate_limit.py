"""How often a caller may do something: so many at once, so many a second, and when it may continue."""

from __future__ import annotations

import itertools

import pytest

from gpuhub.broker_api.errors import TooManyRequests
from gpuhub.domain import rate_limit
from gpuhub.domain.rate_limit import RateLimit, RateLimiter


def test_rate_limiter_refills_and_forgets_idle_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many at once, then so many a second; and only so many callers are known of."""
    monkeypatch.setattr(rate_limit, "MAX_CALLERS", 3)
    now = [0.0]
    budget = RateLimiter(RateLimit(burst=2, per_second=1), lambda: now[0])

    def count() -> int:
        for number in itertools.count():
            try:
                budget.acquire("ada")
            except TooManyRequests:
                return number
        raise AssertionError

    assert count() == 2
    now[0] += 1.0
    assert count() == 1
    now[0] += 100.0
    assert count() == 2
    for other in ("ben", "cid", "dan"):
        budget.acquire(other)
    assert count() == 2
    assert len(budget._left) == 3


def test_a_refusal_says_when_to_come_again() -> None:
    """After that time, and not before, as many are allowed; what is refused is not counted."""
    now = [0.0]
    limiter = RateLimiter(RateLimit(burst=100, per_second=2, what="leases and jobs created"), lambda: now[0])
    limiter.acquire("ada", 60)
    with pytest.raises(TooManyRequests) as refused:
        limiter.acquire("ada", 61)
    assert refused.value.retry_after_s == pytest.approx(10.5)
    assert str(refused.value) == (
        "too many leases and jobs created: at most 2 per second are allowed, and 100 at once; try again in 11 s"
    )
    limiter.acquire("ben", 100)
    now[0] += 10.4
    with pytest.raises(TooManyRequests):
        limiter.check("ada", 61)
    now[0] += 0.1
    limiter.acquire("ada", 61)
    limiter.refund("ada", 5000)
    limiter.acquire("ada", 100)
    with pytest.raises(TooManyRequests):
        limiter.acquire("ada")


def test_reservations_wait_for_each_other() -> None:
    """What is counted without a refusal has a time after which it is within the limit; others have their own."""
    now = [0.0]
    limiter = RateLimiter(RateLimit(burst=2, per_second=10), lambda: now[0])
    assert [limiter.reserve("ada") for _ in range(4)] == [0.0, 0.0, pytest.approx(0.1), pytest.approx(0.2)]
    assert limiter.reserve("ben") == 0.0
    now[0] += 0.3
    assert [limiter.reserve("ada") for _ in range(2)] == [0.0, pytest.approx(0.1)]
