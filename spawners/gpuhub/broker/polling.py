"""Long polls: an answer as soon as there is news, without waking everybody for everything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpuhub.broker.clock import Clock, wait_event
from gpuhub.broker.ledger import Ledger

#: A long poll answers a mere change of place in the queue no sooner than this after it began, seconds.
PLACE_NEWS_S = 2.0

#: Gives a version, and whether what is looked at waits in the queue.
Look = Callable[[], Awaitable[tuple[int, bool]]]


async def poll(
    *,
    ledger: Ledger,
    clock: Clock,
    what: str,
    look: Look,
    version: int | None,
    wait_s: float,
) -> None:
    """Return when `look` gives another version than `version`, at the latest after `wait_s`.

    `what` is the id of the lease or job that is looked at. `look` also tells whether it still waits in the queue:
    then the news is about its place, and is held back a little, or each grant would make everybody in a long queue
    ask anew at once.
    """
    began = clock.monotonic()
    while version is not None:
        changed = ledger.watch(what)
        found, is_waiting = await look()
        if found != version and not is_waiting:
            return
        end = began + (wait_s if found == version else min(wait_s, PLACE_NEWS_S))
        left = end - clock.monotonic()
        if left <= 0:
            return
        # Nobody is woken for a place in the queue: it is looked at now and then.
        await wait_event(changed, min(left, PLACE_NEWS_S) if is_waiting else left)
