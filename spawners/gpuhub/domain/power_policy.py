"""Which sleeping nodes the queue needs, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

#: Nodes that are tried to be left asleep; each costs a scheduling cycle.
MAX_TRIES = 16


def choose_needed(find_startable: Callable[[Collection[str]], frozenset[str]], asleep: Sequence[str]) -> list[str]:
    """Return sleeping nodes with which as many waiting requests start as with all of them, and no more than that needs.

    Args:
        find_startable: Returns the waiting requests that would start if these nodes were awake as well.
        asleep: The sleeping nodes; those that come first are rather left asleep.
    """
    startable = find_startable(asleep)
    if startable <= find_startable(()):
        return []
    needed = list(asleep)
    for name in asleep[:MAX_TRIES]:
        others = [other for other in needed if other != name]
        if find_startable(others) >= startable:
            needed = others
    return needed
