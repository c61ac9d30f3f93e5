"""Which sleeping nodes are woken for the queue."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from gpuhub.domain.power_policy import MAX_TRIES, choose_needed


def build_queue(*requests: Collection[str]) -> Callable[[Collection[str]], frozenset[str]]:
    """Return the starts of requests that each need all of these nodes awake; an empty one starts at once."""
    return lambda awake: frozenset(str(number) for number, needs in enumerate(requests) if set(needs) <= set(awake))


@pytest.mark.parametrize(
    ("requests", "asleep", "needed"),
    [
        ([], ["a", "b"], []),
        ([[]], ["a", "b"], []),
        ([["c"]], ["a", "b"], []),
        ([["b"]], ["a", "b", "c"], ["b"]),
        ([["a", "c"]], ["a", "b", "c"], ["a", "c"]),
        ([["a"], ["c"]], ["a", "b", "c"], ["a", "c"]),
    ],
)
def test_as_few_as_the_requests_need(requests: list[list[str]], asleep: list[str], needed: list[str]) -> None:
    """None for requests that start anyway, or that no sleeping node helps; all nodes of a gang."""
    assert choose_needed(build_queue(*requests), asleep) == needed


def test_first_of_equal_nodes_sleep_on() -> None:
    """One of three would do for a request."""
    assert choose_needed(lambda awake: frozenset("r" if awake else ""), ["large", "middle", "small"]) == ["small"]


def test_work_is_bounded() -> None:
    """With many sleeping nodes some are woken that could have slept on, rather than each being tried."""
    calls = []

    def find(awake: Collection[str]) -> frozenset[str]:
        calls.append(len(awake))
        return frozenset("r" if awake else "")

    asleep = [f"n{number}" for number in range(40)]
    assert len(choose_needed(find, asleep)) == 40 - MAX_TRIES
    assert len(calls) == MAX_TRIES + 2
